import dataclasses

import pytest
from argument_parsing import parse_arguments
from arguments import (
    DataArguments,
    MaskingArguments,
    ModelArguments,
    RecipeError,
    TokenizerArguments,
    parse_qk_init,
)
from transformers import TrainingArguments


KINDS = (ModelArguments, TokenizerArguments, DataArguments, MaskingArguments, TrainingArguments)


def parse(*words, defaults=None, unless_given=None):
    parsed = parse_arguments(KINDS, defaults or {}, [*words, "--use_cpu"], unless_given=unless_given)
    model, _, data, masking, training = parsed.filled
    return model, data, masking, training, parsed.used_defaults


def test_command_line_wins_over_file_wins_over_recipe_default(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("learning_rate: 1e-3\nmax_steps: 7\nblock_size: 32\n")
    defaults = {"max_steps": 800, "learning_rate": 2e-3, "weight_decay": 0.5}
    model, data, _, training, used = parse(str(file), "--max_steps", "9", defaults=defaults)
    # 1e-3 without a dot is a string to YAML 1.1.
    assert training.learning_rate == 1e-3
    assert training.max_steps == 9
    assert training.weight_decay == 0.5
    assert data.block_size == 32
    assert used == {"weight_decay": 0.5}
    assert model.qk_init == "symmetric"


def test_training_arguments_are_untouched_without_recipe_defaults():
    *_, training, used = parse()
    assert used == {}
    ours, theirs = training.to_dict(), TrainingArguments(use_cpu=True).to_dict()
    assert ours == theirs


def test_default_of_max_steps_gives_way_to_epochs():
    rule = {"max_steps": ["num_train_epochs"]}
    *_, training, used = parse("--num-train-epochs", "2", defaults={"max_steps": 800}, unless_given=rule)
    assert (training.max_steps, training.num_train_epochs, used) == (-1, 2.0, {})
    *_, training, _ = parse(defaults={"max_steps": 800}, unless_given=rule)
    assert training.max_steps == 800


def test_a_flag_given_with_its_default_value_counts_as_given():
    *_, training, _ = parse("--learning_rate=5e-5", defaults={"learning_rate": 2e-3})
    assert training.learning_rate == 5e-5


def test_mapping_in_file_and_json_on_command_line(tmp_path):
    file = tmp_path / "run.json"
    file.write_text('{"qk_init": {"scheme": "symmetric", "layers": [0, 1]}, "report_to": "none"}')
    model, *_ = parse(str(file))
    assert parse_qk_init(model.qk_init) == {"scheme": "symmetric", "layers": [0, 1]}
    model, *_ = parse("--qk_init", '{"scheme": "independent"}')
    assert parse_qk_init(model.qk_init) == {"scheme": "independent"}
    assert parse_qk_init("none") is None
    assert parse_qk_init(None) is None
    assert parse_qk_init("symmetric") == "symmetric"
    with pytest.raises(RecipeError, match="not a JSON object"):
        parse_qk_init('{"scheme": ')


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("blok_size: 3\n", "unknown keys: blok_size"),
        ("eval_strategy: no\n", "eval_strategy: False .* quotes"),
        ("- 1\n", "holds a list"),
        ("a: [\n", "cannot be read"),
    ],
)
def test_bad_file(tmp_path, content, message):
    file = tmp_path / "run.yml"
    file.write_text(content)
    with pytest.raises(RecipeError, match=message):
        parse(str(file))


def test_missing_file_and_unknown_argument():
    with pytest.raises(RecipeError, match=r"nowhere\.yaml"):
        parse("nowhere.yaml")
    with pytest.raises(RecipeError, match="--blok_size"):
        parse("--blok_size", "3")
    # No abbreviations: --max_st is not --max_steps.
    with pytest.raises(RecipeError, match="--max_st"):
        parse("--max_st", "3")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dataset_name": "a", "train_file": "b"}, "give one"),
        ({"validation_file": "b"}, "needs train_file"),
        ({"dataset_config_name": "b"}, "needs dataset_name"),
        ({"streaming": True}, "not streamed"),
        ({"sample_by": "word"}, "choose line"),
        ({"validation_split_percentage": 100.0}, "validation_split_percentage=100"),
        ({"preprocessing_num_workers": 0}, "preprocessing_num_workers=0"),
        ({"shuffle_buffer_size": -1}, "shuffle_buffer_size=-1"),
    ],
)
def test_contradictions_are_named(values, message):
    with pytest.raises(RecipeError, match=message):
        DataArguments(**values)


def test_mask_probability_is_a_share():
    with pytest.raises(RecipeError, match="mlm_probability=15"):
        MaskingArguments(mlm_probability=15)


def test_every_argument_has_help():
    for kind in KINDS[:-1]:
        assert all(field.metadata.get("help") for field in dataclasses.fields(kind))


def test_help_shows_the_defaults_of_the_recipe(capsys):
    with pytest.raises(SystemExit) as ended:
        parse("--help", defaults={"learning_rate": 0.00271})
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "0.00271" in shown
    assert "80 % are masked" in " ".join(shown.split())


def test_file_builds_on_others(tmp_path):
    """Later files win over earlier ones, the file itself over all, and changes to the config are joined."""
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "base.yaml").write_text("block_size: 32\nmax_steps: 5\nconfig_overrides: {hidden_size: 8}\n")
    (tmp_path / "parts" / "more.json").write_text('{"extends": "base.yaml", "max_steps": 6}')
    (tmp_path / "parts" / "kind.yaml").write_text(
        "config_overrides: {is_decoder: true}\nqk_init: {scheme: symmetric}\n"
    )
    file = tmp_path / "run.yaml"
    file.write_text("extends: [parts/more.json, parts/kind.yaml]\nqk_init: {layers: [0]}\n")
    model, data, _, training, _ = parse(str(file))
    assert (data.block_size, training.max_steps) == (32, 6)
    assert model.config_overrides == {"hidden_size": 8, "is_decoder": True}
    assert model.qk_init == {"layers": [0]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("extends: none.yaml\n", r"none\.yaml'.*run\.yaml' extends, does not exist"),
        ("extends: run.yaml\n", "extends itself"),
        ("extends: {a: 1}\n", "must be a path or a list of paths"),
    ],
)
def test_file_that_builds_on_nothing(tmp_path, content, message):
    file = tmp_path / "run.yaml"
    file.write_text(content)
    with pytest.raises(RecipeError, match=message):
        parse(str(file))


def test_command_line_replaces_what_the_file_says_in_other_words(tmp_path):
    """A preset that names a data set also runs on a file: the command line wins, as in everything."""
    file = tmp_path / "run.yaml"
    file.write_text("dataset_name: a\ndataset_config_name: b\nconfig_overrides: {is_decoder: true}\nmax_steps: 3\n")
    _, data, *_ = parse(str(file), "--train_file", "c.txt")
    assert (data.dataset_name, data.dataset_config_name, data.train_file) == (None, None, "c.txt")
    model, _, _, training, _ = parse(str(file), "--model_type", "gpt2", "--num_train_epochs", "2")
    assert (model.config_overrides, training.max_steps) == (None, -1)
