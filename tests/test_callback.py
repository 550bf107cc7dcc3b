"""`QKScoreCallback` in a real Trainer."""

import json

import pytest
import torch
from architectures import BY_NAME
from torch.utils.data import Dataset
from transformers import AutoModelForMaskedLM, Trainer, TrainingArguments

from hf_symqk import QKScoreCallback, score_model


class Tokens(Dataset):
    """32 random sequences; what matters here is that training moves the weights."""

    def __init__(self) -> None:
        self.tokens = torch.randint(3, 99, (32, 7), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def train(folder, callbacks, **arguments) -> Trainer:
    torch.manual_seed(0)
    model = AutoModelForMaskedLM.from_config(BY_NAME["bert"].config(), qk_init="symmetric")
    settings = {"max_steps": 6, "logging_steps": 2, "learning_rate": 1e-2, "save_steps": 6, "report_to": "none"}
    settings |= {"use_cpu": True, "per_device_train_batch_size": 4, "disable_tqdm": True} | arguments
    trainer = Trainer(
        model=model,
        args=TrainingArguments(str(folder), **settings),
        train_dataset=Tokens(),
        eval_dataset=Tokens(),
        callbacks=callbacks,
    )
    trainer.train()
    return trainer


def test_scores_arrive_in_the_log_history(tmp_path):
    """Before the first step and at each logging event, at the right step, as floats, and in trainer_state.json."""
    trainer = train(tmp_path, [QKScoreCallback()], eval_strategy="steps", eval_steps=2)
    rows = {row["step"]: row for row in trainer.state.log_history if "qk/symmetry/median" in row}
    assert list(rows) == [0, 2, 4, 6]
    assert rows[0]["qk/symmetry/median"] == pytest.approx(1, abs=1e-5)
    assert rows[6]["qk/symmetry/median"] < 0.9999, "training moves Q and K apart"
    final = score_model(trainer.model).to_log()
    assert {key: rows[6][key] for key in final} == final
    assert all("loss" in rows[step] for step in (2, 4, 6)), "scores join the loss row of their step"
    saved = json.loads((tmp_path / "checkpoint-6" / "trainer_state.json").read_text())
    assert [row["step"] for row in saved["log_history"] if "qk/symmetry/layer_00" in row] == [0, 2, 4, 6]


def test_training_is_not_changed(tmp_path):
    """Losses and weights with and without the callback are bit-identical."""
    first, second = train(tmp_path / "with", [QKScoreCallback()]), train(tmp_path / "without", [])
    losses = [[row["loss"] for row in trainer.state.log_history if "loss" in row] for trainer in (first, second)]
    assert losses[0] == losses[1]
    pairs = zip(first.model.parameters(), second.model.parameters(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
