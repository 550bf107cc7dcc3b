"""Optimizer steps on the same sequences, however they are spread over batches and processes.

Run by test_token_weighted.py in its own process, and by it under torchrun: `loss_run.py TYPE BATCH ACCUMULATION
SEQUENCES STEPS FILE`; a number behind it starts from the checkpoint after that step.
"""

import json
import os
import subprocess
import sys
from pathlib import Path


os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes"))

import datasets
import numpy as np
import torch
from examples import BlockDataset, EpochCallback, next_token_examples
from launching import group_threads, in_processes
from masking import EVALUATION_MASK_SEED, TokenMasker
from token_weighted import TokenWeightedTrainer
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    ModernBertConfig,
    RobertaConfig,
    TrainingArguments,
    set_seed,
)
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
# As decoders: one whose loss Transformers shifts and normalises by the count, one with a loss of its own kind, and an
# encoder's architecture.
DECODERS = {
    "llama": lambda: LlamaConfig(**SIZES, bos_token_id=1, eos_token_id=2, initializer_range=0.2),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
        bos_token_id=1,
        eos_token_id=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        initializer_range=0.2,
    ),
    "bert-decoder": lambda: BertConfig(**SIZES, **NO_DROPOUT, is_decoder=True, initializer_range=0.2),
}


class FakeTokenizer:
    """What a masker reads of a tokenizer."""

    mask_token_id, all_special_ids, name_or_path = 3, [0, 1, 2, 3, 4], "fake"

    def __len__(self):
        return VOCABULARY

    def get_vocab(self):
        return {str(number): number for number in range(VOCABULARY)}


def masked(count, seed, data_seed):
    return BlockDataset(_rows(count, data_seed), TokenMasker(FakeTokenizer(), 0.15, seed))


def examples(model_type, count, seed, data_seed):
    """What the model is trained on: masked tokens, or next tokens for a decoder."""
    if model_type not in DECODERS:
        return masked(count, seed, data_seed)
    # Sequences of several lengths, as far as the loss goes: a step's batches then differ in what they predict.
    return BlockDataset(_rows(count, data_seed), _next_tokens_of_some)


def _rows(count, data_seed):
    rows = np.random.default_rng(data_seed).integers(5, VOCABULARY, size=(count, LENGTH))
    return datasets.Dataset.from_dict({"input_ids": rows.tolist()})


def _next_tokens_of_some(input_ids, epoch, indices):
    made = next_token_examples(input_ids, epoch, indices)
    for labels, index in zip(made["labels"], indices, strict=True):
        labels[2 + index % (LENGTH - 2) :] = -100
    return made


def build_model(model_type):
    set_seed(SEED)
    if model_type in DECODERS:
        return AutoModelForCausalLM.from_config(DECODERS[model_type]())
    return AutoModelForMaskedLM.from_config(CONFIGS[model_type]())


def run(model_type, batch, accumulation, output_dir, eval_batch=4, steps=3, resume=None, sequences=32, **extra):
    """Trains; returns the trainer, logged losses and gradient norms, held-out losses, processes, fingerprint."""
    train, held_out = examples(model_type, sequences, SEED, 0), examples(model_type, 13, EVALUATION_MASK_SEED, 1)
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
        **{"save_strategy": "no", "eval_on_start": True, **extra},
        report_to="none",
        seed=SEED,
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = TokenWeightedTrainer(
        offset=int(model_type in DECODERS),
        model=build_model(model_type),
        args=arguments,
        train_dataset=train,
        eval_dataset=held_out,
        data_collator=collator,
        callbacks=[EpochCallback(train)],
    )
    trainer.train(resume_from_checkpoint=resume)
    trainer.batch_fingerprint.combine()
    history = trainer.state.log_history
    return {
        "trainer": trainer,
        "epoch": trainer.state.epoch,
        "fingerprint": trainer.batch_fingerprint.result(steps),
        "processes": trainer.accelerator.num_processes,
        "distributed": torch.distributed.is_initialized() and torch.distributed.get_world_size(),
        "loss": [entry["loss"] for entry in history if "loss" in entry],
        "grad_norm": [entry["grad_norm"] for entry in history if "grad_norm" in entry],
        "eval_loss": [entry["eval_loss"] for entry in history if "eval_loss" in entry],
        "eval_tokens": [entry["eval_predicted_tokens"] for entry in history if "eval_loss" in entry],
    }


def in_two_processes(model_type, batch, accumulation, sequences, steps, *resume, file):
    """Runs this file under torchrun with two processes; what `run` returned there."""
    command = [
        *in_processes(2),
        __file__,
        *map(str, [model_type, batch, accumulation, sequences, steps, file, *resume]),
    ]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(file.read_text())
    assert result["processes"] == result["distributed"] == 2
    return result


def main():
    model_type, batch, accumulation, sequences, steps, file, *resume = sys.argv[1:]
    folder = Path(file).parent / "out"
    checkpoint = str(folder / f"checkpoint-{resume[0]}") if resume else None
    extra = {"save_strategy": "steps", "save_steps": 1, "eval_on_start": not resume}
    counts = {"sequences": int(sequences), "steps": int(steps)}
    result = run(model_type, int(batch), int(accumulation), folder, resume=checkpoint, **counts, **extra)
    trainer, threads = result.pop("trainer"), group_threads()
    trainer.end()
    if sys.platform == "linux":  # where threads have names
        assert threads, "nothing to leave behind"
        assert not group_threads()
    if trainer.args.process_index == 0:
        Path(file).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
