"""What masked and next-token training ask of W_qk, on the built-in text: symmetry and directionality of the updates.

    python recipes/dynamics.py              # offline: some ten minutes on one core
    python recipes/dynamics.py --seed 1

One small pre-norm rotary model is trained three times from the same weights, on the same blocks in the same order. Two
things tell encoders from decoders, and the third run takes them apart:

| run | a token sees | and is asked for |
|---|---|---|
| `masked` | all others | itself, where it is masked |
| `next token` | those before it | the next one |
| `masked, causal` | those before it | itself, where it is masked |

Updates are those of `hf_symqk.qk_updates`, summed over held-out blocks, at the first weights and after training. All
runs are measured on about as many predicted tokens, in two disjoint halves: what differs between halves is chance.

Shape legend: `S` blocks, `N` tokens of a block.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from builtin_text import builtin_documents
from examples import IGNORED
from masking import TokenMasker
from modeling import DECODER
from packing import Packer, decoder_frame
from reporting import label_entropy
from tokenization import ENCODER_TOKENS, trained_tokenizer
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup, set_seed

import hf_symqk
from hf_symqk import QKUpdates, qk_updates


__all__ = ["Run", "main"]

BLOCK = 64
BATCH = 16
MASKED_SHARE = 0.15


@dataclass(frozen=True)
class Run:
    """
    One way of training.

    Attributes:
        is_causal (`bool`): Whether a token sees those before it alone.
        is_masked (`bool`): Whether it is asked for itself, masked, or for the next one.
    """

    is_causal: bool
    is_masked: bool

    def batch(self, blocks: Tensor, masker: TokenMasker, epoch: int) -> dict[str, Any]:
        """
        What the model gets.

        Args:
            blocks (`torch.Tensor` of shape `(S, N)`): Token ids.
            masker (`TokenMasker`): Masks them, if this run does.
            epoch (`int`): Part of the key of the masks.

        Returns:
            `dict`: Keyword arguments of its forward, which then gives a loss.
        """
        if self.is_masked:
            examples = masker(blocks.numpy(), epoch, range(len(blocks)))
            inputs, labels = examples["input_ids"], examples["labels"]
        else:
            inputs, labels = blocks, F.pad(blocks[:, 1:], (0, 1), value=IGNORED)
        # Labels stand where the output is that is compared with them: the model is not to shift them itself.
        batch = {"input_ids": inputs, "labels": labels, "shift_labels": labels, "use_cache": False}
        if not self.is_causal:
            # A mask of four dimensions is taken as it is: nothing is hidden.
            batch["attention_mask"] = torch.zeros(len(blocks), 1, BLOCK, BLOCK)
        return batch

    def measured_batch(self, blocks: Tensor, masker: TokenMasker, epoch: int) -> dict[str, Any]:
        """
        What updates are measured on: of all runs, the same places of the block are asked for.

        Args:
            blocks (`torch.Tensor` of shape `(S, N)`): Token ids.
            masker (`TokenMasker`): Says which.
            epoch (`int`): Part of the key of the masks.

        Returns:
            `dict`: As [`~Run.batch`].
        """
        batch = self.batch(blocks, masker, epoch)
        asked = masker(blocks.numpy(), epoch, range(len(blocks)))["labels"]
        labels = batch["labels"].masked_fill(asked == IGNORED, IGNORED)
        return {**batch, "labels": labels, "shift_labels": labels}


RUNS = {
    "masked": Run(is_causal=False, is_masked=True),
    "next token": Run(is_causal=True, is_masked=False),
    "masked, causal": Run(is_causal=True, is_masked=True),
}


def train(model: LlamaForCausalLM, batches: Iterable[dict[str, Any]], steps: int, rate: float) -> None:
    """
    Trains on each batch once, with a warm-up over a tenth of the steps and a linear way down.

    Args:
        model (`LlamaForCausalLM`): The model.
        batches (iterable of `dict`): One a step.
        steps (`int`): How many there are.
        rate (`float`): Highest learning rate.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    schedule = get_linear_schedule_with_warmup(optimizer, steps // 10, steps)
    for batch in batches:
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def layer_rows(model: LlamaForCausalLM, halves: Sequence[QKUpdates]) -> list[dict[str, Any]]:
    """
    Scores of updates beside those of W_qk.

    Args:
        model (`LlamaForCausalLM`): The model.
        halves (sequence of two `QKUpdates`): Its updates on either half of the held-out blocks.

    Returns:
        `list[dict]`: A row a layer.
    """
    weights = hf_symqk.score_model(model, heads=False, null_band=False).layers
    rows = []
    for weight, *layers in zip(weights, *(updates.scores().layers for updates in halves), strict=True):
        row: dict[str, Any] = {"layer": weight.index}
        for metric in ("symmetry", "directionality"):
            for half, layer in zip("12", layers, strict=True):
                row[f"update {metric} {half}"] = getattr(layer, metric)
            row[f"W_qk {metric}"] = getattr(weight, metric)
        rows.append(row)
    return rows


def share_rows(halves: Sequence[QKUpdates]) -> list[dict[str, Any]]:
    """
    Where in a block the terms of updates stand.

    Args:
        halves (sequence of `QKUpdates`): Updates of all layers.

    Returns:
        `list[dict]`: Share of the weight of all terms by quarter of the block, as context and as prediction.
    """
    layers = [layer for updates in halves for layer in updates.layers]
    return [
        quarters("context", torch.stack([layer.position_as_context.sum(0) for layer in layers]).sum(0)),
        quarters("prediction", torch.stack([layer.position_as_prediction.sum(0) for layer in layers]).sum(0)),
    ]


def quarters(side: str, total: Tensor) -> dict[str, Any]:
    """
    Shares of the quarters of a block.

    Args:
        side (`str`): What they are shares of.
        total (`torch.Tensor` of shape `(N,)`): A weight for each position.

    Returns:
        `dict`: A row of the table.
    """
    parts = enumerate(total.split(BLOCK // 4), 1)
    return {"as": side, **{f"quarter {number}": float(part.sum() / total.sum()) for number, part in parts}}


def uniform_rows() -> list[dict[str, Any]]:
    """Shares where each token attends to all that it sees alike: what the causal mask alone does."""
    causal = torch.tril(torch.ones(BLOCK, BLOCK))
    attention = causal / causal.sum(1, keepdim=True)
    return [{"run": "uniform, causal", "step": 0, **quarters("context", attention.sum(0))}]


def main(argv: Sequence[str] | None = None) -> pd.DataFrame:
    """
    Trains, measures and prints.

    Args:
        argv (sequence of `str`, *optional*): Words of the command line; `sys.argv[1:]` without it.

    Returns:
        `pandas.DataFrame`: The table of layers.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000, help="steps of each run, of 16 blocks of 64 tokens")
    parser.add_argument("--measured", type=int, default=32, help="held-out batches, summed over in two halves")
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--vocab_size", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(argv)

    documents = builtin_documents()
    tokenizer = trained_tokenizer(documents, "text", given.vocab_size, ENCODER_TOKENS)
    packed = Packer(tokenizer, BLOCK, decoder_frame(tokenizer)).dataset(documents, "text").with_format("torch")
    order = torch.randperm(len(packed), generator=torch.Generator().manual_seed(given.seed))
    blocks = packed[:]["input_ids"][order]
    needed = (given.steps + given.measured) * BATCH
    if needed > len(blocks):
        parser.error(
            f"--steps {given.steps} and --measured {given.measured} take {needed:,} blocks, and the text has "
            f"{len(blocks):,}: {len(blocks) // BATCH - given.measured} steps at most."
        )
    if given.measured < 2:
        parser.error(f"--measured {given.measured}: two halves take 2 or more.")
    held_out, training = blocks[: given.measured * BATCH], blocks[given.measured * BATCH : needed]
    masker = TokenMasker(tokenizer, MASKED_SHARE, given.seed)

    config = LlamaConfig(**DECODER.default_shape, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id)
    layers: list[dict[str, Any]] = []
    shares: list[dict[str, Any]] = []
    for name, run in RUNS.items():
        set_seed(given.seed)
        model = LlamaForCausalLM(config)
        # A number a batch, so that no two of them are masked alike.
        parts = enumerate(held_out.split(BATCH))
        measured = [run.measured_batch(part, masker, given.steps + number) for number, part in parts]
        asked = sum(int((batch["labels"] != IGNORED).sum()) for batch in measured)
        print(f"{name}: {asked:,} predicted tokens, unigram entropy {label_entropy(measured):.2f}", flush=True)
        for step in (0, given.steps):
            if step:
                batches = (run.batch(part, masker, n) for n, part in enumerate(training.split(BATCH)))
                train(model, batches, given.steps, given.learning_rate)
            middle = len(measured) // 2
            halves = [qk_updates(model, part) for part in (measured[:middle], measured[middle:])]
            layers += [{"run": name, "step": step, **row} for row in layer_rows(model, halves)]
            shares += [{"run": name, "step": step, **row} for row in share_rows(halves)]
            losses = ", ".join(f"{updates.loss:.2f}" for updates in halves)
            print(f"{name}, step {step}: held-out loss of either half {losses}", flush=True)
    table = pd.DataFrame(layers)
    for found in (table, pd.DataFrame([*shares, *uniform_rows()])):
        print(f"\n{found.to_string(index=False, na_rep='', float_format=lambda value: f'{value:.2f}')}")
    return table


if __name__ == "__main__":
    main()
