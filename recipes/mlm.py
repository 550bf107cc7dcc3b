"""Masked-language-model pretraining with a symmetric query-key initialisation.

    accelerate launch recipes/mlm.py                          # offline, no argument: a few minutes on two cores
    accelerate launch recipes/mlm.py --qk_init none --output_dir out/plain
    accelerate launch recipes/mlm.py run.yaml --max_steps 2000

See recipes/README.md for the arguments and for what a run leaves in its output folder.
"""

from __future__ import annotations

from collections.abc import Sequence

import datasets
from arguments import DataArguments, MaskingArguments, ModelArguments, RecipeError, TokenizerArguments
from masking import EVALUATION_MASK_SEED, MaskedDataset, MaskedStream, MaskEpochCallback, TokenMasker
from modeling import build_config, build_model
from reporting import label_entropy
from running import recipe_defaults, run_script, start_run
from text_data import Documents, check_block_size, load_documents, packed_dataset
from token_weighted import TokenWeightedTrainer
from tokenization import choose_tokenizer
from transformers import PreTrainedTokenizerBase, TrainingArguments, default_data_collator


__all__ = ["DEFAULTS", "main"]

# Chosen with the default encoder and text so that a run of a few minutes on one core leaves the unigram plateau far
# behind.
DEFAULTS = recipe_defaults("out/mlm")


def mask_documents(
    documents: Documents,
    tokenizer: PreTrainedTokenizerBase,
    data_arguments: DataArguments,
    masking_arguments: MaskingArguments,
    training_arguments: TrainingArguments,
) -> tuple[MaskedDataset | MaskedStream, MaskedDataset | None]:
    """
    Tokenizes, packs and masks the text.

    Args:
        documents (`Documents`):
            The text.
        tokenizer (`PreTrainedTokenizerBase`):
            The tokenizer.
        data_arguments (`DataArguments`):
            How the text is packed.
        masking_arguments (`MaskingArguments`):
            How much is masked.
        training_arguments (`TrainingArguments`):
            Their data seed (or seed) keys the training masks; held-out masks have a key of their own.

    Returns:
        `tuple`: training and held-out examples, the latter `None` where nothing is held out.

    Raises:
        RecipeError: if the text does not fill one block.
    """
    column, block_size = documents.text_column, data_arguments.block_size
    seed = training_arguments.seed if training_arguments.data_seed is None else training_arguments.data_seed
    masker = TokenMasker(tokenizer, masking_arguments.mlm_probability, seed)

    def packed(part: datasets.Dataset, name: str) -> datasets.Dataset:
        return packed_dataset(part, column, tokenizer, block_size, data_arguments.preprocessing_num_workers, name)

    train: MaskedDataset | MaskedStream
    if isinstance(documents.train, datasets.IterableDataset):
        buffer = data_arguments.shuffle_buffer_size
        train = MaskedStream(documents.train, column, tokenizer, masker, block_size, buffer, seed)
    else:
        train = MaskedDataset(packed(documents.train, "packed-train"), masker)
    held_out = None
    if documents.held_out is not None:
        held_out_masker = TokenMasker(tokenizer, masking_arguments.mlm_probability, EVALUATION_MASK_SEED)
        held_out = MaskedDataset(packed(documents.held_out, "packed-held-out"), held_out_masker)
    return train, held_out


def check_run(training_arguments: TrainingArguments, data_arguments: DataArguments) -> None:
    """
    Checks what can be checked before any text is read.

    Args:
        training_arguments (`TrainingArguments`):
            The run.
        data_arguments (`DataArguments`):
            Its text.

    Raises:
        RecipeError: for a stream without `max_steps` or with several readers.
    """
    if data_arguments.streaming and training_arguments.do_train and training_arguments.max_steps <= 0:
        raise RecipeError("streaming needs --max_steps: the length of a stream is not known.")
    if data_arguments.streaming and training_arguments.dataloader_num_workers > 1:
        raise RecipeError(
            f"dataloader_num_workers={training_arguments.dataloader_num_workers}: a stream is packed by one reader, "
            "choose 0 or 1."
        )


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
    kinds = (ModelArguments, TokenizerArguments, DataArguments, MaskingArguments, TrainingArguments)
    run = start_run("mlm", kinds, DEFAULTS, argv)
    model_arguments, tokenizer_arguments, data_arguments, masking_arguments, training_arguments = run.arguments
    check_run(training_arguments, data_arguments)

    with training_arguments.main_process_first(desc="reading the text"):
        documents = load_documents(data_arguments)
        tokenizer = choose_tokenizer(tokenizer_arguments, data_arguments, documents.train, documents.text_column)
    if documents.held_out is None and training_arguments.do_eval:
        raise RecipeError(
            "no text is held out (validation_split_percentage or stream_validation_documents is 0), but evaluation "
            "is on: hold some out, or give --do_eval false."
        )
    # The model comes before the text is packed: what is wrong with it must not show after an hour of tokenizing.
    check_block_size(data_arguments.block_size, tokenizer)
    config = build_config(model_arguments, tokenizer, tokenizer_arguments.tokenizer_name is None)
    model = run.build(model_arguments.qk_init, lambda option: build_model(config, option, data_arguments.block_size))

    with training_arguments.main_process_first(desc="packing the text"):
        train, held_out = mask_documents(documents, tokenizer, data_arguments, masking_arguments, training_arguments)
    train_size = f"{len(train):,}" if isinstance(train, MaskedDataset) else "a stream of"
    held_out_size = f"{len(held_out):,}" if held_out is not None else "no"
    run.announce(
        f"text: {train_size} training and {held_out_size} held-out sequences of {data_arguments.block_size} tokens, "
        f"vocabulary {len(tokenizer):,}"
    )

    callbacks = run.callbacks()
    if isinstance(train, MaskedDataset):
        callbacks.append(MaskEpochCallback(train))
    trainer = TokenWeightedTrainer(
        model=model,
        args=training_arguments,
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=tokenizer,
        data_collator=default_data_collator,
        callbacks=callbacks,
    )

    def held_out_entropy() -> dict[str, float]:
        assert held_out is not None
        return {"eval_unigram_entropy": label_entropy(held_out[index] for index in range(len(held_out)))}

    run.execute(
        trainer,
        data={
            "source": data_arguments.dataset_name or data_arguments.train_file or "built-in text",
            "train_sequences": len(train) if isinstance(train, MaskedDataset) else None,
            "held_out_sequences": 0 if held_out is None else len(held_out),
            "block_size": data_arguments.block_size,
            "vocab_size": len(tokenizer),
        },
        evaluation_metrics=held_out_entropy,
        summary=lambda metrics: (
            f"held-out loss {metrics['eval_loss']:.3f} nats a masked token "
            f"({int(metrics['eval_predicted_tokens']):,} tokens); unigram entropy of these tokens "
            f"{metrics['eval_unigram_entropy']:.3f}"
        ),
    )
    return trainer


if __name__ == "__main__":
    run_script(main)
