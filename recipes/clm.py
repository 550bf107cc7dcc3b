"""Causal-language-model pretraining of a decoder with a symmetric query-key initialisation.

    accelerate launch recipes/clm.py                          # offline, no argument: a few minutes on two cores
    accelerate launch recipes/clm.py --qk_init none --output_dir out/plain
    accelerate launch recipes/clm.py run.yaml --model_type gpt2

See recipes/README.md for the arguments and for what a run leaves in its output folder.
"""

from __future__ import annotations

from collections.abc import Sequence

from arguments import DataArguments, ModelArguments, TokenizerArguments
from examples import next_token_examples
from language_modeling import Objective, train_language_model
from modeling import DECODER
from packing import decoder_frame
from running import recipe_defaults, run_script, start_run
from token_weighted import TokenWeightedTrainer
from tokenization import DECODER_TOKENS
from transformers import TrainingArguments


__all__ = ["ARGUMENTS", "DEFAULTS", "main"]

ARGUMENTS = (ModelArguments, TokenizerArguments, DataArguments, TrainingArguments)
# Chosen with the default decoder and text so that a run of a few minutes on one core leaves the unigram plateau far
# behind.
DEFAULTS = recipe_defaults("out/clm")


def main(argv: Sequence[str] | None = None) -> TokenWeightedTrainer:
    """
    Runs the recipe.

    Args:
        argv (sequence of `str`, *optional*):
            Words of the command line; `sys.argv[1:]` without it.

    Returns:
        `TokenWeightedTrainer`: after the run.

    Raises:
        RecipeError: for arguments, text, tokenizer or config that cannot be used; before training begins.
    """
    run = start_run("clm", ARGUMENTS, DEFAULTS, argv)
    model_arguments, tokenizer_arguments, data_arguments, _ = run.arguments
    objective = Objective(
        kind=DECODER,
        special_tokens=DECODER_TOKENS,
        frame=decoder_frame,
        offset=1,
        predicted="token",
        example_maker=lambda tokenizer, seed: next_token_examples,
    )
    return train_language_model(run, objective, model_arguments, tokenizer_arguments, data_arguments)


if __name__ == "__main__":
    run_script(main)
