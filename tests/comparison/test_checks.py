"""Runs that are no pairs are refused, by name."""

import pytest

from hf_symqk.comparison import ComparisonError, compare_runs
from hf_symqk.comparison.checks import differing_arguments

from .making import STEPS, falling, fine_tuned, record, state, write_run


SYMMETRIC = {"scheme": "symmetric"}
KAIMING = {"scheme": "symmetric", "distribution": "kaiming_uniform"}


def pair(folder, second, first=None, **logged):
    """A plain run, and one of another arm with this record."""
    write_run(folder / "a", state(falling(3.0), {200: 3.2}), first or record())
    write_run(folder / "b", logged.get("log") or state(falling(2.5), {200: 2.7}), second)
    return [folder / "a", folder / "b"]


def hashes(**changes):
    return record()["hashes"] | changes


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"batches": "other"}, "saw different batches"),
        ({"weights": "other"}, r"started from different weights \(other than Q, K and V of attention\)"),
        ({"v": "other"}, r"started from different weights \(other than Q and K of attention\)"),
        ({"steps": 7}, "different numbers of steps"),
    ],
)
def test_runs_of_one_seed_share_batches_and_other_weights(tmp_path, changed, message):
    """Otherwise they are no pair, however alike their arguments; both are named."""
    folders = pair(tmp_path, record(SYMMETRIC, hashes=hashes(**changed)))
    with pytest.raises(ComparisonError, match=message) as caught:
        compare_runs(folders)
    assert str(folders[1]) in str(caught.value)


def test_hash_that_is_not_known(tmp_path):
    """A run that was resumed from a checkpoint without its hashes is compared, with a statement."""
    folders = pair(tmp_path, record(SYMMETRIC, hashes=hashes(batches=None)))
    (line,) = [line for line in compare_runs(folders).notes if line.startswith("Pairing")]
    assert "no hash of batches" in line
    assert line.endswith(f"{folders[1]}.")


def test_arguments_that_differ_by_wish(tmp_path):
    """Fine-tuning a pretrained pair: the start differs by intent, the batches must not; arms are told by a pattern."""
    first, second = (record(arguments={"model": name}, hashes=hashes(weights=name)) for name in "ab")
    folders = pair(tmp_path, second, first)
    (contrast,) = compare_runs(folders, baseline="a", pattern=r"/(?P<arm>\w)$", differing=["model"]).contrasts
    assert (contrast.treated, contrast.baseline) == ("b", "a")
    folders = pair(tmp_path / "c", second | {"hashes": hashes(batches="other")}, first)
    with pytest.raises(ComparisonError, match="saw different batches"):
        compare_runs(folders, baseline="a", pattern=r"/(?P<arm>\w)$", differing=["model"])


PATTERN = r"/(?P<arm>[^/]+)/seed\d+$"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"source": "reviews.csv", "head": "other"}}, "have the same seed but other fresh heads"),
        ({"data": {"source": "others.csv", "head": "head0"}}, "differ in more than the initialisation: data"),
        ({"hashes": {"weights": "w", "batches": "other", "steps": STEPS[-1]}}, "saw different batches"),
    ],
)
def test_fine_tuned_runs_that_are_no_pair(tmp_path, changes, message):
    """Another start may differ by wish, head and batches may not."""
    folders = [fine_tuned(tmp_path, "plain", None, 0), fine_tuned(tmp_path, "treated", SYMMETRIC, 0, **changes)]
    with pytest.raises(ComparisonError, match=message) as caught:
        compare_runs(folders, baseline="plain", pattern=PATTERN, differing=["model_name_or_path"])
    assert all(str(folder) in str(caught.value) for folder in folders)


def test_head_that_is_not_known(tmp_path):
    """Said, as of any other hash."""
    folders = [fine_tuned(tmp_path, "plain", None, 0)]
    folders.append(fine_tuned(tmp_path, "treated", SYMMETRIC, 0, data={"source": "reviews.csv"}))
    notes = compare_runs(folders, baseline="plain", pattern=PATTERN, differing=["model_name_or_path"]).notes
    assert any("no hash of head" in line and line.endswith(f"{folders[1]}.") for line in notes)


def test_pattern_that_mixes_initialisations(tmp_path):
    """A mean over runs of two initialisations would be of neither: both runs are named, with what each was."""
    runs = (("a", None, 0), ("b", SYMMETRIC, 1), ("c", KAIMING, 0))
    for name, init, seed in runs:
        write_run(tmp_path / f"{name}-run", state(falling(3.0), {200: 3.2}), record(init, seed))
    with pytest.raises(ComparisonError) as caught:
        compare_runs([tmp_path], baseline="run", pattern="(?P<arm>run)$")
    assert f"{tmp_path / 'a-run'} and {tmp_path / 'b-run'} are both called 'run'" in str(caught.value)
    assert "different initialisations of them: none and symmetric" in str(caught.value)


def test_initialisations_too_alike_for_their_names(tmp_path):
    """Lists in lists lose their brackets in a name: what is recorded tells the runs apart."""
    for seed, table in ((0, [[1, 2], [3]]), (1, [[1], [2, 3]])):
        init = {"scheme": "own", "options": {"a": table}}
        write_run(tmp_path / f"own--seed{seed}", state(falling(3.0), {200: 3.2}), record(init, seed))
    with pytest.raises(ComparisonError, match=r"are both called 'own-options_a_1_2_3'.*\[\[1, 2\], \[3\]\]"):
        compare_runs([tmp_path], baseline="own-options_a_1_2_3")


def test_other_q_and_k_are_what_is_compared(tmp_path):
    """Q and K differ between arms, and nothing is said of it."""
    comparison = compare_runs(pair(tmp_path, record(SYMMETRIC)))
    assert len(comparison.contrasts) == 1
    assert not any("Pairing" in line for line in comparison.notes)


def test_redrawn_distribution_has_other_weights_by_intent(tmp_path):
    """V and biases are redrawn too, which is said and not refused; arms of one distribution still have to agree."""
    folders = pair(tmp_path, record(KAIMING, hashes=hashes(v="redrawn")))
    assert any("redraws V and the biases" in line for line in compare_runs(folders).notes)
    # What the scheme does to Q and K is no reason for other values.
    member = {**KAIMING, "symmetry": -0.5, "target": "layer", "norm": "match"}
    folders.append(
        write_run(tmp_path / "m", state(falling(2.5), {200: 2.7}), record(member, hashes=hashes(v="redrawn")))
    )
    assert len(compare_runs(folders).contrasts) == 2
    other = write_run(
        tmp_path / "o", state(falling(2.5), {200: 2.7}), record({**member, "norm": None}, hashes=hashes(v="x"))
    )
    with pytest.raises(ComparisonError, match="different weights"):
        compare_runs([*folders, other])
    folders.pop()
    third = record({**KAIMING, "scheme": "independent"}, hashes=hashes(v="yet another"))
    folders.append(write_run(tmp_path / "c", state(falling(2.5), {200: 2.7}), third))
    with pytest.raises(ComparisonError, match="different weights") as caught:
        compare_runs(folders)
    assert f"{folders[1]} and {folders[2]}" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arguments": {"block_size": 128}}, r"block_size \(64 and 128\)"),
        ({"arguments": {"block_size": 64, "fp16": True}}, r"fp16 \(null and true\)"),
        ({"recipe": "clm"}, r'recipe \("mlm" and "clm"\)'),
        ({"num_processes": 2}, r"num_processes \(1 and 2\)"),
        ({"model": {"class": "BertForMaskedLM", "parameters": 7, "config": {}}}, "model"),
    ],
)
def test_differences_beyond_the_initialisation_are_named(tmp_path, changes, message):
    """With both values, so that the user sees which run to repeat."""
    with pytest.raises(ComparisonError, match=f"differ in more than the initialisation: {message}"):
        compare_runs(pair(tmp_path, record(SYMMETRIC, **changes)))


def test_every_difference_is_named_at_once():
    """Not one a try."""
    first, second = {"a": 1, "b": 2, "c": 3, "output_dir": "x", "qk_init": None}, {"a": 1, "b": 3, "d": 4}
    assert differing_arguments(first, second) == {"b": (2, 3), "c": (3, None), "d": (None, 4)}


def test_folders_names_saving_and_readers_may_differ(tmp_path):
    """They do not reach the weights; a recipe's default pins memory where there is an accelerator."""
    arguments = record()["arguments"] | {"output_dir": "b", "run_name": "b", "hub_model_id": "me/b", "save_steps": 5}
    arguments |= {"dataloader_pin_memory": True, "dataloader_num_workers": 2}
    assert compare_runs(pair(tmp_path, record(SYMMETRIC, arguments=arguments))).contrasts


def test_learning_rates_differ_only_on_purpose(tmp_path):
    """Named like any other argument, unless each arm is to have its own."""
    folders = pair(tmp_path, record(SYMMETRIC, learning_rate=2e-3))
    with pytest.raises(ComparisonError, match=r"learning_rate \(0.001 and 0.002\)"):
        compare_runs(folders)
    (contrast,) = compare_runs(folders, own_rates=True).contrasts
    assert (contrast.setting, contrast.treated_rate, contrast.baseline_rate) == ("own best rates", 2e-3, 1e-3)


def test_versions_that_differ_are_stated(tmp_path):
    """A run repeated after an update is worth a line, not a refusal."""
    notes = compare_runs(pair(tmp_path, record(SYMMETRIC, versions={"torch": "2.14"}))).notes
    assert "Versions of torch differ between runs: 2.13, 2.14." in notes


def test_two_runs_of_one_arm_and_seed(tmp_path):
    """Which of them counts cannot be guessed."""
    folders = pair(tmp_path, record(None))
    folders.append(write_run(tmp_path / "c", state(falling(2.5)), record(SYMMETRIC)))
    with pytest.raises(ComparisonError, match=r"a and .*b are both of arm 'none' \(seed 0\)"):
        compare_runs(folders)


def test_logs_of_unequal_length(tmp_path):
    """Refused with the length of both; cut to the common steps when asked, and stated then."""
    folders = pair(tmp_path, record(SYMMETRIC), log=state(falling(2.5)[:15], {100: 3.0, 150: 2.9}, steps=STEPS[:15]))
    with pytest.raises(ComparisonError, match=r"a \(20 points to step 200\) and .*b \(15 points to step 150\)"):
        compare_runs(folders)
    folders = pair(tmp_path / "c", record(SYMMETRIC), log=state(falling(2.5)[:15], {200: 3.0}, steps=STEPS[:15]))
    comparison = compare_runs(folders, cut=True)
    assert {run.curves["loss"].index[-1] for run in comparison.runs} == {150}
    assert any("at the 15 steps that all logs have, up to step 150" in line for line in comparison.notes)


def test_evaluations_at_other_steps(tmp_path):
    """Runs that were resumed at different steps have evaluated there, and at the same last step: that is compared,
    and the curves as far as they are at the same steps. An accuracy goes along."""
    accuracies = {step: {"eval_accuracy": step / 1000} for step in (20, 40, 100, 200)}
    logs = [state(falling(3.0), {step: 3.0, 100: 4.0, 200: 2.5}, metrics=accuracies) for step in (20, 40)]
    write_run(tmp_path / "a", logs[0], record())
    write_run(tmp_path / "b", logs[1], record(SYMMETRIC))
    comparison = compare_runs([tmp_path])
    assert [list(run.curves["eval_loss"].index) for run in comparison.runs] == [[100, 200]] * 2
    assert [list(run.curves["eval_accuracy"].index) for run in comparison.runs] == [[100, 200]] * 2
    (line,) = [line for line in comparison.notes if line.startswith("The held-out loss is compared at the 2 steps")]
    assert line.endswith("points to step 200), not both at step 20).")
    write_run(tmp_path / "c", state(falling(3.0), {20: 3.0, 190: 2.5}), record({"scheme": "indefinite"}))
    with pytest.raises(ComparisonError, match="held-out loss are of unequal length or steps"):
        compare_runs([tmp_path])


def test_training_losses_at_other_steps(tmp_path):
    """Where length and end are the same, the first step that is not says what is different."""
    folders = pair(tmp_path, record(SYMMETRIC), log=state(falling(2.5), steps=[11, *STEPS[1:]]))
    with pytest.raises(ComparisonError, match=r"b \(20 points to step 200\), not both at step 10; finish"):
        compare_runs(folders)


def of_length(folder, init, steps, rate=lambda step: 1e-3, **changes):
    """A run that was planned for so many steps, and recorded as a recipe does."""
    said = record(init, max_steps=steps, hashes=hashes(batches=f"b0 of {steps}", steps=steps))
    said["arguments"] |= {"max_steps": steps}
    logged = state(falling(3.0)[: steps // 10], {100: 3.5, 150: 3.2}, steps=range(10, steps + 1, 10), rate=rate)
    return write_run(folder, logged, said | changes)


def test_recorded_runs_of_different_length(tmp_path):
    """Refused without `cut`; with it compared where both have been, if nothing else differs, and the report says what
    could not be checked."""
    folders = [of_length(tmp_path / "a", None, 200), of_length(tmp_path / "b", SYMMETRIC, 150)]
    with pytest.raises(ComparisonError, match=r"max_steps \(200 and 150\)"):
        compare_runs(folders)
    comparison = compare_runs(folders, cut=True)
    assert {run.curves["loss"].index[-1] for run in comparison.runs} == {150}
    assert any(line.startswith("Runs of different length are compared as far as all go") for line in comparison.notes)
    assert any("up to step 150" in line for line in comparison.notes)


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_learning_rates_that_follow_the_length(tmp_path, scale):
    """A linear decay to the end has gone further in the shorter run, whatever the rate it began at."""
    first = of_length(tmp_path / "a", None, 200, lambda step: 1e-3 * (1 - step / 200))
    changes = {"learning_rate": scale * 1e-3}
    second = of_length(tmp_path / "b", SYMMETRIC, 150, lambda step: scale * 1e-3 * (1 - step / 150), **changes)
    with pytest.raises(ComparisonError, match=r"at step 10 their learning rates are .*constant_with_warmup") as caught:
        compare_runs([first, second], cut=True, own_rates=True)
    assert f"{first} and {second}" in str(caught.value)


def test_different_length_and_something_else(tmp_path):
    """Cutting forgives the length alone; runs of equal length are still held to the same batches."""
    folders = [of_length(tmp_path / "a", None, 200), of_length(tmp_path / "b", SYMMETRIC, 150, num_processes=2)]
    with pytest.raises(ComparisonError, match="num_processes"):
        compare_runs(folders, cut=True)
    folders = [of_length(tmp_path / "c", None, 150), of_length(tmp_path / "d", SYMMETRIC, 150)]
    compare_runs(folders, cut=True)
    other = of_length(tmp_path / "e", KAIMING, 150, hashes=hashes(v="other", batches="other", steps=150))
    with pytest.raises(ComparisonError, match="saw different batches"):
        compare_runs([*folders, other], cut=True)


def test_different_length_without_learning_rates(tmp_path):
    """What was not logged is said to be unknown."""
    folders = [of_length(tmp_path / "a", None, 200), of_length(tmp_path / "b", SYMMETRIC, 150)]
    path = folders[1] / "trainer_state.json"
    path.write_text(path.read_text().replace('"learning_rate"', '"lr"'))
    notes = compare_runs(folders, cut=True).notes
    assert f"Whether their learning rates agreed so far is not known (not logged): {folders[1]}." in notes


def test_logs_without_a_step_in_common(tmp_path):
    """There is nothing to cut them to."""
    folders = pair(tmp_path, record(SYMMETRIC), log=state(falling(2.5), steps=[step + 5 for step in STEPS]))
    with pytest.raises(ComparisonError, match="no step in common"):
        compare_runs(folders, cut=True)


def test_held_out_loss_of_some_runs_only(tmp_path):
    """Left out, and said whose it lacks."""
    comparison = compare_runs(pair(tmp_path, record(SYMMETRIC), log=state(falling(2.5))))
    assert comparison.contrasts[0].held_out is None
    assert f"The held-out loss is left out: {tmp_path / 'b'} logged none." in comparison.notes


def test_no_loss_at_all(tmp_path):
    """Named rather than compared as nothing."""
    write_run(tmp_path / "none", state(), record())
    write_run(tmp_path / "symmetric", state(), record(SYMMETRIC))
    with pytest.raises(ComparisonError, match="log no loss in common"):
        compare_runs([tmp_path])
