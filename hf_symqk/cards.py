"""Model cards of training runs, written with huggingface_hub's own `ModelCard` from the files that a run leaves."""

import json
import math
import os
import shlex
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import pandas as pd
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.utils import HFValidationError, validate_repo_id
from transformers.modelcard import TASK_MAPPING

from ._held_out import held_out_results


__all__ = ["CARD", "RECORD", "SCORES_FIGURE", "SCORES_TABLE", "write_model_card"]

CARD = "README.md"
RECORD = "run.json"
SCORES_TABLE = "qk_scores_first_last.csv"
SCORES_FIGURE = "qk_scores.png"

_FILES = ("train_file", "train_dir")
_HASHES = {"weights": "the initial weights without Q, K and V", "batches": "the training batches"}


def write_model_card(
    folder: str | os.PathLike,
    *,
    comparison: str | None = None,
    template: str | os.PathLike | None = None,
    model_name: str | None = None,
    license: str | None = None,
) -> ModelCard:
    """
    Writes the model card of a training run: how it was trained, its query-key initialisation, results, W_qk scores.

    The card says what the run's own files say and nothing else: `run.json` (what every recipe writes),
    `qk_scores_first_last.csv` and `qk_scores.png` where they are there.

    Args:
        folder (`str` or `os.PathLike`):
            Output folder of the run.
        comparison (`str`, *optional*):
            Markdown on how the run compares with others.
        template (`str` or `os.PathLike`, *optional*):
            Jinja template of the card; by default the one that comes with the package (`model_cards/template.md`).
        model_name (`str`, *optional*):
            Name of the model in the metadata; by default the repository that the run is pushed to, else the folder's
            name.
        license (`str`, *optional*):
            Licence of the weights, by its id on the Hub. The card names none unless you do.

    Returns:
        `huggingface_hub.ModelCard`: The card, saved as `README.md` in the folder.

    Raises:
        FileNotFoundError: if the folder holds no `run.json`.
        ValueError: if `run.json` is no record of a run, or the metadata that comes out is not valid.
    """
    folder = Path(folder)
    record = _read_record(folder / RECORD)
    arguments = record.get("arguments", {})
    name = model_name or arguments.get("hub_model_id") or folder.resolve().name
    results = {
        name: value for name, value in held_out_results(record.get("metrics", {})).items() if math.isfinite(value)
    }
    task = _task(record["model"]["class"])
    about = record.get("data", {})
    # A recipe that picks the dataset by itself says which; a local path is no dataset of the Hub, nor a base model.
    named = about.get("dataset") or arguments.get("dataset_name")
    dataset, config = _hub_id(named), about.get("dataset_config") or arguments.get("dataset_config_name")
    is_local = any(arguments.get(key) for key in (*_FILES, "dataset_name"))
    data = ModelCardData(
        model_name=name,
        library_name="transformers",
        pipeline_tag=task,
        license=license,
        datasets=dataset,
        base_model=_hub_id(arguments.get("model_name_or_path")),
        metrics=[metric for metric in results if metric != "loss"] or None,
        tags=["hf_symqk", "qk-init" if record.get("qk_init") else "qk-init-none", record["recipe"]],
        eval_results=[
            EvalResult(
                task_type=task or record["recipe"],
                dataset_type=dataset or ("local" if is_local else "builtin"),
                dataset_name=str(about.get("source", named or "built in")),
                dataset_config=config if dataset else None,
                metric_type=metric,
                metric_name=f"held-out {metric.replace('_', ' ')}",
                metric_value=value,
            )
            for metric, value in results.items()
        ]
        or None,
    )
    columns, rows = _score_table(folder / SCORES_TABLE)
    with resources.as_file(resources.files("hf_symqk") / "templates" / "model_card.md") as packaged:
        card = ModelCard.from_template(
            data,
            template_path=str(template or packaged),
            title=name,
            summary=_summary(record),
            command=_command(record),
            details=_details(record),
            qk_init=_short(record["qk_init"]) if record.get("qk_init") else "",
            pretrained=arguments.get("model_name_or_path") or "",
            redrawn=", values" if (record.get("qk_init") or {}).get("distribution") else "",
            status=record["status"],
            results=[(f"held-out {metric.replace('_', ' ')}", f"{value:.4g}") for metric, value in results.items()],
            score_columns=columns,
            score_rows=rows,
            figure=SCORES_FIGURE if (folder / SCORES_FIGURE).is_file() else "",
            comparison=(comparison or "").strip(),
            versions=", ".join(f"{name} {version}" for name, version in record.get("versions", {}).items()),
        )
    # Reading it back checks the metadata as the Hub's library does.
    card = ModelCard(card.content)
    card.save(folder / CARD)
    return card


def _read_record(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"{str(path.parent)!r} holds no {path.name}, which every recipe writes.")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{str(path)!r} is not JSON: {error}") from None
    missing = [key for key in ("recipe", "status", "model") if key not in record] if isinstance(record, dict) else [""]
    if missing:
        raise ValueError(f"{str(path)!r} is no record of a run: it lacks {', '.join(missing) or 'everything'}.")
    return record


def _task(model_class: str) -> str | None:
    tasks: Mapping[str, Any] = TASK_MAPPING  # it carries no types of its own
    return next((task for task, classes in tasks.items() if model_class in classes.values()), None)


def _hub_id(name: Any) -> str | None:
    """The name of a repository; `None` for a folder, also one that is not there when the card is written."""
    try:
        validate_repo_id(str(name or ""))
    except HFValidationError:
        return None
    return None if Path(str(name)).exists() else str(name)


def _summary(record: Mapping[str, Any]) -> str:
    model = record["model"]
    size = f" of {model['num_parameters']:,} parameters" if model.get("num_parameters") else ""
    return (
        f"A {model['class']}{size}, trained by the recipe `{record['recipe']}` of hf_symqk, which studies the "
        "query-key matrix W_qk of self-attention."
    )


def _command(record: Mapping[str, Any]) -> str:
    words = [str(word) for word in record.get("command", ())]
    return shlex.join(["accelerate", "launch", f"recipes/{record['recipe']}.py", *words])


def _details(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    facts = {
        **{key.replace("_", " "): value for key, value in record.get("data", {}).items()},
        "steps": record.get("max_steps"),
        "learning rate": record.get("learning_rate"),
        "seed": record.get("seed"),
        "processes": record.get("num_processes"),
    }
    for what, name in _HASHES.items():
        if digest := record.get("hashes", {}).get(what):
            facts[f"hash of {name}"] = f"`{digest}`"
    return [
        (name, f"{value:,}" if type(value) is int else str(value))
        for name, value in facts.items()
        if value is not None
    ]


def _short(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _cell(value: Any) -> str:
    # What rounds to zero has no sign.
    return f"{round(value, 3) + 0:.3f}" if isinstance(value, float) else str(value)


def _score_table(path: Path) -> tuple[list[str], list[list[str]]]:
    if not path.is_file():
        return [], []
    table = pd.read_csv(path, dtype={"layer": str, "stack": str}, keep_default_na=False, na_values=["nan"])
    rows = [[_cell(value) for value in row] for row in table.to_numpy()]
    return [column.replace("_", " ") for column in table.columns], rows
