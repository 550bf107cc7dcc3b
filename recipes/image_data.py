"""Images for `vit.py`: the digits that scikit-learn carries, folders and datasets of images, and what is made of one
image before the model sees it. Nothing here needs torchvision.

Shape legend: `B` images, `C` channels, `S` side of an image in pixels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from arguments import RecipeError, SourceArguments
from labelled_data import LabelArguments
from PIL import Image
from text_data import load_splits
from transformers import ViTImageProcessorPil


__all__ = ["ImageArguments", "ImageEncoder", "digits", "image_processor", "image_source", "load_images"]

# Images that mean and deviation are taken of. The same ones in every run.
STATISTICS_IMAGES = 2_000
STATISTICS_SEED = 30_000
STATISTICS_AT_ONCE = 100


@dataclasses.dataclass
class ImageArguments(SourceArguments):
    """Which images are read. Without any: the 1,797 digits of 8 × 8 pixels that scikit-learn carries."""

    validation_split_percentage: float = dataclasses.field(
        default=20.0,
        metadata={"help": "Share (%%) of the images held out where there is no validation split. Always the same."},
    )
    train_dir: str | None = dataclasses.field(
        default=None, metadata={"help": "Folder with a folder of images for each class."}
    )
    validation_dir: str | None = dataclasses.field(
        default=None, metadata={"help": "The same with held-out images, beside train_dir."}
    )
    image_column: str = dataclasses.field(default="image", metadata={"help": "Column that holds the image."})
    shift_pixels: int = dataclasses.field(
        default=1,
        metadata={"help": "Training images are shifted at random by up to so many pixels each way; 0 for none."},
    )
    horizontal_flip: bool = dataclasses.field(
        default=False, metadata={"help": "Every other training image, at random, is mirrored left to right."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dataset_name is not None and self.train_dir is not None:
            raise RecipeError(
                f"dataset_name={self.dataset_name!r} and train_dir={self.train_dir!r} both name the data: give one."
            )
        if self.validation_dir is not None and self.train_dir is None:
            raise RecipeError(f"validation_dir={self.validation_dir!r} needs train_dir beside it.")
        if self.streaming and self.dataset_name is None and self.train_dir is None:
            raise RecipeError("streaming reads dataset_name or train_dir: the built-in digits are not streamed.")
        if self.shift_pixels < 0:
            raise RecipeError(f"shift_pixels={self.shift_pixels}: choose 0 or more.")


def digits() -> datasets.Dataset:
    """
    Returns the digits that scikit-learn carries: 1,797 grey images of 8 × 8 pixels.

    Returns:
        `Dataset`: columns `image` and `label`.

    Raises:
        RecipeError: if scikit-learn is missing.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise RecipeError(
            'the built-in digits come with scikit-learn: pip install "hf_symqk[recipes]", or give --dataset_name or '
            "--train_dir."
        ) from None
    bunch = load_digits()
    # 17 levels of grey, spread over a byte.
    pixels = np.round(bunch.images * (255 / 16)).astype(np.uint8)
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=[str(name) for name in bunch.target_names])}
    )
    content = {"image": [Image.fromarray(image) for image in pixels], "label": bunch.target.tolist()}
    return datasets.Dataset.from_dict(content, features=features)


def image_source(arguments: ImageArguments) -> str:
    """Returns what the data are called in messages and in the record of a run."""
    named = arguments.dataset_name or arguments.train_dir
    return "the digits of scikit-learn" if named is None else repr(named)


def load_images(arguments: ImageArguments, labels: LabelArguments) -> dict[str, Any]:
    """
    Loads the images that the arguments name, or the built-in digits.

    Args:
        arguments (`ImageArguments`):
            Where they are.
        labels (`LabelArguments`):
            Name the split that `validation_dir` becomes.

    Returns:
        `dict`: split to `datasets.Dataset` or `datasets.IterableDataset`.

    Raises:
        RecipeError: if they cannot be loaded.
    """
    if arguments.dataset_name is None and arguments.train_dir is None:
        return {"train": digits()}
    if arguments.dataset_name is not None:
        return load_splits(arguments)
    folders = {"train": arguments.train_dir, labels.validation_split: arguments.validation_dir}
    return {
        split: _load_folder("train_dir" if split == "train" else "validation_dir", folder, arguments.streaming)
        for split, folder in folders.items()
        if folder is not None
    }


def _load_folder(argument: str, folder: str, streaming: bool) -> Any:
    if not Path(folder).is_dir():
        raise RecipeError(f"{argument}={folder!r} is not a folder.")
    try:
        # By files and not by folder: folders inside that are called train or test are classes here, not splits.
        return datasets.load_dataset(
            "imagefolder", data_files=f"{folder}/*/**", split="train", streaming=streaming, drop_labels=False
        )
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise RecipeError(
            f"{argument}={folder!r} has no folders of images, one for each class, that can be loaded: {error}"
        ) from error


class ImageEncoder:
    """
    Turns images into what the model takes, shifted and mirrored at random in training.

    Args:
        processor (`ViTImageProcessorPil`):
            Resizes and normalises.
        channels (`int`):
            1 for grey, 3 for colour.
        column (`str`):
            Column of images.
        seed (`int`):
            First part of the key of each image's generator.
        shift_pixels (`int`, *optional*, defaults to 0):
            Largest shift, in pixels of the resized image; its border is continued by the pixels of its edge.
        horizontal_flip (`bool`, *optional*, defaults to `False`):
            Whether every other image is mirrored.

    What happens to an image depends on `(seed, epoch, index)` alone: not on batch size, number of processes and
    workers, or the place where a run was resumed.
    """

    def __init__(
        self,
        processor: ViTImageProcessorPil,
        channels: int,
        column: str,
        seed: int,
        shift_pixels: int = 0,
        horizontal_flip: bool = False,
    ) -> None:
        self.processor = processor
        self.channels = channels
        self.column = column
        self.seed = seed
        self.shift_pixels = shift_pixels
        self.horizontal_flip = horizontal_flip

    def __call__(self, columns: Mapping[str, Any], keys: Sequence[tuple[int, int]]) -> list[dict[str, torch.Tensor]]:
        """
        Encodes some images.

        Args:
            columns (mapping):
                Images under the name of their column.
            keys (sequence of `(epoch, index)`):
                Key of each image.

        Returns:
            `list[dict]`: `pixel_values` of shape `(C, S, S)`.
        """
        images = [in_channels(image, self.channels) for image in columns[self.column]]
        pixels = self.processor(images, return_tensors="np")["pixel_values"]
        if self.shift_pixels or self.horizontal_flip:
            pixels = np.stack([self._vary(image, key) for image, key in zip(pixels, keys, strict=True)])
        return [{"pixel_values": image} for image in torch.from_numpy(pixels)]

    def _vary(self, image: np.ndarray, key: tuple[int, int]) -> np.ndarray:
        generator = np.random.default_rng([self.seed, *key])
        # Both are drawn whatever is asked for, so that one argument does not change what the other does.
        down, right = generator.integers(2 * self.shift_pixels + 1, size=2)
        mirrored = generator.random() < 0.5
        if self.shift_pixels:
            border = (self.shift_pixels, self.shift_pixels)
            _, height, width = image.shape
            padded = np.pad(image, ((0, 0), border, border), mode="edge")
            image = padded[:, down : down + height, right : right + width]
        return image[:, :, ::-1] if self.horizontal_flip and mirrored else image


def in_channels(image: Image.Image, channels: int) -> Image.Image:
    """
    Converts an image to grey or colour.

    Args:
        image (`PIL.Image.Image`):
            The image.
        channels (`int`):
            1 or 3.

    Returns:
        `PIL.Image.Image`: in mode `L` or `RGB`.
    """
    mode = "L" if channels == 1 else "RGB"
    return image if image.mode == mode else image.convert(mode)


def image_processor(
    train: datasets.Dataset | datasets.IterableDataset, column: str, channels: int, height: int, width: int
) -> ViTImageProcessorPil:
    """
    Makes the image processor of a run, which normalises by the mean and deviation of the training images (2,000 of
    them where there are more; the first of a stream).

    Args:
        train (`datasets.Dataset` or `datasets.IterableDataset`):
            Training images.
        column (`str`):
            Their column.
        channels (`int`):
            1 for grey, 3 for colour.
        height (`int`):
            Pixels that images are resized to.
        width (`int`):
            The same.

    Returns:
        `ViTImageProcessorPil`: saved beside the model, so that `AutoImageProcessor` finds it.

    Raises:
        RecipeError: if the column holds no images.
    """
    if isinstance(train, datasets.IterableDataset):
        images = [row[column] for row in train.take(STATISTICS_IMAGES)]
    else:
        order = np.random.default_rng(STATISTICS_SEED).permutation(len(train))[:STATISTICS_IMAGES]
        images = list(train[np.sort(order).tolist()][column])
    for image in images[:1]:
        if not isinstance(image, Image.Image):
            raise RecipeError(
                f"column {column!r} holds {type(image).__name__}, not images: name another by --image_column."
            )
    size = {"height": height, "width": width}
    plain = ViTImageProcessorPil(size=size, do_normalize=False)
    total, squares, number = np.zeros(channels), np.zeros(channels), 0
    for start in range(0, len(images), STATISTICS_AT_ONCE):
        some = [in_channels(image, channels) for image in images[start : start + STATISTICS_AT_ONCE]]
        pixels = plain(some, return_tensors="np")["pixel_values"].astype(np.float64)
        total += pixels.sum(axis=(0, 2, 3))
        squares += (pixels**2).sum(axis=(0, 2, 3))
        number += pixels.size // channels
    mean = total / number
    deviation = np.sqrt(np.maximum(squares / number - mean**2, 0.0))
    return ViTImageProcessorPil(
        size=size,
        image_mean=mean.tolist(),
        # A channel that never changes is left as it is.
        image_std=[value if value > 1e-6 else 1.0 for value in deviation.tolist()],
    )
