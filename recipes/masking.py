"""Masked tokens whose places depend on nothing but a seed, the epoch and the example.

`DataCollatorForLanguageModeling` draws from one generator a process, so that its masks follow batch size, number of
processes and workers, and the place where a run was resumed. Here each example has a generator of its own, keyed by
(seed, epoch, index): one process with a batch of 32, four accumulated batches of 8 and two processes with 16 see the
same masked sequences.

Shape legend: `B` sequences of a batch, `N` tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from arguments import RecipeError
from examples import IGNORED
from transformers import PreTrainedTokenizerBase


__all__ = ["EVALUATION_MASK_SEED", "TokenMasker"]

# Held-out masks are the same in every run, whatever its seed.
EVALUATION_MASK_SEED = 10_000


class TokenMasker:
    """
    Masks sequences as BERT does: of the chosen tokens 80 % become the mask token, 10 % a random one, 10 % stay.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            Gives the mask token, the special tokens (never chosen) and the size of the vocabulary.
        probability (`float`):
            Share of the tokens that are chosen.
        seed (`int`):
            First part of the key of each sequence's generator.

    Raises:
        RecipeError: if the tokenizer has no mask token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, probability: float, seed: int) -> None:
        if tokenizer.mask_token_id is None:
            raise RecipeError(f"the tokenizer {tokenizer.name_or_path!r} has no mask token: choose an encoder's.")
        self.mask_token_id = int(tokenizer.mask_token_id)
        self.vocab_size = len(tokenizer)
        # Looked up by token, which takes a tenth of the time of `np.isin`.
        self._ordinary = np.ones(
            # Ids can have holes, so that the largest is beyond their number.
            1 + max(self.vocab_size, *tokenizer.all_special_ids, *tokenizer.get_vocab().values()),
            dtype=bool,
        )
        self._ordinary[list(tokenizer.all_special_ids)] = False
        self.probability = probability
        self.seed = seed

    def __call__(self, input_ids: np.ndarray, epoch: int, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        """
        Masks sequences.

        Args:
            input_ids (`numpy.ndarray`):
                Token ids of shape `(B, N)`.
            epoch (`int`):
                Pass over the data, from 0.
            indices (sequence of `int`):
                Places of the `B` sequences in the data, from 0.

        Returns:
            `dict`: `input_ids` and `labels`, `int64` of shape `(B, N)`; labels are -100 where nothing is predicted.
        """
        original = np.asarray(input_ids, dtype=np.int64)
        choice, fate = np.empty(original.shape), np.empty(original.shape)
        random_ids = np.empty_like(original)
        for row, index in enumerate(indices):
            # What `default_rng` makes, in three quarters of the time.
            generator = np.random.Generator(np.random.PCG64([self.seed, epoch, index]))
            # Each draw takes the same amount from the generator whatever was chosen, so that one token's fate never
            # shifts another's.
            generator.random(out=choice[row])
            generator.random(out=fate[row])
            random_ids[row] = generator.integers(self.vocab_size, size=original.shape[1])
        chosen = (choice < self.probability) & self._ordinary[original]
        masked = np.where(fate < 0.8, self.mask_token_id, np.where(fate < 0.9, original, random_ids))
        masked = np.where(chosen, masked, original)
        labels = np.where(chosen, original, IGNORED)
        # No attention mask: packed sequences have no padding, and without a mask attention takes its fastest kernel.
        return {"input_ids": torch.from_numpy(masked), "labels": torch.from_numpy(labels)}
