"""What `mlm.py` and `clm.py` share: from the arguments to a trained language model.

documents -> tokenizer -> config and model -> blocks -> examples -> Trainer
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import datasets
from arguments import DataArguments, ModelArguments, RecipeError, TokenizerArguments
from examples import BlockDataset, BlockStream, EpochCallback, ExampleMaker
from masking import EVALUATION_MASK_SEED
from modeling import ModelKind, build_config, build_model
from packing import BlockFrame, Packer
from reporting import label_entropy
from running import Run, check_stream
from text_data import Documents, load_documents
from token_weighted import TokenWeightedTrainer
from tokenization import choose_tokenizer
from transformers import PreTrainedTokenizerBase, TrainingArguments, default_data_collator


__all__ = ["Objective", "train_language_model"]

MakerOf = Callable[[PreTrainedTokenizerBase, int], ExampleMaker]


@dataclasses.dataclass(frozen=True)
class Objective:
    """
    What a language model is trained for.

    Attributes:
        kind (`ModelKind`): Which models serve.
        special_tokens (mapping): Those of a tokenizer that is trained for them.
        frame (`Callable`): Special tokens of a block, from the tokenizer.
        offset (`int`): How many places before its label a prediction stands.
        predicted (`str`): What a prediction is made for, in the printed summary.
        example_maker (`Callable`): From tokenizer and seed, what makes examples of blocks.
    """

    kind: ModelKind
    special_tokens: Mapping[str, str]
    frame: Callable[[PreTrainedTokenizerBase], BlockFrame]
    offset: int
    predicted: str
    example_maker: MakerOf


def train_language_model(
    run: Run,
    objective: Objective,
    model_arguments: ModelArguments,
    tokenizer_arguments: TokenizerArguments,
    data_arguments: DataArguments,
) -> TokenWeightedTrainer:
    """
    Trains a language model.

    Args:
        run (`Run`):
            As [`start_run`] returned it.
        objective (`Objective`):
            What for.
        model_arguments (`ModelArguments`):
            Which model.
        tokenizer_arguments (`TokenizerArguments`):
            Which tokenizer.
        data_arguments (`DataArguments`):
            Which text.

    Returns:
        `TokenWeightedTrainer`: after the run.

    Raises:
        RecipeError: for arguments, text, tokenizer or config that cannot be used; before training begins.
    """
    arguments, block_size = run.training_arguments, data_arguments.block_size
    check_stream(arguments, data_arguments)
    with arguments.main_process_first(desc="reading the text"):
        documents = load_documents(data_arguments)
        tokenizer = choose_tokenizer(
            tokenizer_arguments, data_arguments, documents.train, documents.text_column, objective.special_tokens
        )
    if documents.held_out is None and arguments.do_eval:
        raise RecipeError(
            "no text is held out (validation_split_percentage or stream_validation_documents is 0), but evaluation "
            "is on: hold some out, or give --do_eval false."
        )
    # The model comes before the text is packed: what is wrong with it must not show after an hour of tokenizing.
    packer = Packer(tokenizer, block_size, objective.frame(tokenizer), data_arguments.character_spaced)
    config = build_config(model_arguments, tokenizer, tokenizer_arguments.tokenizer_name is None, objective.kind)
    model = run.build(model_arguments.qk_init, lambda option: build_model(config, option, block_size, objective.kind))

    with arguments.main_process_first(desc="packing the text"):
        train = _training_examples(documents, packer, objective.example_maker, arguments, data_arguments)
        held_out = _held_out_examples(documents, packer, objective.example_maker, data_arguments)
    number = len(train) if isinstance(train, BlockDataset) else None
    run.announce(
        f"text: {'a stream of' if number is None else f'{number:,}'} training and "
        f"{'no' if held_out is None else f'{len(held_out):,}'} held-out sequences of {block_size} tokens, "
        f"vocabulary {len(tokenizer):,}"
    )

    def held_out_entropy() -> dict[str, float]:
        assert held_out is not None
        return {"eval_unigram_entropy": label_entropy(held_out[index] for index in range(len(held_out)))}

    trainer = TokenWeightedTrainer(
        offset=objective.offset,
        model=model,
        args=arguments,
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=tokenizer,
        data_collator=default_data_collator,
        callbacks=[*run.callbacks(), *([EpochCallback(train)] if isinstance(train, BlockDataset) else [])],
    )
    run.execute(
        trainer,
        data={
            "source": documents.source,
            "train_sequences": number,
            "held_out_sequences": 0 if held_out is None else len(held_out),
            "block_size": block_size,
            "vocab_size": len(tokenizer),
        },
        evaluation_metrics=held_out_entropy,
        summary=lambda metrics: (
            f"held-out loss {metrics['eval_loss']:.3f} nats a {objective.predicted} "
            f"({int(metrics['eval_predicted_tokens']):,} tokens); unigram entropy of these tokens "
            f"{metrics['eval_unigram_entropy']:.3f}"
        ),
    )
    return trainer


def _training_examples(
    documents: Documents,
    packer: Packer,
    example_maker: MakerOf,
    training_arguments: TrainingArguments,
    data_arguments: DataArguments,
) -> BlockDataset | BlockStream:
    data_seed = training_arguments.data_seed
    seed = training_arguments.seed if data_seed is None else data_seed
    make_examples, column = example_maker(packer.tokenizer, seed), documents.text_column
    if isinstance(documents.train, datasets.IterableDataset):
        return BlockStream(documents.train, column, packer, make_examples, data_arguments.shuffle_buffer_size, seed)
    blocks = packer.dataset(documents.train, column, data_arguments.preprocessing_num_workers, "packed-train")
    return BlockDataset(blocks, make_examples)


def _held_out_examples(
    documents: Documents, packer: Packer, example_maker: MakerOf, data_arguments: DataArguments
) -> BlockDataset | None:
    if documents.held_out is None:
        return None
    workers = data_arguments.preprocessing_num_workers
    blocks = packer.dataset(documents.held_out, documents.text_column, workers, "packed-held-out")
    # The same in every run, whatever its seed.
    return BlockDataset(blocks, example_maker(packer.tokenizer, EVALUATION_MASK_SEED))
