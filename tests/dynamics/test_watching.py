"""`QKScoreCallback(gradients=True)` in a real Trainer: what is logged, and that the run does not notice."""

import pickle
from collections import defaultdict, deque
from unittest import mock

import pytest
import torch
import transformers
from architectures import BY_NAME, LAYERS
from example_weighted import ExampleWeightedTrainer
from tiny_training import scored_rows, tiny_trainer
from token_weighted import TokenWeightedTrainer
from torch.nn import functional as F
from transformers import Trainer, TrainingArguments

import hf_symqk
from hf_symqk import QKScoreCallback, qk_updates
from hf_symqk.dynamics import LastBatch
from hf_symqk.dynamics.watching import _measures_alone


class Watched(Trainer):
    """Keeps what each step is given."""

    def training_step(self, model, inputs, *args, **kwargs):
        self.seen = dict(inputs)
        return super().training_step(model, inputs, *args, **kwargs)


def losses(trainer: Trainer) -> list[tuple[int, float, float]]:
    return [(row["step"], row["loss"], row["grad_norm"]) for row in trainer.state.log_history if "loss" in row]


@pytest.mark.parametrize(
    "arguments",
    [{}, {"gradient_accumulation_steps": 2}, {"bf16": True}, {"eval_strategy": "steps", "eval_steps": 2}],
)
def test_the_run_does_not_notice(arguments, tmp_path):
    """With dropout in the model: same losses, same gradient norms, same weights, same random state, no row more."""
    trainer = tiny_trainer(tmp_path / "with", [QKScoreCallback(gradients=True)], **arguments)
    trainer.train()
    state = torch.get_rng_state()
    plain = tiny_trainer(tmp_path / "without", [QKScoreCallback()], **arguments)
    plain.train()
    assert torch.equal(state, torch.get_rng_state())
    assert losses(trainer) == losses(plain)
    for one, other in zip(trainer.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(one, other)
    rows = [scored_rows(one) for one in (trainer, plain)]
    assert len(trainer.state.log_history) == len(plain.state.log_history)
    assert rows[0].keys() == rows[1].keys()
    for step, row in rows[0].items():
        assert ("qk/update_symmetry/median" in row) == (step > 0), "before the first step there is no batch"
        rest = {key: value for key, value in row.items() if "update_" not in key and "runtime" not in key}
        assert {key: rows[1][step][key] for key in rest if key.startswith("qk/")} == {
            key: value for key, value in rest.items() if key.startswith("qk/")
        }


def test_what_is_logged_is_the_update_of_the_last_batch(tmp_path):
    """Of its first sequences, by the weights after the step; heads, layers, γ and prefix as for the scores."""
    callback = QKScoreCallback(gradients=3, heads=True, layers=[1], gamma=0.5, prefix="w")
    trainer = tiny_trainer(tmp_path, [callback], trainer_class=Watched)
    trainer.train()
    batch = {name: value[:3] for name, value in trainer.seen.items()}
    expected = qk_updates(trainer.model, batch, layers=[1]).scores(gamma=0.5)
    (layer,), (found,) = expected.layers, callback.update_scores.layers
    assert found.head_symmetry == pytest.approx(layer.head_symmetry, abs=1e-6)
    row = scored_rows(trainer, "w")[6]
    assert row["w/update_symmetry/layer_01"] == pytest.approx(layer.symmetry, abs=1e-6)
    assert row["w/update_directionality/layer_01_head_03"] == pytest.approx(layer.head_directionality[3], abs=1e-6)
    assert row["w/update_directionality/median"] == row["w/update_directionality/layer_01"]
    assert not any(other.startswith(f"{key}/") for key in row for other in row), "no key is the folder of another"


def test_the_console_shows_medians_alone(tmp_path, capsys):
    """As of the scores: values of single layers are for trackers and files."""
    tiny_trainer(tmp_path, [QKScoreCallback(gradients=True)], max_steps=2).train()
    shown = capsys.readouterr().out
    assert "qk/update_symmetry/median" in shown
    assert "qk/update_symmetry/layer_00" not in shown


def test_the_loss_is_the_trainers(tmp_path):
    """Label smoothing and loss functions take the labels out of what the model gets."""

    def loss(outputs, labels, num_items_in_batch=None):
        return (outputs.logits.flatten(0, 1).square().mean(-1) * labels.flatten()).mean()

    class Own(Watched):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, compute_loss_func=loss, **kwargs)

    callback = QKScoreCallback(gradients=True)
    trainer = tiny_trainer(tmp_path, [callback], trainer_class=Own)
    trainer.train()
    expected = qk_updates(trainer.model, trainer.seen, loss=lambda outputs, batch: loss(outputs, batch["labels"]))
    for found, layer in zip(callback.update_scores.layers, expected.scores().layers, strict=True):
        assert found.symmetry == pytest.approx(layer.symmetry, abs=1e-5)

    smooth = tiny_trainer(tmp_path, [callback], trainer_class=Watched, label_smoothing_factor=0.3)
    smooth.train()

    def smoothed(outputs, batch):
        return F.cross_entropy(outputs.logits.flatten(0, 1), batch["labels"].flatten(), label_smoothing=0.3)

    expected = qk_updates(smooth.model, smooth.seen, loss=smoothed)
    for found, layer in zip(callback.update_scores.layers, expected.scores().layers, strict=True):
        assert found.symmetry == pytest.approx(layer.symmetry, abs=1e-5)


def test_a_loss_that_logs_is_not_heard(tmp_path):
    """No event arises from computing a loss once more."""

    class Logs(Trainer):
        def compute_loss(self, *args, **kwargs):
            self.log({"inside": 0.0})
            return super().compute_loss(*args, **kwargs)

    trainers = [
        tiny_trainer(tmp_path, [QKScoreCallback(gradients=asked)], trainer_class=Logs) for asked in (True, False)
    ]
    for trainer in trainers:
        trainer.train()
    counts = [sum("inside" in row for row in trainer.state.log_history) for trainer in trainers]
    assert counts[0] == counts[1] > 0
    assert "qk/update_symmetry/median" in scored_rows(trainers[0])[6]


class Fails(Trainer):
    """A loss that cannot be had outside of training."""

    def compute_loss(self, model, *args, **kwargs):
        if not model.training:
            raise RuntimeError("only in training")
        return super().compute_loss(model, *args, **kwargs)


def test_what_goes_wrong_is_said_once_and_training_goes_on(tmp_path, caplog):
    """The scores of W_qk stand; with `strict` it is an error."""
    trainer = tiny_trainer(tmp_path, [QKScoreCallback(gradients=True)], trainer_class=Fails)
    trainer.train()
    assert trainer.state.global_step == 6
    assert list(scored_rows(trainer)) == [0, 2, 4, 6]
    assert not any("update_" in key for row in scored_rows(trainer).values() for key in row)
    assert (
        sum("the updates of W_qk: RuntimeError: only in training" in record.getMessage() for record in caplog.records)
        == 1
    )
    strict = tiny_trainer(tmp_path, [QKScoreCallback(gradients=True, strict=True)], trainer_class=Fails)
    with pytest.raises(RuntimeError, match="only in training"):
        strict.train()


class Remembers(Trainer):
    """Keeps what its losses were, in every way that a Trainer may."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.losses, self.last, self.steps = [], deque(maxlen=3), set()
        self.total, self.number = torch.zeros(()), 0
        self.metrics = {"train": defaultdict(list), "eval": defaultdict(list)}

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, self.outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        value = loss.item()
        self.losses.append(value)
        self.last.append(value)
        self.steps.add(value)
        self.total += value
        self.number += 1
        self.metrics["train"]["loss"].append(value)
        self.metrics["eval" if not model.training else "train"][f"new {self.number}"].append(value)
        self.newest = value
        return loss

    def memory(self):
        held = self.losses, list(self.last), self.steps, self.total.item(), self.number, self.newest
        assert self.outputs.loss.item() == self.newest
        return (*held, {name: dict(kept) for name, kept in self.metrics.items()})


def test_what_a_trainer_remembers_of_its_losses_is_of_the_run(tmp_path):
    """Lists, deques, sets, nested mappings, tensors and numbers are those of a run that is not measured."""
    trainers = []
    for asked in (2, False):
        trainers.append(tiny_trainer(tmp_path, [QKScoreCallback(gradients=asked)], trainer_class=Remembers))
        trainers[-1].train()
    assert trainers[0].memory() == trainers[1].memory()
    assert trainers[0].number == 6
    assert "qk/update_symmetry/median" in scored_rows(trainers[0])[6]


def divided(outputs, labels, num_items_in_batch):
    """A loss function that counts on being told the number of items."""
    sums = F.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return sums / num_items_in_batch


@pytest.mark.parametrize("loss", [None, divided])
@pytest.mark.parametrize(("size", "accumulated"), [(8, 1), (32, 1), (8, 4)])
def test_the_norm_depends_on_the_sequences_alone(loss, size, accumulated, tmp_path):
    """It is that of their mean loss, not of their share in a step of however many batches."""
    callback = QKScoreCallback(gradients=8)
    arguments = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulated, "max_steps": 1}
    for causal in (False, True) if loss is None else (False,):
        model = None
        if causal:  # which divides by what it is told
            model = transformers.AutoModelForCausalLM.from_config(BY_NAME["llama"].config())
        trainer = tiny_trainer(tmp_path, [callback], model=model, trainer_class=Watched, **arguments)
        trainer.compute_loss_func = loss
        trainer.train()
        batch = {name: value[:8] for name, value in trainer.seen.items()}
        expected = qk_updates(trainer.model, batch).scores()
        row = scored_rows(trainer)[1]
        for number, layer in enumerate(expected.layers):
            assert row[f"qk/update_frobenius_norm/layer_{number:02d}"] == pytest.approx(layer.frobenius_norm, rel=1e-4)


class Own(Trainer):
    """A loss that nobody knows."""

    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs)


class Declared(Own):
    measures_alone = True


class DeclaredBefore(Declared):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs)


@pytest.mark.parametrize(
    ("trainer_class", "measured"),
    [
        (Trainer, True),
        (Watched, True),
        (Own, False),
        (Declared, True),
        (type("Heir", (Declared,), {}), True),
        (DeclaredBefore, False),
    ],
)
def test_no_loss_that_may_wait_is_computed_alone(trainer_class, measured, tmp_path, caplog, monkeypatch):
    """What is said of a loss does not hold for that of a subclass. Said once, and training goes on."""
    callback = QKScoreCallback(gradients=True)
    trainer = tiny_trainer(tmp_path, [callback], trainer_class=trainer_class)
    trainer.train()
    batch = LastBatch(trainer, dict(zip(("input_ids", "labels"), 2 * [torch.ones(1, 4, dtype=int)], strict=True)))
    monkeypatch.setattr(TrainingArguments, "world_size", 2)
    callback._batch = batch
    values = {}
    for _ in range(2):
        callback._guard("the updates", callback._measure_updates, trainer.model, values)
    assert any("update_" in key for key in values) == measured
    said = [record.getMessage() for record in caplog.records if "`measures_alone = True`" in record.getMessage()]
    assert len(said) == (not measured)


def test_a_loss_function_may_wait_as_well(tmp_path):
    """So it needs the same word; and a loss that was put into one Trainer is not the class's."""
    trainer = tiny_trainer(tmp_path, [])
    assert _measures_alone(trainer)
    trainer.compute_loss_func = lambda outputs, labels, num_items_in_batch=None: outputs.loss
    assert not _measures_alone(trainer)
    trainer.compute_loss_func = None
    trainer.compute_loss = trainer.compute_loss
    assert not _measures_alone(trainer)
    assert TokenWeightedTrainer.measures_alone
    assert ExampleWeightedTrainer.measures_alone


# --- memory and what is cut ---


class Out(Watched):
    """Runs out of memory outside of training."""

    raised: Exception
    calls = 0

    def compute_loss(self, model, *args, **kwargs):
        if not model.training:
            type(self).calls += 1
            raise self.raised
        return super().compute_loss(model, *args, **kwargs)


@pytest.mark.parametrize(
    "raised",
    [torch.OutOfMemoryError("much"), MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")],
)
def test_out_of_memory_once(raised, tmp_path, caplog):
    """It is not tried again; said once, with what to do."""
    cls = type("OutHere", (Out,), {"raised": raised})
    callback = QKScoreCallback(gradients=True)
    trainer = tiny_trainer(tmp_path, [callback], trainer_class=cls)
    trainer.train()
    assert trainer.state.global_step == 6
    assert cls.calls == 1
    said = [record.getMessage() for record in caplog.records if "took more memory than" in record.getMessage()]
    assert len(said) == 1
    assert "`gradients_memory_gib`" in said[0]
    assert callback.update_scores is None


def test_a_batch_in_which_nothing_is_predicted(tmp_path, caplog):
    """Of the sequences that are measured, which may be fewer than the batch has."""

    class Unlabelled(Trainer):
        def _prepare_inputs(self, inputs):
            inputs = super()._prepare_inputs(inputs)
            return {**inputs, "labels": torch.cat([inputs["labels"][:2] * 0 - 100, inputs["labels"][2:]])}

    callback = QKScoreCallback(gradients=2)
    trainer = tiny_trainer(tmp_path, [callback], trainer_class=Unlabelled)
    trainer.train()
    said = [record.getMessage() for record in caplog.records if "the updates of W_qk" in record.getMessage()]
    assert len(said) == 1
    assert "All 14 labels of the batch are -100" in said[0]
    assert callback.update_scores is None


def test_scores_of_an_earlier_step_do_not_stay(tmp_path):
    """After a measurement that failed there are no scores, not those of the last one that did not."""

    class Later(Trainer):
        def compute_loss(self, model, *args, **kwargs):
            if not model.training and self.state.global_step > 2:
                raise RuntimeError("from the third step on")
            return super().compute_loss(model, *args, **kwargs)

    callback = QKScoreCallback(gradients=True)
    trainer = tiny_trainer(tmp_path, [callback], trainer_class=Later)
    trainer.train()
    assert ["qk/update_symmetry/median" in row for row in scored_rows(trainer).values()] == [False, True, False, False]
    assert callback.scores is not None
    assert callback.update_scores is None


def test_fewer_sequences_where_the_memory_is_for_fewer(tmp_path, caplog):
    """The updates of as many as fit; where one is too many none, by the name of the option that the user has."""
    one = 5 * 4 * 4 * 7 * 7 * LAYERS / 2**30  # 5 numbers of 4 bytes, 4 heads, 7 × 7 tokens, in GiB
    callback = QKScoreCallback(gradients=4, gradients_memory_gib=2.5 * one)
    strict = tiny_trainer(tmp_path, [QKScoreCallback(gradients=4, gradients_memory_gib=one, strict=True)])
    with pytest.raises(ValueError, match="more than `gradients_memory_gib`"):  # forms are larger here than logits
        strict.train()
    caplog.clear()
    trainer = tiny_trainer(tmp_path, [callback], trainer_class=Watched)
    with mock.patch("hf_symqk.dynamics.outer_sums.Room.reserve"):  # so that logits alone count
        trainer.train()
    batch = {name: value[:2] for name, value in trainer.seen.items()}
    expected = qk_updates(trainer.model, batch).scores()
    for found, layer in zip(callback.update_scores.layers, expected.layers, strict=True):
        assert found.symmetry == pytest.approx(layer.symmetry, abs=1e-6)
    said = [record.getMessage() for record in caplog.records if "fewer sequences than 4" in record.getMessage()]
    assert len(said) == 1

    none = QKScoreCallback(gradients=4, gradients_memory_gib=0.9 * one)
    trainer = tiny_trainer(tmp_path, [none])
    trainer.train()
    assert none.update_scores is None
    assert not any("update_" in key for row in scored_rows(trainer).values() for key in row)
    assert any("the updates of W_qk: LogitsTooLargeError" in record.getMessage() for record in caplog.records)


def test_what_is_cut_out_of_a_batch(tmp_path):
    """Whatever has an entry a sequence, wherever; what has none is refused where something has to be cut."""
    trainer = tiny_trainer(tmp_path, [])
    tokens = torch.arange(30).view(6, 5)
    inputs = {
        "labels": tokens,
        "input_ids": tokens,
        "position_ids": torch.arange(90).view(3, 6, 5),
        "count": torch.tensor([30]),
        "scalar": torch.tensor(30),
        "ids": list("abcdef"),
        "nested": {"pixels": tokens.view(6, 1, 5), "pair": (1, 2, 3, 4, 5, 6)},
        "return_dict": True,
    }
    cut = LastBatch(trainer, inputs).sequences(2)
    assert cut.keys() == inputs.keys()
    assert torch.equal(cut["input_ids"], tokens[:2])
    assert torch.equal(cut["position_ids"], inputs["position_ids"][:, :2])
    assert torch.equal(cut["nested"]["pixels"], inputs["nested"]["pixels"][:2])
    assert (cut["ids"], cut["nested"]["pair"], cut["return_dict"]) == (["a", "b"], (1, 2), True)
    assert (cut["count"].tolist(), cut["scalar"].item()) == ([30], 30)
    three = LastBatch(trainer, {"input_ids": tokens[:3], "position_ids": torch.arange(45).view(3, 3, 5)})
    assert three.sequences(1)["position_ids"].shape == (3, 1, 5), "as many sequences as kinds of positions"

    patches = LastBatch(trainer, {**inputs, "patches": torch.zeros(40, 8)})
    assert patches.sequences(6).keys() == {*inputs, "patches"}
    with pytest.raises(ValueError, match=r"first 2 of 6 sequences .* 'patches' has shape \(40, 8\)"):
        patches.sequences(2)
    with pytest.raises(ValueError, match=r"'nested.names' has 5 entries"):
        LastBatch(trainer, {**inputs, "nested": {"names": [1] * 5}}).sequences(2)


def test_the_hook_is_taken_out_with_the_others(tmp_path, caplog):
    """`unregister()` restores the Trainer; without the hook no batch is seen, which is said."""
    callback = QKScoreCallback(gradients=True)
    trainer = tiny_trainer(tmp_path, [callback])
    hooked = Trainer.__dict__["training_step"]
    hf_symqk.unregister()
    try:
        assert Trainer.__dict__["training_step"] is not hooked
        assert Trainer.__dict__["training_step"].__module__ == "transformers.trainer"
        trainer.train()
    finally:
        hf_symqk.register()
    assert sum("no training step was seen" in record.getMessage() for record in caplog.records) == 1
    assert not any("update_" in key for row in scored_rows(trainer).values() for key in row)


def test_nothing_is_held_after_the_run(tmp_path):
    """Neither the last batch nor the Trainer, in the callback or in a copy of it."""
    callback = QKScoreCallback(gradients=True)
    trainer = tiny_trainer(tmp_path, [callback], max_steps=2)
    trainer.train()
    assert callback._batch is None
    callback.on_batch(trainer, {"input_ids": torch.ones(1, 1)}, None)
    assert pickle.loads(pickle.dumps(callback))._batch is None


@pytest.mark.parametrize("gradients", [-1, "yes", 0.5])
def test_options_that_cannot_be_meant(gradients):
    """Refused where they are written."""
    with pytest.raises(ValueError, match="`gradients` must be True, False or a number of sequences"):
        QKScoreCallback(gradients=gradients)


@pytest.mark.parametrize("amount", [0, -1.0, float("nan"), "8", True, None])
def test_amounts_of_memory_that_cannot_be_meant(amount):
    """In the callback and by hand, each by its own name."""
    with pytest.raises(ValueError, match="`gradients_memory_gib` must be a number of GiB above 0"):
        QKScoreCallback(gradients_memory_gib=amount)
    with pytest.raises(ValueError, match="`memory_gib` must be a number of GiB above 0"):
        qk_updates(None, {}, memory_gib=amount)
