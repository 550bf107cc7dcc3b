"""`QKScoreCallback` in a real Trainer: which events, where the values arrive, and that the run is not changed."""

import json
import math
import os
import pickle
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pandas as pd
import pytest
import torch
from tiny_training import scored_rows, tiny_model, tiny_trainer
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import set_seed

import hf_symqk
from hf_symqk import QKScoreCallback, score_model
from hf_symqk.attention import AttentionLayer
from hf_symqk.history import read_history


HERE = Path(__file__).parent


# --- which events -------------------------------------------------------------------------------------------------


def test_scores_join_the_logging_events(tmp_path):
    """Before the first step and at each logging event, at the right step, as floats, and in trainer_state.json."""
    trainer = tiny_trainer(tmp_path, [QKScoreCallback()], eval_strategy="steps", eval_steps=2)
    trainer.train()
    rows = scored_rows(trainer)
    assert list(rows) == [0, 2, 4, 6]
    assert rows[0]["qk/symmetry/median"] == pytest.approx(1, abs=1e-5)
    assert rows[6]["qk/symmetry/median"] < 0.9999, "training moves Q and K apart"
    final = score_model(trainer.model).to_log()
    assert {key: rows[6][key] for key in final} == final
    assert all("loss" in rows[step] for step in (2, 4, 6)), "scores join the loss row of their step"
    assert all(type(value) in (float, int) for row in rows.values() for value in row.values())
    saved = json.loads((tmp_path / "checkpoint-6" / "trainer_state.json").read_text())
    assert [row["step"] for row in saved["log_history"] if "qk/symmetry/layer_00" in row] == [0, 2, 4, 6]


@pytest.mark.parametrize(
    ("options", "arguments", "steps"),
    [
        ({"every": 2}, {"max_steps": 8}, [0, 4, 8]),
        ({"every": 3}, {"max_steps": 8}, [0, 6, 8]),
        ({"every": 3, "log_at_end": False}, {"max_steps": 8}, [0, 6]),
        ({"log_at_start": False}, {}, [2, 4, 6]),
        ({}, {"max_steps": 5}, [0, 2, 4, 5]),
        ({}, {"max_steps": 3, "logging_first_step": True}, [0, 1, 2, 3]),
        ({"log_at_start": False}, {"max_steps": 2, "logging_strategy": "no"}, [2]),
        ({}, {"max_steps": 4, "gradient_accumulation_steps": 2}, [0, 2, 4]),
        ({}, {"max_steps": 16, "logging_strategy": "epoch"}, [0, 8, 16]),
    ],
)
def test_events(options, arguments, steps, tmp_path):
    """Scores come with the k-th logging events, the start and the end; every loss row that was there stays there."""
    trainer = tiny_trainer(tmp_path, [QKScoreCallback(**options)], **arguments)
    trainer.train()
    assert list(scored_rows(trainer)) == steps
    plain = tiny_trainer(tmp_path / "plain", [], **arguments)
    plain.train()
    losses = [[(row["step"], row["loss"]) for row in t.state.log_history if "loss" in row] for t in (trainer, plain)]
    assert losses[0] == losses[1]
    added = len(trainer.state.log_history) - len(plain.state.log_history)
    assert added == (0 in steps), "no event arises but the one before the first step"


def test_options_reach_the_scores(tmp_path):
    """Heads, layers, γ, prefix: what is logged is what `score_model` gives for them."""
    callback = QKScoreCallback(heads=True, layers=[1], gamma=0.5, prefix="w")
    trainer = tiny_trainer(tmp_path, [callback], max_steps=2)
    trainer.train()
    row = scored_rows(trainer, "w")[2]
    expected = score_model(trainer.model, layers=[1], gamma=0.5, null_band=False)  # nobody reads bands of each step
    assert {key: value for key, value in row.items() if key.startswith("w/")} == expected.to_log("w", heads=True)
    assert row["w/symmetry/layer_01_head_03"] == expected.layers[0].head_symmetry[3]
    assert callback.scores == expected
    assert not any(other.startswith(f"{key}/") for key in row for other in row), "no key is the folder of another"


def test_spectral_scores_are_logged_and_kept(tmp_path, capsys):
    """In the log and the history file, on the console their medians alone."""
    callback = QKScoreCallback(spectral=True)
    trainer = tiny_trainer(tmp_path, [callback], max_steps=2)
    trainer.train()
    expected = score_model(trainer.model, spectral=True, heads=False, null_band=False)
    assert callback.scores == expected
    row = scored_rows(trainer)[2]
    assert {key: value for key, value in row.items() if key.startswith("qk/")} == expected.to_log()
    history = read_history(tmp_path)
    assert list(history[history.step == 2].effective_rank) == [layer.effective_rank for layer in expected.layers]
    printed = capsys.readouterr().out
    assert "qk/positivity/median" in printed
    assert "qk/positivity/layer_00" not in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "`every` must be a whole number"),
        ({"every": 1.5}, "`every` must be a whole number"),
        ({"attention": "both"}, "`attention` must be one of 'self', 'cross', 'all'"),
        ({"prefix": "qk/"}, "`prefix` must be a name without a slash"),
    ],
)
def test_options_that_cannot_be_meant(options, message):
    """Refused where they are written."""
    with pytest.raises(ValueError, match=message):
        QKScoreCallback(**options)


def test_layers_that_the_model_does_not_have_are_refused_before_training(tmp_path):
    """The Trainer is not even made."""
    with pytest.raises(ValueError, match=r"asks for \[3\] of stack ''; this model has '': layers 0 to 2"):
        tiny_trainer(tmp_path, [QKScoreCallback(layers=[3])])


# --- where they arrive --------------------------------------------------------------------------------------------


def read_tensorboard(folder: Path) -> dict[str, list[tuple[int, float]]]:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    (events,) = sorted(folder.glob("**/events.out.tfevents.*"))[-1:]
    accumulator = reader.EventAccumulator(str(events.parent))
    accumulator.Reload()
    return {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]
    }


def test_tensorboard_fresh_and_resumed(tmp_path):
    """TensorBoard's own reader finds every value at its step, in one event file a run, fresh and resumed."""
    pytest.importorskip("tensorboard")
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(tmp_path / "events")
    try:
        settings = {"report_to": "tensorboard", "save_steps": 3, "max_steps": 7}
        settings["restore_callback_states_from_checkpoint"] = True
        trainer = tiny_trainer(tmp_path / "out", [QKScoreCallback()], **settings)
        trainer.train()
        rows = scored_rows(trainer)
        assert list(rows) == [0, 2, 4, 6, 7]
        assert len(list((tmp_path / "events").glob("**/events.*"))) == 1
        seen = read_tensorboard(tmp_path / "events")
        for key in ("qk/symmetry/median", "qk/directionality/layer_02", "qk/frobenius_norm/layer_00"):
            tag = key if key in seen else f"train/{key}"
            assert seen[tag] == [(step, pytest.approx(row[key], rel=1e-6)) for step, row in rows.items()]

        os.environ["TENSORBOARD_LOGGING_DIR"] = str(tmp_path / "resumed")
        again = tiny_trainer(tmp_path / "out", [QKScoreCallback()], **settings)
        again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-3"))
        assert scored_rows(again).keys() == rows.keys()
        for step in (4, 6, 7):
            assert scored_rows(again)[step]["qk/symmetry/median"] == rows[step]["qk/symmetry/median"]
        seen = read_tensorboard(tmp_path / "resumed")
        tag = next(tag for tag in seen if tag.endswith("qk/symmetry/median"))
        assert [step for step, _ in seen[tag]] == [4, 6, 7]
    finally:
        del os.environ["TENSORBOARD_LOGGING_DIR"]


def run_python(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        env={**os.environ, "PYTHONPATH": str(HERE), "HF_HUB_OFFLINE": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


TRAIN_AND_REPORT = """
    import json, sys
    from tiny_training import scored_rows, tiny_trainer
    from hf_symqk import QKScoreCallback
    folder, tracker = sys.argv[1:]
    trainer = tiny_trainer(folder, [QKScoreCallback(heads=True)], report_to=tracker, max_steps=5)
    trainer.train()
    json.dump(scored_rows(trainer), open(folder + "/rows.json", "w"))
"""


@pytest.mark.slow
def test_mlflow_file_store(tmp_path):
    """MLflow's file store, read with MLflow's client: every key at every step."""
    mlflow = pytest.importorskip("mlflow")
    store = f"file:{tmp_path / 'mlruns'}"
    environment = {"MLFLOW_TRACKING_URI": store, "MLFLOW_ALLOW_FILE_STORE": "true"}
    result = run_python(TRAIN_AND_REPORT, str(tmp_path), "mlflow", **environment)
    assert result.returncode == 0, result.stderr[-3000:]
    rows = {int(step): row for step, row in json.loads((tmp_path / "rows.json").read_text()).items()}
    assert list(rows) == [0, 2, 4, 5]
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    client = mlflow.MlflowClient(tracking_uri=store)
    (run,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    for key in [key for key in rows[0] if key.startswith("qk/")]:
        history = sorted((metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, key))
        assert history == [(step, pytest.approx(row[key])) for step, row in rows.items()], key


@pytest.mark.slow
def test_trackio_local_database(tmp_path):
    """A local trackio database, read with trackio: every key at every step."""
    pytest.importorskip("trackio")
    environment = {"TRACKIO_DIR": str(tmp_path / "trackio"), "TRACKIO_PROJECT": "qk", "HF_HOME": str(tmp_path / "hf")}
    result = run_python(TRAIN_AND_REPORT, str(tmp_path), "trackio", **environment)
    assert result.returncode == 0, result.stderr[-3000:]
    rows = {int(step): row for step, row in json.loads((tmp_path / "rows.json").read_text()).items()}
    reader = """
        import json, sys
        from trackio.sqlite_storage import SQLiteStorage
        (project,) = SQLiteStorage.get_projects()
        (run,) = SQLiteStorage.get_runs(project)
        print("LOGS", json.dumps(SQLiteStorage.get_logs(project, run)))
    """
    result = run_python(reader, **environment)
    assert result.returncode == 0, result.stderr[-3000:]
    logs = json.loads(result.stdout.split("LOGS ")[1])
    key = next(key for row in logs for key in row if key.endswith("qk/symmetry/median"))
    root = key.removesuffix("qk/symmetry/median")
    # trackio counts its log calls; the optimiser step stands beside the values (as it does for the loss).
    steps = [row["train/global_step"] for row in logs if key in row]
    assert steps == list(rows) == [0, 2, 4, 5]
    for name in [name for name in rows[0] if name.startswith("qk/")]:
        assert [row[root + name] for row in logs if root + name in row] == [
            pytest.approx(row[name]) for row in rows.values()
        ]


def test_console_shows_medians_only(tmp_path, capsys):
    """A line per logging event stays readable; single layers are for trackers and files."""
    tiny_trainer(tmp_path, [QKScoreCallback()], max_steps=2).train()
    printed = capsys.readouterr().out
    assert "qk/symmetry/median" in printed
    assert "layer_00" not in printed


def test_a_callback_of_the_users_own_sees_the_scores(tmp_path):
    """Whoever comes after in the list reads the scores in `logs`, as trackers do."""
    seen = []

    class Reader(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.append((state.global_step, "qk/symmetry/median" in logs))

    tiny_trainer(tmp_path, [Reader(), QKScoreCallback()]).train()
    assert seen == [(0, True), (2, True), (4, True), (6, True), (6, False)]


# --- the history file ---------------------------------------------------------------------------------------------


def test_history_file(tmp_path):
    """One row a layer and head at each measurement, equal to the log, NaN kept, readable as a plain CSV."""
    trainer = tiny_trainer(tmp_path, [QKScoreCallback(heads=True)], max_steps=3)
    trainer.train()
    history = read_history(tmp_path)
    assert list(history.columns) == [
        "step",
        "stack",
        "layer",
        "head",
        "symmetry",
        "directionality",
        "frobenius_norm",
    ]
    assert len(history) == 3 * 3 * (1 + 4)
    for step, row in scored_rows(trainer).items():
        layer = history[(history.step == step) & (history.layer == 2) & history["head"].isna()]
        assert layer.symmetry.item() == row["qk/symmetry/layer_02"]
        head = history[(history.step == step) & (history.layer == 2) & (history["head"] == 3)]
        assert head.directionality.item() == row["qk/directionality/layer_02_head_03"]
    pd.testing.assert_series_equal(pd.read_csv(tmp_path / "qk_scores.csv").symmetry, history.symmetry)


def test_history_survives_kill_and_resume(tmp_path):
    """
    A run killed with SIGKILL right after a measurement has that measurement on disk; resuming from an earlier
    checkpoint drops what lies beyond it, measures it anew, and no row stands twice. An unfinished last line is
    dropped.
    """
    script = """
        import os, signal, sys
        from tiny_training import tiny_trainer
        from transformers import Trainer, TrainerCallback
        from hf_symqk import QKScoreCallback

        class Kill(TrainerCallback):
            def on_log(self, args, state, control, **kwargs):
                if state.global_step == 6:
                    os.kill(os.getpid(), signal.SIGKILL)

        tiny_trainer(sys.argv[1], [QKScoreCallback(), Kill()], max_steps=8, save_steps=4).train()
    """
    result = run_python(script, str(tmp_path))
    assert result.returncode == -signal.SIGKILL
    assert sorted(set(read_history(tmp_path).step)) == [0, 2, 4, 6]
    before = read_history(tmp_path)
    with open(tmp_path / "qk_scores.csv", "a") as file:
        file.write("8,,0,,0.5")
    pd.testing.assert_frame_equal(read_history(tmp_path), before)
    trainer = tiny_trainer(tmp_path, [QKScoreCallback()], max_steps=8, save_steps=4)
    trainer.train(resume_from_checkpoint=True)
    after = read_history(tmp_path)
    assert sorted(set(after.step)) == [0, 2, 4, 6, 8]
    assert not after.duplicated(["step", "stack", "layer", "head"]).any()
    pd.testing.assert_frame_equal(after[after.step <= 4], before[before.step <= 4])
    whole = tiny_trainer(tmp_path / "whole", [QKScoreCallback()], max_steps=8, save_steps=4)
    whole.train()
    # Two processes need not round alike, and training multiplies that; a step measured wrongly differs by a tenth.
    pd.testing.assert_frame_equal(after, read_history(tmp_path / "whole"), rtol=1e-3, atol=1e-3)


def test_a_fresh_run_starts_a_fresh_history(tmp_path):
    """Rows of an earlier run in the same folder are not mixed with the new one's."""
    tiny_trainer(tmp_path, [QKScoreCallback()]).train()
    tiny_trainer(tmp_path, [QKScoreCallback()], max_steps=2).train()
    assert sorted(set(read_history(tmp_path).step)) == [0, 2]
    (tmp_path / "qk_scores.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="is not a history of W_qk scores"):
        read_history(tmp_path)


# --- never harms the run ------------------------------------------------------------------------------------------


class Gradients(TrainerCallback):
    """Keeps what a measurement could disturb: gradients, random state, mode."""

    def __init__(self):
        self.seen = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        self.seen.append((gradients, torch.get_rng_state(), model.training))


def test_training_is_bit_identical(tmp_path):
    """Losses, gradients, random state, mode and saved weights are those of the run without the callback."""
    runs = {}
    for name, callbacks in (("with", [QKScoreCallback(heads=True)]), ("without", [])):
        set_seed(1)
        gradients = Gradients()
        trainer = tiny_trainer(tmp_path / name, [*callbacks, gradients], logging_steps=1)
        trainer.train()
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        saved = (tmp_path / name / "checkpoint-6" / "model.safetensors").read_bytes()
        runs[name] = (losses, saved, gradients.seen, torch.get_rng_state())
    (losses, saved, seen, state), (losses_0, saved_0, seen_0, state_0) = runs.values()
    assert losses == losses_0
    assert saved == saved_0
    assert torch.equal(state, state_0)
    assert len(seen) == len(seen_0) == 6
    for (grads, rng, mode), (grads_0, rng_0, mode_0) in zip(seen, seen_0, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(grads, grads_0, strict=True))
        assert torch.equal(rng, rng_0)
        assert mode == mode_0


def test_an_exception_in_the_measurement_is_logged_once_and_training_goes_on(tmp_path, monkeypatch, caplog):
    """A layer that cannot be measured is named once; it scores NaN, the others stand; `strict=True` raises."""
    original = AttentionLayer.query_key_weights

    def broken(layer):
        if layer.name.endswith("layer.1.attention.self"):
            raise RuntimeError("out of luck")
        return original(layer)

    monkeypatch.setattr(AttentionLayer, "query_key_weights", broken)
    trainer = tiny_trainer(tmp_path, [QKScoreCallback()])
    trainer.train()
    assert trainer.state.global_step == 6
    said = [record.getMessage() for record in caplog.records if "QKScoreCallback" in record.getMessage()]
    assert said == [
        "QKScoreCallback (training goes on): bert.encoder.layer.1.attention.self: RuntimeError: out of luck"
    ]
    rows = scored_rows(trainer)
    assert list(rows) == [0, 2, 4, 6]
    assert math.isnan(rows[6]["qk/symmetry/layer_01"])
    assert math.isfinite(rows[6]["qk/symmetry/layer_00"])
    assert math.isfinite(rows[6]["qk/symmetry/median"])
    with pytest.raises(RuntimeError, match="out of luck"):
        tiny_trainer(tmp_path, [QKScoreCallback(strict=True)]).train()


def test_a_history_that_cannot_be_written_does_not_stop_training(tmp_path, caplog):
    """A folder in the file's place, a full disk: said once, and the log still has the scores."""
    (tmp_path / "qk_scores.csv").mkdir()
    trainer = tiny_trainer(tmp_path, [QKScoreCallback()])
    trainer.train()
    assert list(scored_rows(trainer)) == [0, 2, 4, 6]
    assert sum("the history file" in record.getMessage() for record in caplog.records) == 1


def test_nan_weights_give_nan_and_one_warning(tmp_path, caplog):
    """A run that has gone wrong is reported as it is, and not once a step."""
    model = tiny_model()
    with torch.no_grad():
        model.bert.encoder.layer[2].attention.self.query.weight[0, 0] = math.nan
    trainer = tiny_trainer(tmp_path, [QKScoreCallback()], model=model)
    trainer.train()
    assert math.isnan(scored_rows(trainer)[0]["qk/symmetry/layer_02"])
    assert math.isfinite(scored_rows(trainer)[0]["qk/symmetry/median"])
    assert sum("not finite" in record.getMessage() for record in caplog.records) == 1


def test_wrapped_models(tmp_path):
    """torch.compile, gradient checkpointing and DataParallel wrap the model; scores and names stay."""
    plain = score_model(tiny_model())
    compiled = torch.compile(tiny_model())
    parallel = torch.nn.DataParallel(tiny_model())
    checkpointed = tiny_model()
    checkpointed.gradient_checkpointing_enable()
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    wrapped = tiny_model()
    apply_activation_checkpointing(wrapped, check_fn=lambda module: type(module).__name__ == "BertLayer")
    assert any("_checkpoint_wrapped_module" in name for name, _ in wrapped.named_modules())
    for model in (compiled, parallel, checkpointed, wrapped):
        assert score_model(model) == plain


def test_two_callbacks_keep_apart(tmp_path):
    """Each has its own keys and its own history file, and neither disturbs the other's events."""
    callbacks = [QKScoreCallback(), QKScoreCallback(prefix="loud", layers=[1], every=2)]
    trainer = tiny_trainer(tmp_path, callbacks)
    trainer.train()
    assert list(scored_rows(trainer)) == [0, 2, 4, 6]
    assert list(scored_rows(trainer, "loud")) == [0, 4, 6]
    first, second = read_history(tmp_path), read_history(tmp_path / "loud_scores.csv")
    assert not first.duplicated(["step", "layer"]).any()
    assert sorted(set(second.step)) == [0, 4, 6]
    assert set(second.layer) == {1}


def test_metrics_of_the_run_stay_as_they_are(tmp_path):
    """The scores of the last step are logged with the summary but are not among the metrics that `train()` returns."""
    trainer = tiny_trainer(tmp_path, [QKScoreCallback()], max_steps=5)
    metrics = trainer.train().metrics
    assert 5 in scored_rows(trainer)
    assert metrics.keys() == tiny_trainer(tmp_path / "plain", [], max_steps=5).train().metrics.keys()


def test_trainers_that_log_in_their_own_way(tmp_path):
    """Renamed keys, a log inside a step, a history that is not kept: scores come with the right events."""

    class Renaming(Trainer):
        def log(self, logs, *args, **kwargs):
            super().log({f"train/{key}": value for key, value in logs.items()}, *args, **kwargs)

        def compute_loss(self, *args, **kwargs):
            super().log({"loss": 0.0})
            return super().compute_loss(*args, **kwargs)

    class Forgetting(Trainer):
        def log(self, logs, *args, **kwargs):
            self.control = self.callback_handler.on_log(self.args, self.state, self.control, logs)

    for trainer_class in (Renaming, Forgetting):
        trainer = tiny_trainer(tmp_path, [QKScoreCallback(every=2)], trainer_class=trainer_class, max_steps=7)
        trainer.train()
        assert list(scored_rows(trainer)) == [0, 4, 7], trainer_class.__name__
        assert scored_rows(trainer)[0]["qk/symmetry/median"] == pytest.approx(1, abs=1e-5)


def test_events_that_other_callbacks_decide_on(tmp_path):
    """A callback that asks for a log, or vetoes one: scores come with the events that really happen."""

    class Decides(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3:
                control.should_log = True
            if state.global_step == 4:
                control.should_log = False

    trainer = tiny_trainer(tmp_path, [QKScoreCallback(), Decides()])
    trainer.train()
    assert list(scored_rows(trainer)) == [0, 2, 3, 6]
    trainer = tiny_trainer(tmp_path, [QKScoreCallback(every=2), Decides()], max_steps=8)
    trainer.train()
    assert list(scored_rows(trainer)) == [0, 3, 8], "events are 2, 3, 6 and 8"


def test_one_callback_in_two_trainers(tmp_path):
    """The event before the first step goes to the Trainer that trains."""
    seen = {}

    class Reader(TrainerCallback):
        def __init__(self, name):
            self.name = name

        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.setdefault(self.name, []).append(state.global_step)

    callback = QKScoreCallback()
    first = tiny_trainer(tmp_path / "first", [callback, Reader("first")])
    tiny_trainer(tmp_path / "second", [callback, Reader("second")])
    first.train()
    assert seen == {"first": [0, 2, 4, 6, 6]}


def test_two_callbacks_of_one_name_are_refused(tmp_path):
    """They would overwrite each other's values."""
    with pytest.raises(ValueError, match="a QKScoreCallback with prefix 'qk' already"):
        tiny_trainer(tmp_path, [QKScoreCallback(layers=[0]), QKScoreCallback(layers=[1])])


def test_callback_added_later_and_pickled(tmp_path):
    """A choice that the model does not have is refused by `add_callback` too; a trainer's callback can be pickled."""
    trainer = tiny_trainer(tmp_path, [])
    with pytest.raises(ValueError, match=r"asks for \[9\]"):
        trainer.add_callback(QKScoreCallback(layers=[9]))
    trainer.pop_callback(QKScoreCallback)
    callback = QKScoreCallback(every=3)
    trainer.add_callback(callback)
    trainer.train()
    copy = pickle.loads(pickle.dumps(callback))
    assert copy.every == 3
    assert copy.scores == callback.scores
    tiny_trainer(tmp_path, [copy], max_steps=2).train()


def test_without_the_plugin_the_log_history_still_has_the_scores(tmp_path):
    """`unregister()` takes away the place before the trackers, not the measurement."""
    model = tiny_model()
    hf_symqk.unregister()
    try:
        trainer = tiny_trainer(tmp_path, [QKScoreCallback()], model=model)
        trainer.train()
    finally:
        hf_symqk.register()
    assert list(scored_rows(trainer)) == [0, 2, 4, 6]
