"""Three optimizer steps on the same 32 sequences, however they are spread over batches and processes.

Run by test_token_weighted.py in its own process, and by it under torchrun: `loss_run.py TYPE BATCH ACCUMULATION FILE`;
`--resume` behind it starts from the checkpoint after the first step.
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
from masking import EVALUATION_MASK_SEED, MaskedDataset, MaskEpochCallback, TokenMasker
from token_weighted import TokenWeightedTrainer
from transformers import AutoModelForMaskedLM, BertConfig, ModernBertConfig, RobertaConfig, TrainingArguments, set_seed
from transformers import default_data_collator as collator


LENGTH, VOCABULARY, SEED = 16, 300, 3
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
# The logits of a fresh model are so small that its loss is log(V) whatever the masks: wider weights tell them apart.
CONFIGS = {
    "bert": lambda: BertConfig(**SIZES, **NO_DROPOUT, initializer_range=0.2),
    "roberta": lambda: RobertaConfig(**SIZES, **NO_DROPOUT, bos_token_id=1, eos_token_id=2, initializer_range=0.2),
    "modernbert": lambda: ModernBertConfig(
        **SIZES, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2, initializer_range=0.2
    ),
}


class FakeTokenizer:
    """What a masker reads of a tokenizer."""

    mask_token_id, all_special_ids, name_or_path = 3, [0, 1, 2, 3, 4], "fake"

    def __len__(self):
        return VOCABULARY


def masked(count, seed, data_seed):
    rows = np.random.default_rng(data_seed).integers(5, VOCABULARY, size=(count, LENGTH))
    return MaskedDataset(
        datasets.Dataset.from_dict({"input_ids": rows.tolist()}), TokenMasker(FakeTokenizer(), 0.15, seed)
    )


def build_model(model_type):
    set_seed(SEED)
    return AutoModelForMaskedLM.from_config(CONFIGS[model_type]())


def run(model_type, batch, accumulation, output_dir, eval_batch=4, steps=3, resume=None, **extra):
    """Trains; returns logged losses and gradient norms, held-out losses, processes, fingerprint of the batches."""
    train, held_out = masked(32, SEED, 0), masked(13, EVALUATION_MASK_SEED, 1)
    arguments = TrainingArguments(
        output_dir=str(output_dir),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        per_device_eval_batch_size=eval_batch,
        max_steps=steps,
        learning_rate=1e-3,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        eval_on_start=True,
        **{"save_strategy": "no", **extra},
        report_to="none",
        seed=SEED,
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = TokenWeightedTrainer(
        model=build_model(model_type),
        args=arguments,
        train_dataset=train,
        eval_dataset=held_out,
        data_collator=collator,
        callbacks=[MaskEpochCallback(train)],
    )
    trainer.train(resume_from_checkpoint=resume)
    trainer.batch_fingerprint.combine()
    history = trainer.state.log_history
    return {
        "fingerprint": trainer.batch_fingerprint.result(steps),
        "processes": trainer.accelerator.num_processes,
        "distributed": torch.distributed.is_initialized() and torch.distributed.get_world_size(),
        "loss": [entry["loss"] for entry in history if "loss" in entry],
        "grad_norm": [entry["grad_norm"] for entry in history if "grad_norm" in entry],
        "eval_loss": [entry["eval_loss"] for entry in history if "eval_loss" in entry],
        "eval_tokens": [entry["eval_predicted_tokens"] for entry in history if "eval_loss" in entry],
    }


def main():
    model_type, batch, accumulation, file, *resume = sys.argv[1:]
    folder = Path(file).parent / "out"
    checkpoint = str(folder / "checkpoint-1") if resume else None
    result = run(
        model_type, int(batch), int(accumulation), folder, resume=checkpoint, save_strategy="steps", save_steps=1
    )
    if int(os.environ.get("RANK", "0")) == 0:
        Path(file).write_text(json.dumps(result))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
