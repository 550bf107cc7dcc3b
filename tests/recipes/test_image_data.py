"""Images and labels before training: what is held out, what an image becomes, and data that cannot be used."""

import sys

import datasets
import numpy as np
import pytest
import torch
from arguments import RecipeError
from image_data import ImageArguments, ImageEncoder, digits, image_processor, load_images
from labelled_data import ExampleStream, LabelArguments, baseline, label_splits
from PIL import Image


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Six images of each of three classes, 10 × 12 pixels in colour; two of each held out."""
    root, generator = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for part, count in (("train", 6), ("validation", 2)):
        for name in ("cat", "dog", "test"):
            folder = root / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = generator.integers(0, 256, size=(12, 10, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    return root


def load(labels=None, **arguments):
    image_arguments, label_arguments = ImageArguments(**arguments), LabelArguments(**(labels or {}))
    splits = load_images(image_arguments, label_arguments)
    columns = {"image_column": image_arguments.image_column}
    return label_splits(splits, columns, "the data", label_arguments, image_arguments)


def test_digits_are_held_out_always_alike():
    data = load()
    assert (len(data.train), len(data.held_out)) == (1438, 359)
    assert data.classes == [str(number) for number in range(10)]
    places = np.sort(np.random.default_rng(20_000).permutation(1797)[:359]).tolist()
    whole = digits()
    assert data.held_out["labels"][:] == whole.select(places)["label"][:]
    assert np.array_equal(np.asarray(data.held_out[7]["image"]), np.asarray(whole[places[7]]["image"]))
    labels = np.asarray(data.held_out["labels"][:])
    assert baseline(data.held_out, data.classes)["eval_majority_accuracy"] == max(np.bincount(labels)) / 359
    assert "torchvision" not in sys.modules


def test_training_images_are_normalised():
    data = load()
    processor = image_processor(data.train, "image", 1, 8, 8)
    encoded = ImageEncoder(processor, 1, "image", 0)(data.train[:], [(0, index) for index in range(1438)])
    pixels = torch.stack([example["pixel_values"] for example in encoded])
    assert pixels.shape == (1438, 1, 8, 8)
    assert pixels.mean().item() == pytest.approx(0, abs=1e-5)
    assert pixels.std().item() == pytest.approx(1, abs=1e-3)


def test_shift_and_mirror_follow_the_key_alone():
    image = Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8))
    data = datasets.Dataset.from_dict({"image": [image]}, features=datasets.Features({"image": datasets.Image()}))
    processor = image_processor(data, "image", 1, 8, 8)

    def encode(keys, shift=1, flip=True):
        encoder = ImageEncoder(processor, 1, "image", 5, shift, flip)
        return [example["pixel_values"] for example in encoder({"image": [image] * len(keys)}, keys)]

    keys = [(epoch, index) for epoch in range(3) for index in range(20)]
    together = encode(keys)
    assert all(torch.equal(one, encode([key])[0]) for one, key in zip(together, keys, strict=True))
    (plain,) = encode([(0, 0)], shift=0, flip=False)
    border = torch.nn.functional.pad(plain[None], (1, 1, 1, 1), mode="replicate")[0]
    possible = [border[:, down : down + 8, right : right + 8] for down in range(3) for right in range(3)]
    possible += [shifted.flip(-1) for shifted in possible]
    seen = {next(place for place, one in enumerate(possible) if torch.equal(one, found)) for found in together}
    assert len(seen) > 12  # of 18
    assert len({tuple(one.flatten().tolist()) for one in encode(keys, flip=False)}) == 9


@pytest.mark.parametrize("streaming", [False, True])
def test_folders(folders, streaming):
    """A folder that is called test is a class here. Grey or colour is the model's wish."""
    named = {"train_dir": str(folders / "train"), "validation_dir": str(folders / "validation")}
    data = load(**named, streaming=streaming)
    assert data.classes == ["cat", "dog", "test"]
    assert sorted(data.held_out["labels"][:]) == [0, 0, 1, 1, 2, 2]
    processor = image_processor(data.train, "image", 3, 6, 4)
    assert len(processor.image_mean) == 3
    encoder = ImageEncoder(processor, 3, "image", 0)
    assert encoder(data.held_out[:2], [(0, 0), (0, 1)])[0]["pixel_values"].shape == (3, 6, 4)
    grey = ImageEncoder(image_processor(data.train, "image", 1, 6, 4), 1, "image", 0)
    assert grey(data.held_out[:2], [(0, 0), (0, 1)])[0]["pixel_values"].shape == (1, 6, 4)
    if streaming:
        stream = iter(ExampleStream(data.train, encoder, "label", data.classes, 4, 0))
        labels = [[next(stream)["labels"].item() for _ in range(18)] for _ in range(2)]
        assert sorted(labels[0]) == sorted(labels[1]) == sorted([0, 1, 2] * 6)
        assert labels[0] != labels[1]


def test_stream_without_validation_split(folders):
    data = load({"stream_validation_examples": 4}, train_dir=str(folders / "train"), streaming=True)
    assert len(data.held_out) == 4
    assert len(list(data.train)) == 14
    with pytest.raises(RecipeError, match="nothing beyond the 18 held-out examples"):
        load({"stream_validation_examples": 18}, train_dir=str(folders / "train"), streaming=True)


@pytest.mark.parametrize(
    ("held_out", "count", "missing"),
    [
        (None, 4, "of 1 of its 3 classes only, none of them dog, test: is it sorted"),
        ("validation", 3, "of 2 of its 3 classes only, none of them test: is it sorted"),
        ("validation", 500, None),
    ],
)
def test_first_images_of_a_folder_are_not_of_all_classes(folders, caplog, held_out, count, missing):
    """Nor are those of a held-out folder, which a stream takes the first of, too."""
    named = {"train_dir": str(folders / "train"), "validation_dir": held_out and str(folders / held_out)}
    load({"stream_validation_examples": count}, **named, streaming=True)
    assert missing in caplog.text if missing else not caplog.text


@pytest.mark.parametrize(
    ("labels", "arguments", "message"),
    [
        ({}, {"image_column": "picture"}, r"no column 'picture': it has image, label\. .*--image_column"),
        ({"label_column": "class"}, {}, r"no column 'class': it has image, label\. .*--label_column"),
        ({"validation_split": "dev"}, {}, r"no split named 'dev' \(validation_split\); it has train"),
        ({"label_column": "image"}, {}, "column 'image' .* neither a class"),
    ],
)
def test_columns_and_splits_are_named(labels, arguments, message):
    with pytest.raises(RecipeError, match=message):
        load(labels, **arguments)


def test_folders_that_do_not_serve(folders, tmp_path):
    with pytest.raises(RecipeError, match=r"'none' is not a folder"):
        load(train_dir="none")
    with pytest.raises(RecipeError, match="has no folders of images"):
        load(train_dir=str(tmp_path))
    one = tmp_path / "one" / "cat"
    one.mkdir(parents=True)
    Image.new("RGB", (4, 4)).save(one / "0.png")
    with pytest.raises(RecipeError, match=r"one class only \(cat\)"):
        load(train_dir=str(tmp_path / "one"))
    other = tmp_path / "other"
    for name in ("cat", "fox"):
        (other / name).mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(other / name / "0.png")
    with pytest.raises(RecipeError, match=r"held-out part .* the label 'fox' .* none of the 3 classes cat, dog, test"):
        load(train_dir=str(folders / "train"), validation_dir=str(other))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, None, 0, 1], "1 of the 4 examples of the training part of the data have no label"),
        ([[1], [0], [1], [0]], "neither a class"),
        (["a", "a", "a", "a"], r"one class only \(a\)"),
        ([1.0, -100.0, 2.0, 0.0], "has the value -100 .* scale the values"),
        ([1.0, float("nan"), 2.0, 0.0], "1 of the 4 examples .* have no label"),
    ],
)
def test_labels_that_do_not_serve(content, message):
    part = datasets.Dataset.from_dict({"text": ["a", "b", "c", "d"], "label": content})
    with pytest.raises(RecipeError, match=message):
        label_splits({"train": part}, {"text_column": "text"}, "the data", LabelArguments(), ImageArguments())


def test_parts_that_number_their_classes_differently():
    """A held-out part that lacks a class numbers the others anew: names decide."""

    def part(names, labels):
        features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=names)})
        return datasets.Dataset.from_dict({"text": ["x"] * len(labels), "label": labels}, features=features)

    splits = {"train": part(["a", "b", "c"], [0, 1, 2]), "validation": part(["a", "c"], [0, 1])}
    data = label_splits(splits, {"text_column": "text"}, "the data", LabelArguments(), ImageArguments())
    assert data.held_out["labels"][:] == [0, 2]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dataset_name": "a", "train_dir": "b"}, "give one"),
        ({"validation_dir": "b"}, "needs train_dir"),
        ({"streaming": True}, "not streamed"),
        ({"shift_pixels": -1}, "shift_pixels=-1"),
    ],
)
def test_contradictions_are_named(values, message):
    with pytest.raises(RecipeError, match=message):
        ImageArguments(**values)
