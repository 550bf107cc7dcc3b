"""What masked and next-token training ask of W_qk, on the built-in text: symmetry and directionality of the updates.

    python recipes/dynamics.py                # offline: three minutes on one core
    python recipes/dynamics.py --steps 1000

One small pre-norm rotary model is trained three times from the same weights, on the same blocks in the same order. Two
things tell encoders from decoders, and the third run takes them apart:

| run | a token sees | and is asked for |
|---|---|---|
| `masked` | all others | itself, where it is masked |
| `next token` | those before it | the next one |
| `masked, causal` | those before it | itself, where it is masked |

Updates are those of `hf_symqk.qk_updates`, summed over held-out blocks, at the first weights and after training.

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
            examples = [masker(block.tolist(), epoch, index) for index, block in enumerate(blocks)]
            inputs, labels = (torch.stack([one[name] for one in examples]) for name in ("input_ids", "labels"))
        else:
            inputs, labels = blocks, F.pad(blocks[:, 1:], (0, 1), value=IGNORED)
        # Labels stand where the output is that is compared with them: the model is not to shift them itself.
        batch = {"input_ids": inputs, "labels": labels, "shift_labels": labels, "use_cache": False}
        if not self.is_causal:
            # A mask of four dimensions is taken as it is: nothing is hidden.
            batch["attention_mask"] = torch.zeros(len(blocks), 1, BLOCK, BLOCK)
        return batch


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


def layer_rows(model: LlamaForCausalLM, updates: QKUpdates) -> list[dict[str, Any]]:
    """
    Scores of updates beside those of W_qk.

    Args:
        model (`LlamaForCausalLM`): The model.
        updates (`QKUpdates`): Its updates.

    Returns:
        `list[dict]`: A row a layer.
    """
    scores, weights = updates.scores(), hf_symqk.score_model(model, heads=False, null_band=False)
    return [
        {
            "layer": layer.index,
            "update symmetry": layer.symmetry,
            "update directionality": layer.directionality,
            "heads symmetry": pd.Series(layer.head_symmetry).median(),
            "heads directionality": pd.Series(layer.head_directionality).median(),
            "W_qk symmetry": weight.symmetry,
            "W_qk directionality": weight.directionality,
        }
        for layer, weight in zip(scores.layers, weights.layers, strict=True)
    ]


def share_rows(updates: QKUpdates) -> list[dict[str, Any]]:
    """
    Where in a block the terms of updates stand.

    Args:
        updates (`QKUpdates`): Updates of all layers.

    Returns:
        `list[dict]`: Share of the weight of all terms by quarter of the block, as context and as prediction.
    """
    totals = {
        "context": torch.stack([layer.position_as_context.sum(0) for layer in updates.layers]).sum(0),
        "prediction": torch.stack([layer.position_as_prediction.sum(0) for layer in updates.layers]).sum(0),
    }
    return [
        {"as": side}
        | {f"quarter {n + 1}": float(part.sum() / total.sum()) for n, part in enumerate(total.split(BLOCK // 4))}
        for side, total in totals.items()
    ]


def main(argv: Sequence[str] | None = None) -> pd.DataFrame:
    """
    Trains, measures and prints.

    Args:
        argv (sequence of `str`, *optional*): Words of the command line; `sys.argv[1:]` without it.

    Returns:
        `pandas.DataFrame`: The table of layers.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="training steps of each run, of 16 blocks of 64 tokens")
    parser.add_argument("--measured", type=int, default=16, help="held-out batches that updates are summed over")
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--vocab_size", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(argv)

    documents = builtin_documents()
    tokenizer = trained_tokenizer(documents, "text", given.vocab_size, ENCODER_TOKENS)
    packed = Packer(tokenizer, BLOCK, decoder_frame(tokenizer)).dataset(documents, "text").with_format("torch")
    order = torch.randperm(len(packed), generator=torch.Generator().manual_seed(given.seed))
    blocks = packed[:]["input_ids"][order]
    needed = (given.steps + given.measured) * BATCH
    if needed > len(blocks):
        parser.error(f"--steps and --measured take {needed:,} blocks; the text has {len(blocks):,}.")
    held_out, training = blocks[: given.measured * BATCH], blocks[given.measured * BATCH : needed]
    masker = TokenMasker(tokenizer, MASKED_SHARE, given.seed)

    config = LlamaConfig(**DECODER.default_shape, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id)
    layers: list[dict[str, Any]] = []
    shares: list[dict[str, Any]] = []
    for name, run in RUNS.items():
        set_seed(given.seed)
        model = LlamaForCausalLM(config)
        # A number a batch, so that no two of them are masked alike.
        measured = [run.batch(part, masker, given.steps + n) for n, part in enumerate(held_out.split(BATCH))]
        for step in (0, given.steps):
            if step:
                batches = (run.batch(part, masker, n) for n, part in enumerate(training.split(BATCH)))
                train(model, batches, given.steps, given.learning_rate)
            updates = qk_updates(model, measured)
            layers += [{"run": name, "step": step, **row} for row in layer_rows(model, updates)]
            shares += [{"run": name, "step": step, **row} for row in share_rows(updates)]
            print(f"{name}, step {step}: held-out loss {updates.loss:.2f}", flush=True)
    table = pd.DataFrame(layers)
    for found in (table, pd.DataFrame(shares)):
        print(f"\n{found.to_string(index=False, float_format=lambda value: f'{value:.2f}')}")
    return table


if __name__ == "__main__":
    main()
