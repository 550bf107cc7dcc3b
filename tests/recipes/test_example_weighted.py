"""A step's loss and gradient are those of the mean over its examples, however they are spread; and so is `eval_loss`.

22 examples in steps of 8: the last step of an epoch has 6, which no split shares out evenly.
"""

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from arguments import RecipeError
from example_run import HELD_OUT, SEED, STEP, TRAINING, build_model, examples, run
from example_weighted import ExampleMeanLoss, ExampleWeightedTrainer, KeyedSampler
from launching import in_processes
from torch.nn import functional
from transformers import ViTForImageClassification


KINDS = ["images", "numbers"]


def losses_by_hand(model, data, keys):
    """Loss of each example, one at a time, in float64."""
    model = model.double().eval()
    losses = []
    for key in keys:
        example = data[key]
        label = example.pop("labels")
        inputs = {
            name: (value.double() if value.is_floating_point() else value)[None] for name, value in example.items()
        }
        with torch.no_grad():
            logits = model(**inputs).logits[0]
        number = label.is_floating_point()
        losses.append(float((logits[0] - label) ** 2 if number else -logits.log_softmax(-1)[label]))
    return losses


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """One process, one batch of 8: computed once for each kind."""
    results = {}

    def get(kind):
        if kind not in results:
            results[kind] = run(kind, 8, 1, tmp_path_factory.mktemp(kind))
        return results[kind]

    return get


def agree(result, reference):
    for name in ("loss", "grad_norm", "eval_loss", "eval_sum"):
        assert len(result[name]) == len(reference[name]) >= 2
        # Sums in another order; the differences grow over the steps.
        assert result[name] == pytest.approx(reference[name], rel=1e-3), name
    assert result["eval_examples"] == reference["eval_examples"] == [HELD_OUT] * 2
    assert result["fingerprint"] == reference["fingerprint"]
    assert result["epoch"] == reference["epoch"] == 2


@pytest.mark.parametrize("kind", KINDS)
def test_steps_log_the_mean_over_their_examples(kind, tmp_path):
    """With a learning rate of 0 every step's loss is that of the first weights."""
    result, data = run(kind, 8, 1, tmp_path, learning_rate=0.0), examples(kind, TRAINING, 0)
    for epoch in (0, 1):
        order = np.random.default_rng([SEED, epoch]).permutation(TRAINING).tolist()
        losses = losses_by_hand(build_model(kind), data, [(epoch, index) for index in order])
        expected = [np.mean(losses[start : start + STEP]) for start in (0, 8, 16)]
        assert result["loss"][3 * epoch : 3 * epoch + 3] == pytest.approx(expected, rel=1e-4)
        assert np.ptp(expected) > 1e-2 * np.mean(expected)
    held_out = losses_by_hand(build_model(kind), examples(kind, HELD_OUT, 1), range(HELD_OUT))
    assert result["eval_loss"] == pytest.approx([np.mean(held_out)] * 2, rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_of_the_last_step_is_that_of_its_mean(kind, tmp_path):
    result, data = run(kind, 2, 4, tmp_path, learning_rate=0.0), examples(kind, TRAINING, 0)
    rows = [data[0, index] for index in np.random.default_rng([SEED, 0]).permutation(TRAINING)[16:].tolist()]
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    labels, model = batch.pop("labels"), build_model(kind)
    logits = model(**batch).logits
    loss = functional.mse_loss(logits[:, 0], labels) if kind == "numbers" else functional.cross_entropy(logits, labels)
    loss.backward()
    norms = [parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None]
    assert result["grad_norm"][2] == pytest.approx(float(torch.stack(norms).norm()), rel=1e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("batch", "accumulation"), [(4, 2), (1, 8)])
def test_accumulation_changes_nothing(kind, batch, accumulation, reference, tmp_path):
    agree(run(kind, batch, accumulation, tmp_path), reference(kind))


@pytest.mark.parametrize("extra", [{"eval_batch": 13}, {"eval_batch": 5, "prediction_loss_only": True}])
def test_held_out_loss_is_independent_of_batch_size_and_arguments(extra, reference, tmp_path):
    result = run("images", 8, 1, tmp_path, **extra)
    assert result["eval_loss"] == pytest.approx(reference("images")["eval_loss"], rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_resume_inside_the_second_epoch(kind, reference, tmp_path):
    """For images too, whose architecture is saved under other names than its own."""
    saved = {"save_strategy": "steps", "save_steps": 4}
    whole = run(kind, 8, 1, tmp_path, **saved)
    agree(whole, reference(kind))
    resumed = run(kind, 8, 1, tmp_path / "more", resume=str(tmp_path / "checkpoint-4"), **saved)
    assert resumed["loss"] == pytest.approx(whole["loss"], rel=1e-6)
    assert resumed["fingerprint"] == whole["fingerprint"]


def test_best_model_is_loaded_under_other_names(tmp_path):
    """Steps of this length spoil the model: the best is the first that is evaluated."""
    settings = {"save_strategy": "steps", "save_steps": 3, "load_best_model_at_end": True, "warmup_steps": 100}
    result = run("images", 8, 1, tmp_path, learning_rate=100.0, **settings)
    assert result["eval_loss"][1] > result["eval_loss"][0]
    kept, best = result["trainer"].model, ViTForImageClassification.from_pretrained(tmp_path / "checkpoint-3")
    assert all(torch.equal(value, kept.state_dict()[name]) for name, value in best.state_dict().items())


def torchrun(*words):
    command = [*in_processes(2), str(Path(__file__).parent / "example_run.py"), *words]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_change_nothing(kind, reference, tmp_path):
    """In the last step one process has four examples and the other two. Resumed inside the second epoch as well."""
    for resume in ((), ("--resume",)):
        file = tmp_path / "result.json"
        torchrun(kind, "2", "2", str(file), *resume)
        result = json.loads(file.read_text())
        assert result["processes"] == result["distributed"] == 2
        agree(result, reference(kind))


def test_keys_of_an_epoch():
    sampler = KeyedSampler(22, SEED, 8)
    first = list(sampler)
    assert len(first) == len(sampler) == 24
    assert {index for _, index in first[:22]} == set(range(22))
    assert first[22:] == [(0, 22), (0, 23)]
    sampler.epoch = 1
    second = list(sampler)
    assert {epoch for epoch, _ in second} == {1}
    assert [index for _, index in second[:22]] != [index for _, index in first[:22]]
    assert list(KeyedSampler(22, SEED, 8)) == first != list(KeyedSampler(22, SEED + 1, 8))
    assert list(KeyedSampler(22, SEED, 8, drop_last=True)) == first[:16]


def test_rows_that_fill_a_step_have_no_label():
    for kind in KINDS:
        data = examples(kind, TRAINING, 0)
        real, filling = data.__getitems__([(0, 1), (0, TRAINING + 1)])
        assert filling["labels"] == -100 != real["labels"]
        assert filling["labels"].dtype == real["labels"].dtype
        (name,) = set(real) - {"labels"}
        assert torch.equal(filling[name], real[name])


def test_loss_function_by_hand():
    torch.manual_seed(0)
    logits, labels = torch.randn(4, 3), torch.tensor([2, 0, -100, 1])
    log_p = logits.log_softmax(-1)
    nats = -(log_p[0, 2] + log_p[1, 0] + log_p[3, 1]).item()
    loss = ExampleMeanLoss()
    for outputs in ({"logits": logits}, (logits,)):
        assert loss(outputs, labels, 12).item() == pytest.approx(nats / 12)
        assert loss(outputs, labels, torch.tensor(12)).item() == pytest.approx(nats / 12)
        assert loss(outputs, labels).item() == pytest.approx(nats / 3)
    numbers = torch.tensor([0.5, -100.0])
    assert loss((torch.tensor([[2.0], [7.0]]),), numbers).item() == pytest.approx(1.5**2)


def test_label_smoothing_is_that_of_the_trainer():
    from transformers.trainer_pt_utils import LabelSmoother

    torch.manual_seed(0)
    logits, labels = torch.randn(4, 3), torch.tensor([2, 0, -100, 1])
    expected = LabelSmoother(epsilon=0.1)({"logits": logits}, labels)
    assert ExampleMeanLoss(0.1)({"logits": logits}, labels).item() == pytest.approx(expected.item())


def test_batch_of_fillers_alone():
    """A process may have nothing but them: loss and gradient are 0."""
    logits = torch.randn(2, 3, requires_grad=True)
    ExampleMeanLoss()((logits,), torch.tensor([-100, -100]), torch.tensor(4)).backward()
    assert (logits.grad == 0).all()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"n_gpu": 4}, "--num_processes 4"),
        ({"train_sampling_strategy": "group_by_length"}, "group_by_length"),
        ({"batch_eval_metrics": True}, "batch_eval_metrics"),
    ],
)
def test_arguments_that_are_not_served(changed, message):
    plain = {"n_gpu": 1, "train_sampling_strategy": "random", "batch_eval_metrics": False}
    with pytest.raises(RecipeError, match=message):
        ExampleWeightedTrainer(args=SimpleNamespace(**{**plain, **changed}))


def test_nothing_left_by_drop_last(tmp_path):
    with pytest.raises(RecipeError, match="22 training examples are fewer than the 32 of one step"):
        run("images", 16, 2, tmp_path, dataloader_drop_last=True)


@pytest.mark.parametrize("eval_batch", [8, 16])
def test_drop_last_is_for_training_alone(eval_batch, tmp_path):
    """13 held-out examples: more than a batch of 8, or less than one of 16. An epoch of 22 has two steps of 8."""
    result = run("images", 8, 1, tmp_path, eval_batch, max_steps=2, eval_steps=1, dataloader_drop_last=True)
    assert result["eval_examples"] == [HELD_OUT] * 2
    assert result["epoch"] == 1
    trainer = result["trainer"]
    assert len(trainer.predict(trainer.eval_dataset).label_ids) == HELD_OUT
    assert trainer.args.dataloader_drop_last
