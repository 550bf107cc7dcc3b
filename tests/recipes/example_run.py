"""Two epochs on the same 22 labelled examples, however they are spread over batches and processes.

Run by test_example_weighted.py in its own process, and by it under torchrun: `example_run.py KIND BATCH ACCUMULATION
FILE`; `--resume` behind it starts from the checkpoint after the fourth step, inside the second epoch.
"""

import json
import os
import sys
from pathlib import Path


os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes"))

import datasets
import numpy as np
import torch
from example_weighted import ExampleWeightedTrainer, KeyedExamples
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
    default_data_collator,
    set_seed,
)


SEED, TRAINING, HELD_OUT, STEP = 3, 22, 13, 8
# Weights are wide, so that the losses of two sets of examples differ by more than what is tolerated.
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "initializer_range": 0.5,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def build_model(kind):
    set_seed(SEED)
    if kind == "images":
        return ViTForImageClassification(ViTConfig(**SIZES, image_size=4, patch_size=2, num_channels=1, num_labels=3))
    return BertForSequenceClassification(BertConfig(**SIZES, vocab_size=20, max_position_embeddings=8, num_labels=1))


def encode_image(columns, keys):
    """Pixels, and noise that depends on the key alone: what an augmentation does."""
    examples = []
    for pixels, key in zip(columns["pixels"], keys, strict=True):
        noise = np.random.default_rng([SEED, *key]).normal(size=(1, 4, 4))
        values = np.asarray(pixels).reshape(1, 4, 4) + noise
        examples.append({"pixel_values": torch.tensor(values, dtype=torch.float32)})
    return examples


def encode_text(columns, keys):
    return [{"input_ids": torch.tensor(ids)} for ids in columns["input_ids"]]


def examples(kind, count, seed):
    generator = np.random.default_rng(seed)
    if kind == "images":
        pixels, labels = generator.normal(size=(count, 16)), generator.integers(3, size=count)
        rows = datasets.Dataset.from_dict({"pixels": pixels.tolist(), "labels": labels.tolist()})
        return KeyedExamples(rows, encode_image)
    ids, labels = generator.integers(20, size=(count, 6)), generator.normal(size=count)
    return KeyedExamples(
        datasets.Dataset.from_dict({"input_ids": ids.tolist(), "labels": labels.tolist()}), encode_text
    )


def run(kind, batch, accumulation, output_dir, eval_batch=4, resume=None, **extra):
    """Trains; returns logged losses and gradient norms, held-out figures, processes, fingerprint of the batches."""
    settings = {
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": accumulation,
        "per_device_eval_batch_size": eval_batch,
        "max_steps": 6,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_strategy": "no",
        "report_to": "none",
        "seed": SEED,
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        **extra,
    }
    trainer = ExampleWeightedTrainer(
        model=build_model(kind),
        args=TrainingArguments(output_dir=str(output_dir), **settings),
        train_dataset=examples(kind, TRAINING, 0),
        eval_dataset=examples(kind, HELD_OUT, 1),
        data_collator=default_data_collator,
        compute_metrics=lambda prediction: {"sum": float(prediction.predictions.sum())},
    )
    trainer.train(resume_from_checkpoint=resume)
    trainer.batch_fingerprint.combine()
    history = trainer.state.log_history
    return {
        "trainer": trainer,
        "fingerprint": trainer.batch_fingerprint.result(trainer.state.global_step),
        "processes": trainer.accelerator.num_processes,
        "distributed": torch.distributed.is_initialized() and torch.distributed.get_world_size(),
        "epoch": trainer.state.epoch,
        **{
            name: [entry[name] for entry in history if name in entry]
            for name in ("loss", "grad_norm", "eval_loss", "eval_examples", "eval_sum")
        },
    }


def main():
    kind, batch, accumulation, file, *resume = sys.argv[1:]
    folder = Path(file).parent / "out"
    checkpoint = str(folder / "checkpoint-4") if resume else None
    saved = {"save_strategy": "steps", "save_steps": 4}
    result = run(kind, int(batch), int(accumulation), folder, resume=checkpoint, **saved)
    trainer = result.pop("trainer")
    trainer.end()
    if trainer.args.process_index == 0:
        Path(file).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
