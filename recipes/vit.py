"""Vision Transformer image classification with a symmetric query-key initialisation.

    accelerate launch recipes/vit.py                          # offline, no argument: minutes on two cores
    accelerate launch recipes/vit.py --qk_init none --output_dir out/vit-plain
    accelerate launch recipes/vit.py --train_dir photos --config_overrides image_size=128,patch_size=16

See recipes/README.md for the arguments and for what a run leaves in its output folder.
"""

from __future__ import annotations

from collections.abc import Sequence

import datasets
from arguments import ModelArguments, RecipeError
from evaluation_metrics import HeldOutMetrics
from example_weighted import ExampleWeightedTrainer, KeyedExamples
from image_data import ImageArguments, ImageEncoder, image_processor, image_source, load_images
from image_modeling import build_image_config, build_image_model, image_sides
from labelled_data import ExampleStream, LabelArguments, baseline, label_splits
from running import check_stream, recipe_defaults, run_script, start_run
from transformers import TrainingArguments, default_data_collator


__all__ = ["ARGUMENTS", "DEFAULTS", "main"]

ARGUMENTS = (ModelArguments, ImageArguments, LabelArguments, TrainingArguments)
# Chosen with the default model and the digits.
DEFAULTS = recipe_defaults(
    "out/vit",
    max_steps=800,
    per_device_train_batch_size=64,
    per_device_eval_batch_size=128,
    learning_rate=2e-3,
    logging_steps=100,
    eval_steps=200,
)


def main(argv: Sequence[str] | None = None) -> ExampleWeightedTrainer:
    """
    Runs the recipe.

    Args:
        argv (sequence of `str`, *optional*):
            Words of the command line; `sys.argv[1:]` without it.

    Returns:
        `ExampleWeightedTrainer`: after the run.

    Raises:
        RecipeError: for arguments, images or config that cannot be used; before training begins.
    """
    run = start_run("vit", ARGUMENTS, DEFAULTS, argv)
    model_arguments, image_arguments, label_arguments, training_arguments = run.arguments
    check_stream(training_arguments, image_arguments)
    metrics = HeldOutMetrics({"accuracy": {}})

    source = image_source(image_arguments)
    with training_arguments.main_process_first(desc="reading the images"):
        splits = load_images(image_arguments, label_arguments)
        column = image_arguments.image_column
        data = label_splits(splits, {"image_column": column}, source, label_arguments, image_arguments)
    classes, held_out_rows = data.classes, data.held_out
    if classes is None:
        raise RecipeError(f"column {label_arguments.label_column!r} of {source} holds numbers, not classes.")
    if held_out_rows is None and training_arguments.do_eval:
        raise RecipeError(
            "no image is held out (validation_split_percentage or stream_validation_examples is 0), but evaluation "
            "is on: hold some out, or give --do_eval false."
        )
    digits = image_arguments.dataset_name is None and image_arguments.train_dir is None
    config = build_image_config(model_arguments, classes, digits)
    (height, width), channels = image_sides(config), config.num_channels
    processor = image_processor(data.train, column, channels, height, width)
    model = run.build(model_arguments.qk_init, lambda option: build_image_model(config, option))

    seed = training_arguments.seed if training_arguments.data_seed is None else training_arguments.data_seed
    varied = ImageEncoder(
        processor, channels, column, seed, image_arguments.shift_pixels, image_arguments.horizontal_flip
    )
    train: KeyedExamples | ExampleStream
    if isinstance(data.train, datasets.IterableDataset):
        buffer = image_arguments.shuffle_buffer_size
        train = ExampleStream(data.train, varied, label_arguments.label_column, classes, buffer, seed)
    else:
        train = KeyedExamples(data.train, varied)
    plain = ImageEncoder(processor, channels, column, seed)
    held_out = None if held_out_rows is None else KeyedExamples(held_out_rows, plain)
    train_size = f"{len(train):,}" if isinstance(train, KeyedExamples) else "a stream of"
    held_out_size = f"{len(held_out):,}" if held_out is not None else "no"
    run.announce(
        f"images: {train_size} training and {held_out_size} held-out images of {height} by {width} pixels in "
        f"{channels} channel(s), {len(classes)} classes"
    )

    trainer = ExampleWeightedTrainer(
        model=model,
        args=training_arguments,
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=processor,
        data_collator=default_data_collator,
        compute_metrics=metrics,
        callbacks=run.callbacks(),
    )
    run.execute(
        trainer,
        data={
            "source": image_arguments.dataset_name or image_arguments.train_dir or "digits of scikit-learn",
            "train_examples": len(train) if isinstance(train, KeyedExamples) else None,
            "held_out_examples": 0 if held_out is None else len(held_out),
            "classes": len(classes),
            "image_size": [height, width, channels],
        },
        evaluation_metrics=lambda: {} if held_out_rows is None else baseline(held_out_rows, classes),
        summary=lambda metrics: (
            f"held-out loss {metrics['eval_loss']:.3f} nats an image, accuracy {metrics['eval_accuracy']:.1%} of "
            f"{int(metrics['eval_examples']):,} images; the most frequent class is "
            f"{metrics['eval_majority_accuracy']:.1%} of them"
        ),
    )
    return trainer


if __name__ == "__main__":
    run_script(main)
