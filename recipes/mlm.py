"""Masked-language-model pretraining with a symmetric query-key initialisation.

    accelerate launch recipes/mlm.py                          # offline, no argument: a few minutes on two cores
    accelerate launch recipes/mlm.py --qk_init none --output_dir out/plain
    accelerate launch recipes/mlm.py run.yaml --max_steps 2000

See recipes/README.md for the arguments and for what a run leaves in its output folder.
"""

from __future__ import annotations

from collections.abc import Sequence

from arguments import DataArguments, MaskingArguments, ModelArguments, TokenizerArguments
from language_modeling import Objective, train_language_model
from masking import TokenMasker
from modeling import ENCODER
from packing import encoder_frame
from running import recipe_defaults, run_script, start_run
from token_weighted import TokenWeightedTrainer
from tokenization import ENCODER_TOKENS
from transformers import TrainingArguments


__all__ = ["ARGUMENTS", "DEFAULTS", "main"]

ARGUMENTS = (ModelArguments, TokenizerArguments, DataArguments, MaskingArguments, TrainingArguments)
# Chosen with the default encoder and text so that a run of a few minutes on one core leaves the unigram plateau far
# behind.
DEFAULTS = recipe_defaults("out/mlm")


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
    run = start_run("mlm", ARGUMENTS, DEFAULTS, argv)
    model_arguments, tokenizer_arguments, data_arguments, masking_arguments, _ = run.arguments
    objective = Objective(
        kind=ENCODER,
        special_tokens=ENCODER_TOKENS,
        frame=encoder_frame,
        offset=0,
        predicted="masked token",
        example_maker=lambda tokenizer, seed: TokenMasker(tokenizer, masking_arguments.mlm_probability, seed),
    )
    return train_language_model(run, objective, model_arguments, tokenizer_arguments, data_arguments)


if __name__ == "__main__":
    run_script(main)
