"""Fine-tuning from its command line: pretrained pairs, decoders, tasks and files, and bad input."""

import csv
import itertools
import json
import random
import sys

import finetune
import numpy as np
import pytest
import torch
from arguments import RecipeError
from launching import in_processes
from sequence_data import TASKS, SequenceArguments, SequenceEncoder, builtin_passages, sequence_dataset
from test_mlm import ROOT, launch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    ViTConfig,
    ViTForImageClassification,
    set_seed,
)

import hf_symqk
from hf_symqk.comparison import compare_runs


LAYERS = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES = {"vocab_size": 300, **LAYERS}
FRESH = ("--vocab_size", "300", "--config_overrides", "hidden_size=16,intermediate_size=24,num_hidden_layers=1")
GOOD, BAD = ["the", "model", "reads", "a", "long", "text"], ["a", "query", "and", "key", "attend", "other"]


def write(path, label, pair=False, count=40):
    """Sentences of the words of one of two lists; `label` makes a label of the list's number."""
    generator = random.Random(0)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["first", "second", "mark"] if pair else ["text", "label"])
        for number in range(count):
            text = " ".join(generator.choices((BAD, GOOD)[number % 2], k=generator.randint(3, 9)))
            writer.writerow([text, "it reads", label(number % 2)] if pair else [text, label(number % 2)])
    return str(path)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("labelled")
    return {
        "words": write(folder / "words.csv", ("bad", "good").__getitem__),
        "numbers": write(folder / "numbers.csv", lambda number: number + 0.5),
        "pairs": write(folder / "pairs.csv", ("no", "yes").__getitem__, pair=True),
        "task": write(folder / "task.csv", str),
    }


@pytest.fixture(scope="module")
def pretrained(tokenizer, tmp_path_factory):
    """A pair of encoders that differ in Q and K, and a decoder whose tokenizer cannot pad."""
    folder = tmp_path_factory.mktemp("pretrained")
    decoder_tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, eos_token="[SEP]", bos_token="[CLS]"
    )
    decoder = GPT2Config(
        vocab_size=300, n_embd=16, n_layer=1, n_head=2, n_positions=64, bos_token_id=1, eos_token_id=2
    )
    for name, kind, config, words in (
        ("none", BertForMaskedLM, BertConfig(**SIZES), tokenizer),
        ("symmetric", BertForMaskedLM, BertConfig(**SIZES, qk_init="symmetric"), tokenizer),
        ("decoder", GPT2LMHeadModel, decoder, decoder_tokenizer),
    ):
        set_seed(1)
        kind(config).save_pretrained(folder / name)
        words.save_pretrained(folder / name)
    return folder


def words(output_dir, *more, steps=3):
    return [
        *("--output_dir", str(output_dir), "--per_device_train_batch_size", "8", "--logging_steps", "1"),
        *("--max_steps", str(steps), "--eval_steps", "100", "--eval_on_start", "false", "--max_length", "16"),
        *("--use_cpu", "--disable_tqdm", "true", *more),
    ]


def history(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def record(folder):
    return json.loads((folder / "run.json").read_text())


def test_pair_shares_head_and_batches(pretrained, files, tmp_path):
    """Two pretrained models are compared by what both learn from the same start of everything that is new."""
    runs, starts = {}, {}
    original = finetune.ExampleWeightedTrainer.train

    def keep(self, *args, **kwargs):
        starts[str(self.args.output_dir)] = {name: value.clone() for name, value in self.model.state_dict().items()}
        return original(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finetune.ExampleWeightedTrainer, "train", keep)
        for name in ("none", "symmetric"):
            more = ("--model_name_or_path", str(pretrained / name), "--train_file", files["words"])
            runs[name] = finetune.main(words(tmp_path / name, *more))
    plain, symmetric = (starts[str(tmp_path / name)] for name in ("none", "symmetric"))
    differing = {name for name in plain if not torch.equal(plain[name], symmetric[name])}
    assert differing == {f"bert.encoder.layer.{layer}.attention.self.key.weight" for layer in (0, 1)}
    # They are the pretrained weights, not a new draw of the initialisation that the config carries.
    before = BertForMaskedLM.from_pretrained(pretrained / "symmetric").state_dict()
    assert all(torch.equal(before[name], symmetric[name]) for name in differing)
    one, two = record(tmp_path / "none"), record(tmp_path / "symmetric")
    assert one["hashes"]["batches"] == two["hashes"]["batches"] is not None
    assert one["data"] == two["data"]
    assert one["data"]["head"] is not None
    assert (one["qk_init"], two["qk_init"]["scheme"]) == (None, "symmetric")
    results = json.loads((tmp_path / "none" / "all_results.json").read_text())
    assert {"eval_accuracy", "eval_f1", "eval_matthews_correlation", "eval_majority_accuracy"} <= set(results)
    assert runs["none"].model.config.id2label == {0: "bad", 1: "good"}
    config = json.loads((tmp_path / "symmetric" / "config.json").read_text())
    assert config["label2id"] == {"bad": 0, "good": 1}
    assert len(hf_symqk.score_checkpoint(tmp_path / "symmetric").layers) == 2


def test_pretrained_pair_is_compared(pretrained, files, tmp_path):
    """As the README has it: two seeds of each, arms by folder. Runs whose heads or batches differ would be refused."""
    for name, seed in itertools.product(("none", "symmetric"), ("0", "1")):
        more = ("--model_name_or_path", str(pretrained / name), "--train_file", files["words"], "--seed", seed)
        finetune.main(words(tmp_path / name / f"seed{seed}", *more))
    assert record(tmp_path / "none" / "seed0")["data"]["head"] != record(tmp_path / "none" / "seed1")["data"]["head"]
    folders = [tmp_path / name for name in ("none", "symmetric")]
    pattern = r"(?P<arm>[^/]+)/seed\d+$"
    comparison = compare_runs(folders, pattern=pattern, differing=["model_name_or_path"])
    (contrast,) = comparison.contrasts
    assert (contrast.treated, contrast.seeds) == ("symmetric", (0, 1))
    assert {"accuracy", "f1", "matthews_correlation"} <= set(contrast.metrics)
    assert not any("could not be checked" in line for line in comparison.notes)


def test_decoder_pads_with_its_end_of_text(pretrained, files, tmp_path):
    """The class of a text does not depend on the padding that a longer one beside it brings."""
    more = ("--model_name_or_path", str(pretrained / "decoder"), "--train_file", files["words"])
    trainer = finetune.main(words(tmp_path, *more))
    assert trainer.model.config.pad_token_id == trainer.processing_class.eos_token_id is not None
    assert trainer.processing_class.padding_side == "right"
    data, model = trainer.eval_dataset, trainer.model.eval()
    examples = [data[index] for index in range(4)]
    assert len({len(example["input_ids"]) for example in examples}) > 1

    def logits(rows):
        with torch.no_grad():
            return model(
                **{k: v for k, v in trainer.data_collator([dict(row) for row in rows]).items() if k != "labels"}
            )[0]

    together = logits(examples)
    for index, example in enumerate(examples):
        assert torch.allclose(together[index], logits([example])[0], atol=1e-5)


def test_numbers_are_predicted_by_squared_error(files, tmp_path):
    trainer = finetune.main(words(tmp_path, *FRESH, "--train_file", files["numbers"]))
    results = json.loads((tmp_path / "all_results.json").read_text())
    assert {"eval_pearsonr", "eval_spearmanr", "eval_variance"} <= set(results)
    assert trainer.model.config.problem_type == "regression"
    prediction = trainer.predict(trainer.eval_dataset)
    errors = (prediction.predictions[:, 0] - prediction.label_ids) ** 2
    assert results["eval_loss"] == pytest.approx(float(np.mean(errors)), rel=1e-5)


def test_pairs_and_their_resume(files, tmp_path):
    """36 examples in steps of 8: the checkpoint lies in the second epoch."""
    more = (*FRESH, "--train_file", files["pairs"], "--text_column", "first", "--text_pair_column", "second")
    more += ("--label_column", "mark", "--save_strategy", "steps", "--save_steps", "7")
    whole = finetune.main(words(tmp_path, *more, steps=9))
    example = whole.train_dataset[0]["input_ids"]
    assert example.count(whole.processing_class.sep_token_id) == 2
    more += ("--resume_from_checkpoint", str(tmp_path / "checkpoint-7"))
    resumed = finetune.main(words(tmp_path / "more", *more, steps=9))
    assert history(resumed, "loss") == pytest.approx(history(whole, "loss"), rel=1e-5)


def test_task_gives_columns_and_metrics(tmp_path):
    """A task whose data lie here; on the Hub, the split and columns are those of `nyu-mll/glue`."""
    file = tmp_path / "cola.csv"
    write(file, str)
    file.write_text(file.read_text().replace("text,label", "sentence,label", 1))
    finetune.main(words(tmp_path / "out", *FRESH, "--task_name", "cola", "--train_file", str(file), steps=1))
    results = json.loads((tmp_path / "out" / "all_results.json").read_text())
    assert "eval_matthews_correlation" in results
    assert "eval_accuracy" not in results
    assert "dataset" not in record(tmp_path / "out")["data"]
    arguments = SequenceArguments(task_name="mnli")
    assert sequence_dataset(arguments) == {"dataset": "nyu-mll/glue", "dataset_config": "mnli"}
    assert list(arguments.text_columns.values()) == ["premise", "hypothesis"]
    assert TASKS["mnli"].validation_split == "validation_matched"


def test_stream(files, tmp_path):
    more = (*FRESH, "--train_file", files["words"], "--streaming", "--stream_validation_examples", "6")
    with pytest.raises(RecipeError, match=r"does not declare the classes .* --class_names"):
        finetune.main(words(tmp_path, *more))
    more += ("--class_names", "bad", "good")
    trainer = finetune.main(words(tmp_path / "0", *more))
    assert len(history(trainer, "loss")) == 3
    assert len(trainer.eval_dataset) == 6
    finetune.main(words(tmp_path / "1", *more, "--dataloader_num_workers", "1"))
    assert record(tmp_path / "0")["hashes"] == record(tmp_path / "1")["hashes"]


@pytest.mark.parametrize(
    ("last", "message"),
    [
        ({"text": None, "score": 0.5}, "no text"),
        ({"text": ["two"], "score": 0.5}, "column 'text' of .* holds Json.*, not text"),
        ({"text": "two", "score": None}, "no label in column 'score'"),
        ({"text": "two", "score": float("nan")}, "no label in column 'score'"),
        ({"text": "two", "score": -100.0}, "has the value -100 in column 'score'"),
    ],
)
def test_stream_with_a_row_that_does_not_serve(tmp_path, last, message):
    """As in memory, though a row may show only when it is trained on: neither a traceback nor a loss of NaN."""
    file = tmp_path / "rows.jsonl"
    rows = [{"text": f"one {number}", "score": 0.5 + number} for number in range(9)]
    file.write_text("".join(json.dumps(row) + "\n" for row in [*rows, last]))
    more = (*FRESH, "--train_file", str(file), "--label_column", "score")
    for stream in (("--streaming", "--stream_validation_examples", "2"), ()):
        with pytest.raises(RecipeError, match=message):
            finetune.main(words(tmp_path / "out", *more, *stream))


def test_text_that_a_stream_lacks_is_named(tokenizer):
    """The same of a loaded tokenizer, for which nothing reads ahead."""
    with pytest.raises(RecipeError, match="an example has None for text in column 'text'"):
        SequenceEncoder(tokenizer, ["text"], 8)({"text": [None]}, [(0, 0)])


def test_builtin_passages_are_held_out_by_document():
    splits = builtin_passages()
    assert splits["train"].features["label"].names == ["reference", "docstring"]
    for split in splits.values():
        assert sum(split["label"][:]) * 2 == len(split) > 200
    assert splits["train"]["text"][:] == builtin_passages()["train"]["text"][:]
    texts = [text for split in splits.values() for text in split["text"]]
    assert len(set(texts)) == len(texts)


def test_model_that_cannot_classify(files, tmp_path):
    ViTForImageClassification(ViTConfig(**LAYERS)).save_pretrained(tmp_path / "vit")
    more = ("--model_name_or_path", str(tmp_path / "vit"), "--train_file", files["words"])
    with pytest.raises(RecipeError, match=r"is a vit, which has no head for classifying text\. These have: .*bert"):
        finetune.main(words(tmp_path, *more))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--task_name", "sst3"), "task_name='sst3': choose one of cola, sst2"),
        (("--text_column", "body"), "no column 'body': it has text, label"),
        (("--label_column", "stars"), "no column 'stars': it has text, label"),
        (("--model_name_or_path", "none/here"), "'none/here' cannot be loaded"),
        (("--model_name_or_path", "x", "--qk_init", "symmetric"), "qk_init='symmetric' is for a fresh model"),
        (("--model_name_or_path", "x", "--model_type", "bert"), "model_type='bert' is for a fresh model"),
        (("--model_type", "gpt2"), "gpt2"),
        (("--max_length", "600"), "max_length=600 is above the 512 positions"),
        (("--validation_split_percentage", "0"), "no example is held out"),
        (("--task_name", "stsb", "--text_column", "text", "--label_column", "label"), "stsb"),
    ],
)
def test_bad_input_ends_before_training(files, tmp_path, more, message, monkeypatch):
    monkeypatch.setattr(finetune.ExampleWeightedTrainer, "train", None)
    with pytest.raises(RecipeError, match=message):
        finetune.main(words(tmp_path, "--vocab_size", "300", "--train_file", files["words"], *more))


def test_contradictions_are_named():
    with pytest.raises(RecipeError, match="built-in text is not streamed"):
        SequenceArguments(streaming=True)
    with pytest.raises(RecipeError, match="have the column text only"):
        SequenceArguments(text_column="body")
    with pytest.raises(RecipeError, match="max_length=0"):
        SequenceArguments(max_length=0)


@pytest.mark.slow
def test_two_processes_run_the_recipe(files, tmp_path):
    command = [*in_processes(2), str(ROOT / "recipes" / "finetune.py")]
    runs = {}
    for name, prefix, batch in (("two", command, "4"), ("one", [sys.executable, command[-1]], "8")):
        flags = [*words(tmp_path / name, *FRESH, "--train_file", files["numbers"], steps=7)]
        flags += ["--per_device_train_batch_size", batch]
        done = launch(*prefix, *flags, cache=tmp_path / "cache", folder=tmp_path, ACCELERATE_USE_CPU="true")
        assert done.returncode == 0, done.stderr[-3000:]
        log = json.loads((tmp_path / name / "trainer_state.json").read_text())["log_history"]
        curves = [[entry[key] for entry in log if key in entry] for key in ("loss", "eval_loss")]
        runs[name] = (record(tmp_path / name), curves)
    assert (runs["one"][0]["num_processes"], runs["two"][0]["num_processes"]) == (1, 2)
    assert runs["one"][0]["hashes"] == runs["two"][0]["hashes"]
    assert len(runs["one"][1][0]) == 7
    for one, two in zip(runs["one"][1], runs["two"][1], strict=True):
        assert two == pytest.approx(one, rel=1e-3)
