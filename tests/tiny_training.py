"""A Trainer small enough to run many times, shared by the tests of the callback (also in subprocesses)."""

import os
from typing import Any

import torch
from architectures import BY_NAME
from torch.utils.data import Dataset
from transformers import AutoModelForMaskedLM, PreTrainedModel, Trainer, TrainingArguments


class Tokens(Dataset):
    """Random sequences; what matters here is that training moves the weights."""

    def __init__(self) -> None:
        self.tokens = torch.randint(3, 99, (32, 7), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def tiny_model(name: str = "bert", **overrides: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForMaskedLM.from_config(BY_NAME[name].config(**overrides), qk_init="symmetric")


def tiny_trainer(
    folder: str | os.PathLike,
    callbacks: list,
    model: PreTrainedModel | None = None,
    trainer_class: type[Trainer] = Trainer,
    **arguments: Any,
) -> Trainer:
    """A Trainer of 6 steps that logs every 2nd, on the CPU, without trackers unless asked."""
    settings: dict[str, Any] = {"max_steps": 6, "logging_steps": 2, "save_steps": 6, "learning_rate": 1e-2}
    settings |= {"use_cpu": True, "per_device_train_batch_size": 4, "disable_tqdm": True, "report_to": "none"}
    return trainer_class(
        model=tiny_model() if model is None else model,
        args=TrainingArguments(str(folder), **(settings | arguments)),
        train_dataset=Tokens(),
        eval_dataset=Tokens(),
        callbacks=callbacks,
    )


def scored_rows(trainer: Trainer, prefix: str = "qk") -> dict[int, dict[str, float]]:
    """Rows of the log history that hold scores, by step."""
    return {row["step"]: row for row in trainer.state.log_history if f"{prefix}/symmetry/median" in row}
