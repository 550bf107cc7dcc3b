"""Labelled examples for the classification recipes: columns and labels checked, classes numbered, a part held out.

splits as loaded  ->  the same rows with a column `labels`, of class numbers or of numbers to be predicted
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import datasets
import numpy as np
import torch
from arguments import RecipeError, SourceArguments
from example_weighted import Encoder
from examples import IGNORED, rows_of_pass
from text_data import SPLIT_SEED


__all__ = ["ExampleStream", "LabelArguments", "LabelledData", "baseline", "label_splits"]

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class LabelArguments:
    """Which column holds the label, and where the held-out examples are."""

    label_column: str = dataclasses.field(
        default="label",
        metadata={"help": "Column of labels: text or whole numbers for classes, floating-point numbers for values."},
    )
    class_names: list[str] | None = dataclasses.field(
        default=None,
        metadata={"help": "Classes of a stream that does not declare them, in the order of their numbers."},
    )
    validation_split: str = dataclasses.field(
        default="validation", metadata={"help": "Split that is held out. Without it a part of the training split is."}
    )
    stream_validation_examples: int = dataclasses.field(
        default=500,
        metadata={"help": "First examples of a stream that are held out where it has no validation split."},
    )

    def __post_init__(self) -> None:
        if self.stream_validation_examples < 0:
            raise RecipeError(f"stream_validation_examples={self.stream_validation_examples}: choose 0 or more.")
        doubled = [name for name, count in Counter(self.class_names or ()).items() if count > 1]
        if doubled:
            raise RecipeError(f"class_names holds {', '.join(doubled)} more than once.")


@dataclasses.dataclass
class LabelledData:
    """Training and held-out rows with a column `labels`; a stream keeps its own label column."""

    train: datasets.Dataset | datasets.IterableDataset
    held_out: datasets.Dataset | None
    # Names of the classes in the order of their numbers; `None` where numbers are predicted.
    classes: list[str] | None


def label_splits(
    splits: Mapping[str, Any],
    inputs: Mapping[str, str],
    name: str,
    labels: LabelArguments,
    source: SourceArguments,
) -> LabelledData:
    """
    Checks the columns and labels of the splits, numbers the classes and holds a part out.

    Args:
        splits (mapping of `str` to `datasets.Dataset` or `datasets.IterableDataset`):
            As loaded.
        inputs (mapping of `str` to `str`):
            Argument that names a column to that column, for what is kept beside the labels.
        name (`str`):
            What the data are called in messages.
        labels (`LabelArguments`):
            The label column, and the split that is held out.
        source (`SourceArguments`):
            How much is held out where there is no such split.

    Returns:
        `LabelledData`: the parts. Which examples are held out does not depend on the run's seed.

    Raises:
        RecipeError: if a split or column is missing, labels are missing, of an unusable kind or of one class only, or
            the held-out part has classes that the training part does not have.
    """
    if "train" not in splits:
        raise RecipeError(f"{name} has no split named train; it has {', '.join(sorted(splits))}.")
    train, held_out = splits["train"], splits.get(labels.validation_split)
    if held_out is None and labels.validation_split != "validation":
        raise RecipeError(
            f"{name} has no split named {labels.validation_split!r} (validation_split); it has "
            f"{', '.join(sorted(splits))}."
        )
    _check_columns(train, inputs, labels, f"the training part of {name}")
    if held_out is not None:
        _check_columns(held_out, inputs, labels, f"the held-out part of {name}")
    if isinstance(train, datasets.IterableDataset):
        return _label_stream(train, held_out, list(inputs.values()), name, labels)

    classes = _classes_of(train, labels, f"the training part of {name}")
    train = _number(train, inputs.values(), labels.label_column, classes, f"the training part of {name}")
    if held_out is not None:
        held_out = _number(held_out, inputs.values(), labels.label_column, classes, f"the held-out part of {name}")
    elif source.validation_split_percentage > 0:
        if len(splits) > 1:
            logger.warning(
                "%s has the splits %s, none of them named %s: a part of train is held out (--validation_split names "
                "another)",
                name,
                ", ".join(sorted(splits)),
                labels.validation_split,
            )
        wanted = max(1, round(len(train) * source.validation_split_percentage / 100))
        if len(train) - wanted < 1:
            raise RecipeError(f"{name} has {len(train)} example(s), too few to hold {wanted} out: give more.")
        order = np.random.default_rng(SPLIT_SEED).permutation(len(train))
        held_out = train.select(np.sort(order[:wanted]), keep_in_memory=True)
        train = train.select(np.sort(order[wanted:]), keep_in_memory=True)
    return LabelledData(train, held_out, classes)


def baseline(held_out: datasets.Dataset, classes: Sequence[str] | None) -> dict[str, float]:
    """
    What a predictor reaches on the held-out part that ignores the input and always gives the same answer.

    Args:
        held_out (`datasets.Dataset`):
            Column `labels`.
        classes (sequence of `str` or `None`):
            As in [`LabelledData`].

    Returns:
        `dict`: `eval_majority_accuracy` in [0, 1], the share of the most frequent class; or `eval_variance`, the
        squared error of the mean.
    """
    values = np.asarray(held_out["labels"][:])
    if classes is None:
        return {"eval_variance": float(values.var())}
    return {"eval_majority_accuracy": float(np.bincount(values).max() / len(values))}


class ExampleStream(torch.utils.data.IterableDataset):
    """
    A stream of labelled rows, encoded while it is read. It never ends: pass follows pass.

    Args:
        rows (`datasets.IterableDataset`):
            The stream.
        encode (`Callable`):
            See [`KeyedExamples`]; the epoch of a key is the pass, its index the row's place in the pass.
        label_column (`str`):
            Column of labels.
        classes (sequence of `str` or `None`):
            As in [`LabelledData`].
        shuffle_buffer_size (`int`):
            Rows that are shuffled among each other, anew in each pass; 0 keeps the order.
        seed (`int`):
            Seed of that shuffle.
    """

    def __init__(
        self,
        rows: datasets.IterableDataset,
        encode: Encoder,
        label_column: str,
        classes: Sequence[str] | None,
        shuffle_buffer_size: int,
        seed: int,
    ) -> None:
        self.number = _numbering(rows.features, label_column, classes, "the stream")
        self.rows = rows if shuffle_buffer_size == 0 else rows.shuffle(seed=seed, buffer_size=shuffle_buffer_size)
        self.encode = encode
        self.label_column = label_column

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for epoch in itertools.count():
            index = -1
            for index, row in enumerate(rows_of_pass(self.rows, epoch)):
                (example,) = self.encode({name: [value] for name, value in row.items()}, [(epoch, index)])
                yield {**example, "labels": torch.tensor(self.number(row[self.label_column]))}
            if index < 0:
                raise RecipeError("the stream has no training example beyond the held-out ones: give more.")


def _check_columns(part: Any, inputs: Mapping[str, str], labels: LabelArguments, what: str) -> None:
    columns = part.column_names
    if columns is None:
        first = next(iter(part), None)
        if first is None:
            raise RecipeError(f"{what} is empty.")
        columns = list(first)
    for argument, column in {**inputs, "label_column": labels.label_column}.items():
        if column not in columns:
            raise RecipeError(
                f"{what} has no column {column!r}: it has {', '.join(columns)}. Name one by --{argument}."
            )
    if isinstance(part, datasets.Dataset) and len(part) == 0:
        raise RecipeError(f"{what} is empty.")


def _kind(feature: Any, column: str, what: str) -> str:
    """`"class"` or `"number"`: what labels of that feature are."""
    if isinstance(feature, datasets.ClassLabel):
        return "class"
    dtype = getattr(feature, "dtype", None)
    if isinstance(feature, datasets.Value) and dtype is not None:
        if dtype.startswith("float"):
            return "number"
        if dtype in ("string", "large_string", "bool") or dtype.startswith(("int", "uint")):
            return "class"
    raise RecipeError(
        f"column {column!r} of {what} holds {dtype or feature}, which is neither a class (text, whole numbers) nor a "
        "number: name another by --label_column."
    )


def _classes_of(part: datasets.Dataset, labels: LabelArguments, what: str) -> list[str] | None:
    column = labels.label_column
    feature = part.features[column]
    if _kind(feature, column, what) == "number":
        return None
    declared = feature.names if isinstance(feature, datasets.ClassLabel) else labels.class_names
    present = set(part[column][:]) - {None}
    classes = declared or [_text(value) for value in sorted(present)]
    if len(classes) < 2:
        raise RecipeError(
            f"column {column!r} of {what} has one class only ({', '.join(classes) or 'none'}): there is nothing to "
            "tell apart."
        )
    return list(classes)


def _text(value: Any) -> str:
    return str(value)


def _numbering(features: Any, column: str, classes: Sequence[str] | None, what: str) -> Callable[[Any], int | float]:
    """Turns a label as it stands in the column into its number."""
    if classes is None:
        return functools.partial(_value, column=column, what=what)
    numbers = {name: number for number, name in enumerate(classes)}
    feature = None if features is None else features[column]

    def number(value: Any) -> int:
        name = _text(value)
        if isinstance(feature, datasets.ClassLabel) and value is not None and value >= 0:
            name = feature.int2str(value)
        if name not in numbers:
            raise RecipeError(
                f"{what} has the label {name!r} in column {column!r}, which is none of the {len(classes)} classes "
                f"{', '.join(classes[:20])}{', …' if len(classes) > 20 else ''} of the training part."
            )
        return numbers[name]

    return number


def _value(label: Any, column: str, what: str) -> float:
    if label is None or label != label:
        raise RecipeError(f"an example of {what} has no label in column {column!r}: leave it out.")
    if label == IGNORED:
        raise RecipeError(
            f"{what} has the value {IGNORED} in column {column!r}, which marks what the loss leaves out: scale the "
            "values, or shift them."
        )
    return float(label)


def _number(
    part: datasets.Dataset, inputs: Iterable[str], column: str, classes: Sequence[str] | None, what: str
) -> datasets.Dataset:
    values = part[column][:]
    feature = part.features[column]
    if (_kind(feature, column, what) == "number") != (classes is None):
        raise RecipeError(f"column {column!r} holds numbers in one part and classes in the other ({what}).")
    missing = sum(value is None or value != value for value in values)
    if isinstance(feature, datasets.ClassLabel):
        missing += sum(value is not None and value < 0 for value in values)
    if missing:
        raise RecipeError(f"{missing} of the {len(values)} examples of {what} have no label in column {column!r}.")
    number = _numbering(part.features, column, classes, what)
    numbers = np.asarray([number(value) for value in values], dtype=np.float64 if classes is None else np.int64)
    kept = part.select_columns(list(inputs))
    return kept.add_column("labels", numbers)


def _warn_of_missing_classes(numbers: Sequence[float], classes: Sequence[str], name: str) -> None:
    """What is sorted by class, such as a folder of images, comes class by class as a stream."""
    missing = [known for number, known in enumerate(classes) if number not in set(numbers)]
    if missing:
        logger.warning(
            "the %d held-out examples of %s are the first of a stream and of %d of its %d classes only, none of them "
            "%s%s: is it sorted by class? Then it is also trained on in that order, but for --shuffle_buffer_size. "
            "Shuffle the data, leave --streaming out, or hold out more (--stream_validation_examples)",
            len(numbers),
            name,
            len(classes) - len(missing),
            len(classes),
            ", ".join(missing[:20]),
            ", …" if len(missing) > 20 else "",
        )


def _label_stream(
    train: datasets.IterableDataset,
    held_out: datasets.IterableDataset | None,
    inputs: list[str],
    name: str,
    labels: LabelArguments,
) -> LabelledData:
    """Splits a stream; its held-out part is small and becomes a dataset in memory."""
    column, what = labels.label_column, f"the training part of {name}"
    feature = None if train.features is None else train.features.get(column)
    if isinstance(feature, datasets.ClassLabel):
        classes = list(feature.names)
    elif labels.class_names is not None:
        classes = labels.class_names
    elif feature is not None and _kind(feature, column, what) == "number":
        classes = None
    else:
        raise RecipeError(
            f"{what} is a stream that does not declare the classes of column {column!r}: list them by --class_names, "
            "or leave --streaming out."
        )
    if classes is not None and len(classes) < 2:
        raise RecipeError(f"column {column!r} of {what} has one class only: there is nothing to tell apart.")
    count = labels.stream_validation_examples
    if held_out is not None:
        rows = list(held_out.take(count) if count else held_out)
    else:
        rows = list(train.take(count))
        train = train.skip(count)
    if next(iter(train), None) is None:
        raise RecipeError(
            f"{what} has nothing beyond the {len(rows)} held-out examples: give more, or lower "
            "--stream_validation_examples."
        )
    if not rows:
        return LabelledData(train, None, classes)
    number = _numbering(train.features, column, classes, f"the held-out part of {name}")
    content = {key: [row[key] for row in rows] for key in inputs}
    content["labels"] = [number(row[column]) for row in rows]
    if classes is not None:
        _warn_of_missing_classes(content["labels"], classes, name)
    return LabelledData(train, datasets.Dataset.from_dict(content), classes)
