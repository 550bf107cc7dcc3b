"""Which checkpoints the arguments mean: one model, several models, or the checkpoints of one training run."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import typer


__all__ = ["Target", "Targets", "find_targets"]

_CHECKPOINT_FOLDER = re.compile(r"checkpoint-(\d+)")
# `step1000`, `stage1-step1000-tokens5B`, `checkpoint-500`: what follows the word is the step, whatever else counts.
_STEP = re.compile(r"(?:step|checkpoint)[-_]?(\d+)", re.IGNORECASE)
_MODEL_FILES = ("config.json", "adapter_config.json", "*.safetensors", "*.bin", "*.index.json")


@dataclass(frozen=True)
class Target:
    """
    One checkpoint.

    Attributes:
        name (`str`): What messages and tables call it.
        model (`str`): Folder, file or repository.
        revision (`str` or `None`): Revision of the repository.
        step (`int` or `None`): Step of the training run that it belongs to.
    """

    name: str
    model: str
    revision: str | None = None
    step: int | None = None


@dataclass(frozen=True)
class Targets:
    """
    What is to be scored.

    Attributes:
        checkpoints (`tuple[Target, ...]`): In the order given; those of a run by step.
        run (`str` or `None`): The training run that all of them belong to.
    """

    checkpoints: tuple[Target, ...]
    run: str | None = None


def find_targets(models: Sequence[str], *, revision: str | None = None, revisions: str | None = None) -> Targets:
    """
    Reads the arguments of `symqk scores`.

    Args:
        models (`Sequence[str]`): `MODEL…`.
        revision (`str`, *optional*): `--revision`, of every model.
        revisions (`str`, *optional*): `--revisions`, comma-separated.

    Returns:
        [`Targets`]

    Raises:
        typer.BadParameter: for arguments that cannot be meant.
    """
    if revisions is not None:
        return _revisions_of_a_run(models, revision, revisions)
    folders = [Path(model) for model in models]
    runs = [model for model, folder in zip(models, folders, strict=True) if _is_run(folder)]
    if runs and len(models) > 1:
        raise typer.BadParameter(
            f"{runs[0]!r} is a training run (it holds checkpoint-* folders and no model of its own); give one run, or "
            "the checkpoints to be compared.",
            param_hint="MODEL",
        )
    if runs:
        names = [str(folder) for folder in _checkpoints(folders[0])]
        return Targets(_by_step([Target(name, name, revision, _step_of(Path(name).name)) for name in names]), runs[0])
    parents = {folder.resolve().parent for folder in folders}
    of_one_run = len(parents) == 1 and all(
        _CHECKPOINT_FOLDER.fullmatch(folder.resolve().name) and folder.is_dir() for folder in folders
    )
    if len(models) > 1 and of_one_run:
        named = [
            Target(model, model, revision, _step_of(folder.resolve().name))
            for model, folder in zip(models, folders, strict=True)
        ]
        return Targets(_by_step(named), str(folders[0].resolve().parent))
    return Targets(tuple(Target(model, model, revision) for model in models))


def _revisions_of_a_run(models: Sequence[str], revision: str | None, revisions: str) -> Targets:
    hint = "--revisions"
    if revision is not None:
        raise typer.BadParameter("give --revision or --revisions, not both.", param_hint=hint)
    if len(models) != 1:
        raise typer.BadParameter(f"takes the revisions of one model, got {len(models)} models.", param_hint=hint)
    model = models[0]
    if Path(model).exists():
        raise typer.BadParameter(f"{model!r} is a local path; only a Hub repository has revisions.", param_hint=hint)
    names = [name for name in (part.strip() for part in revisions.split(",")) if name]
    if not names:
        raise typer.BadParameter("names no revision.", param_hint=hint)
    targets = []
    for name in names:
        step = _step_of(name)
        if step is None:
            raise typer.BadParameter(
                f"{name!r} does not say which step it is of; names like 'step1000' do. To score one revision, use "
                "--revision.",
                param_hint=hint,
            )
        targets.append(Target(f"{model}@{name}", model, name, step))
    return Targets(_by_step(targets), model)


def _by_step(targets: list[Target]) -> tuple[Target, ...]:
    seen: dict[int | None, Target] = {}
    for target in targets:
        other = seen.setdefault(target.step, target)
        if other is not target:
            raise typer.BadParameter(
                f"{other.name} and {target.name} are both of step {target.step}; give each step once.",
                param_hint="MODEL or --revisions",
            )
    return tuple(sorted(targets, key=lambda target: target.step or 0))


def _step_of(name: str) -> int | None:
    """The step in a name: what follows `step` or `checkpoint`, else the only number in it."""
    numbers = _STEP.findall(name) or re.findall(r"\d+", name)
    return int(numbers[0]) if len(numbers) == 1 else None


def _checkpoints(folder: Path) -> list[Path]:
    return [path for path in folder.glob("checkpoint-*") if path.is_dir() and _CHECKPOINT_FOLDER.fullmatch(path.name)]


def _is_run(folder: Path) -> bool:
    if not folder.is_dir() or any(True for pattern in _MODEL_FILES for _ in folder.glob(pattern)):
        return False
    return bool(_checkpoints(folder))
