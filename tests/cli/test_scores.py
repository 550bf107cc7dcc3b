"""`symqk scores`: tables, formats and exit statuses, with the scoring itself replaced."""

import io
import json
import re
import sys

import pandas as pd
import pytest
from typer.testing import CliRunner

from hf_symqk import QKScores
from hf_symqk.cli import app
from hf_symqk.history import read_history

from .conftest import MODELS, SKIPPED


pytestmark = pytest.mark.usefixtures("asked")


def lines(text: str) -> list[list[str]]:
    """Cells of a piped table: columns are at least two spaces apart."""
    table = text.split("\n\n")[0]
    return [re.split(r" {2,}", line.strip()) for line in table.splitlines()]


def test_one_model(symqk):
    """A row a layer; below it what the model is, and median and quartiles."""
    status, out, err = symqk("scores", "plain")
    assert (status, err) == (0, "")
    assert lines(out) == [
        ["layer", "symmetry", "directionality", "norm", "heads"],
        ["0", "0.500", "-0.250", "12.346", "4"],
        ["1", "-0.250", "0.125", "12.346", "4"],
    ]
    assert out.splitlines()[-2:] == [
        "bert (encoder), 70.0k parameters",
        "median (quartiles) of 2 layers: symmetry 0.125 (-0.062…0.312), directionality -0.062 (-0.156…0.031)",
    ]


def test_null_band_stands_beside_its_score(symqk):
    """Each score is followed by its band; a layer without a score has neither, and CSV has the ends in full."""
    _, out, _ = symqk("scores", "banded")
    assert lines(out)[:2] == [
        ["layer", "symmetry", "symmetry null 95 %", "directionality", "directionality null 95 %", "norm", "heads"],
        ["0", "0.500", "-0.012…0.023", "-0.250", "-0.200…0.300", "12.346", "4"],
    ]
    assert lines(out)[2] == ["1", "nan", "nan", "12.346", "4"]
    _, out, _ = symqk("scores", "banded", "--csv")
    table = pd.read_csv(io.StringIO(out))
    assert list(table.columns)[2:8] == [
        "symmetry",
        "symmetry_null_low",
        "symmetry_null_high",
        "directionality",
        "directionality_null_low",
        "directionality_null_high",
    ]
    assert table["symmetry_null_high"][0] == 0.0234
    assert table.loc[1, ["symmetry", "symmetry_null_low", "directionality_null_high"]].isna().all()


def test_layers_that_are_not_finite_are_named_and_not_counted(symqk):
    """A median of the others is not the median of all; wherever it stands, what it leaves out stands too."""
    _, out, _ = symqk("scores", "undefined")
    assert "median (quartiles) of 1 layer:" in out
    assert "not finite: model.layers.1.attention" in out
    _, out, _ = symqk("scores", "undefined", "plain", "--csv")
    table = pd.read_csv(io.StringIO(out))
    assert list(table["layers"]) == [1, 2]
    assert table["skipped"][0] == "not finite: model.layers.1.attention"


def test_layers_that_nothing_has_proven_are_marked(symqk):
    """Wherever their scores stand: in the table of layers or heads, counted for a model, in files, and in a line."""
    note = "unverified: no forward pass has proven how W_q and W_k of 2 layers are read: "
    note += "model.layers.1.attention, model.layers.2.attention"
    _, out, _ = symqk("scores", "unverified")
    assert [row[-1] for row in lines(out)] == ["heads", "4", "unverified", "unverified"]
    assert out.splitlines()[-1] == note
    _, out, _ = symqk("scores", "unverified", "--heads")
    assert [row[-1] for row in lines(out)[1:]].count("unverified") == 2 * 4
    _, out, _ = symqk("scores", "plain", "unverified")
    heading, first, second = lines(out)
    assert (heading[-1], second[-1]) == ("unverified", "2")
    assert len(first) == len(second) + 1  # kind and parameters, and no mark
    assert out.splitlines()[-1] == f"unverified: {note}"
    _, out, err = symqk("scores", "unverified", "--csv")
    assert list(pd.read_csv(io.StringIO(out))["verified"]) == [True, False, False]
    assert err == f"symqk: {note}\n"
    _, out, _ = symqk("scores", "unverified", "--json")
    assert [layer["verified"] for layer in json.loads(out)["layers"]] == [True, False, False]


def test_stacks_and_grouped_keys_have_columns_where_there_are_any(symqk):
    """The stack tells layers of one number apart, and has a summary of its own; key heads show that they are fewer."""
    _, out, _ = symqk("scores", "stacks")
    assert [row[:2] for row in lines(out)] == [
        ["stack", "layer"],
        ["encoder", "0"],
        ["decoder", "0"],
        ["decoder", "1"],
    ]
    assert "encoder, median (quartiles) of 1 layer: symmetry 0.500 (0.500…0.500)" in out
    assert "decoder, median (quartiles) of 2 layers: symmetry 0.312" in out
    assert out.splitlines()[-1] == f"skipped: {SKIPPED}"
    _, out, _ = symqk("scores", "grouped")
    assert lines(out)[0][-2:] == ["heads", "key heads"]
    assert lines(out)[1][-2:] == ["4", "2"]


def test_heads(symqk, asked):
    """A row a head, of one model and of several; without the option heads are not even scored."""
    _, out, _ = symqk("scores", "stacks", "--heads")
    assert lines(out)[0] == ["stack", "layer", "head", "symmetry", "directionality", "norm"]
    assert lines(out)[-1] == ["decoder", "1", "3", "0.400", "-0.400", "4.000"]
    assert len(lines(out)) == 1 + 3 * 4
    _, out, _ = symqk("scores", "plain", "grouped", "--heads")
    assert [row[0] for row in lines(out)[1:]] == ["plain"] * 8 + ["grouped"] * 4
    symqk("scores", "plain")
    assert [options["heads"] for _, options in asked] == [True, True, True, False]


def test_spectral_scores_have_columns_where_they_were_measured(symqk, tmp_path):
    """Those without a scale in every table, all of them in CSV."""
    heading = ["positivity", "trace", "stable rank", "effective rank"]
    _, out, _ = symqk("scores", "spectral", "--spectral")
    first, layer = lines(out)[:2]
    assert first[-5:-1] == heading
    assert layer[-5:-1] == ["0.750", "0.250", "3.500", "6.250"]
    _, out, _ = symqk("scores", "spectral", "--spectral", "--heads")
    assert lines(out)[0][-4:] == heading
    assert lines(out)[1][-4:] == ["0.500", "1.000", "1.000", "1.000"]
    _, out, _ = symqk("scores", "spectral", "spectral", "--spectral")
    assert lines(out)[1][-4:] == ["0.750", "0.250", "3.500", "6.250"]
    _, out, _ = symqk("scores", "spectral", "--spectral", "--csv")
    assert list(pd.read_csv(io.StringIO(out))["skew_energy"]) == [10.0, 10.0]
    _, out, _ = symqk("scores", "plain")
    assert "positivity" not in out


def test_several_models(symqk):
    """A row a model, blank where something is not known; what was skipped is counted and named."""
    status, out, err = symqk("scores", "plain", "stacks")
    assert (status, err) == (0, "")
    heading, first, second = lines(out)
    assert heading[:5] == ["model", "kind", "parameters", "layers", "symmetry"]
    assert heading[-1] == "skipped"
    assert first == ["plain", "encoder", "70.0k", "2", "0.125", "-0.062…0.312", "-0.062", "-0.156…0.031"]
    assert second[:4] == ["stacks", "encoder-decoder", "3", "0.500"]
    assert second[-1] == "1"
    assert out.splitlines()[-1] == f"stacks: skipped: {SKIPPED}"


@pytest.mark.parametrize("models", [["missing", "plain"], ["plain", "missing"]])
def test_a_model_that_fails(symqk, models):
    """It is one line on stderr; the others are printed all the same, and the status says so."""
    status, out, err = symqk("scores", *models)
    assert status == 1
    assert [row[0] for row in lines(out)] == ["model", "plain"]
    assert err == "symqk: missing: There is no 'missing' in any folder.\n"
    status, out, err = symqk("scores", *models, "--json")
    assert status == 1
    assert len(json.loads(out)) == 1


def test_debug_shows_the_traceback(symqk, monkeypatch):
    """Only when asked for; an error that is no matter of names or files says its type."""
    status, out, err = symqk("scores", "missing", "--debug")
    assert (status, out) == (1, "")
    assert err.startswith("Traceback")
    assert err.splitlines()[-1] == "symqk: missing: There is no 'missing' in any folder."

    def broken(*args, **kwargs):
        raise KeyError("q_proj")

    monkeypatch.setattr("hf_symqk.cli.scores.score_checkpoint", broken)
    assert symqk("scores", "plain") == (1, "", "symqk: plain: KeyError: 'q_proj'\n")


def test_warnings_are_lines_that_name_the_model(symqk, monkeypatch):
    """A warning of the library says which of the models it is about, each time, and nothing of its source line."""

    def warned(model, **options):
        import warnings

        warnings.warn("W_qk scores are NaN\nin layer 3.", RuntimeWarning, stacklevel=2)
        return MODELS["plain"]

    monkeypatch.setattr("hf_symqk.cli.scores.score_checkpoint", warned)
    status, _, err = symqk("scores", "plain", "stacks")
    assert status == 0
    assert err.splitlines() == [
        f"symqk: {name}: warning: W_qk scores are NaN in layer 3." for name in ("plain", "stacks")
    ]


def test_json_is_what_the_library_reads(symqk):
    """One model as an object, several as a list, a run with its steps."""
    _, out, _ = symqk("scores", "banded", "--json")
    assert json.loads(out) == MODELS["banded"].to_dict()
    _, out, _ = symqk("scores", "plain", "stacks", "--json")
    assert [QKScores.from_dict(values) for values in json.loads(out)] == [MODELS["plain"], MODELS["stacks"]]
    _, out, _ = symqk("scores", "who/what", "--revisions", "step5,step1", "--json")
    assert [entry["step"] for entry in json.loads(out)] == [1, 5]
    assert QKScores.from_dict(json.loads(out)[0]["scores"]) == MODELS["plain"]


def test_csv_has_full_precision_and_nothing_else(symqk):
    """What the table has no room for goes to stderr; unknown values are blank, scores that do not exist are nan."""
    _, out, err = symqk("scores", "plain", "stacks", "--csv")
    table = pd.read_csv(io.StringIO(out), keep_default_na=False)
    assert list(table["parameters"].astype(str)) == ["70000", ""]
    assert float(table["frobenius_norm_median"][0]) == 12.3456789
    assert table["skipped"][1] == SKIPPED
    assert err == f"symqk: stacks: skipped: {SKIPPED}\n"
    _, out, _ = symqk("scores", "banded", "--csv")
    assert ",nan,nan,nan,nan,nan,nan,12.3456789," in out.splitlines()[-1]


def test_markdown(symqk):
    """A table that Markdown aligns, then the notes as paragraphs."""
    _, out, _ = symqk("scores", "plain", "--markdown")
    assert out.splitlines()[:5] == [
        "| layer | symmetry | directionality | norm | heads |",
        "| ---: | ---: | ---: | ---: | ---: |",
        "| 0 | 0.500 | -0.250 | 12.346 | 4 |",
        "| 1 | -0.250 | 0.125 | 12.346 | 4 |",
        "",
    ]
    _, out, _ = symqk("scores", "a|b/plain", "grouped", "--markdown")
    assert out.splitlines()[2].startswith("| a\\|b/plain | encoder |"), "a bar would end the cell"


def test_latex(symqk):
    """A booktabs table with minus signs, special characters of names escaped, and notes as comments."""
    _, out, _ = symqk("scores", "banded", "--latex")
    assert out.startswith("\\begin{tabular}{rrrrrrr}\n\\toprule\n")
    assert "layer & symmetry & symmetry null 95 \\% & directionality" in out
    assert "0 & 0.500 & $-$0.012--0.023 & $-$0.250 & $-$0.200--0.300 & 12.346 & 4 \\\\" in out
    _, out, _ = symqk("scores", "my_folder/plain", "stacks", "--latex")
    assert "my\\_folder/plain & encoder & 70.0k & 2 &" in out
    after = out.partition("\\end{tabular}\n")[2]
    assert after == f"% stacks: skipped: {SKIPPED}\n"


@pytest.mark.parametrize("suffix", ["json", "csv", "md", "tex", "txt"])
def test_output_says_the_format(symqk, tmp_path, suffix):
    """A file holds what stdout would, which then stays empty; an option wins over the suffix."""
    option = {"json": "--json", "csv": "--csv", "md": "--markdown", "tex": "--latex"}
    asked_for = [option[suffix]] if suffix in option else []
    _, printed, _ = symqk("scores", "plain", *asked_for)
    assert symqk("scores", "plain", "--output", tmp_path / f"scores.{suffix}") == (0, "", "")
    assert (tmp_path / f"scores.{suffix}").read_text(encoding="utf-8") == printed
    symqk("scores", "plain", "--csv", "--output", tmp_path / f"other.{suffix}")
    assert (tmp_path / f"other.{suffix}").read_text(encoding="utf-8").startswith("stack,layer,symmetry,")


def test_nothing_scored_nothing_written(symqk, tmp_path):
    """An older file is not replaced by an empty one."""
    (tmp_path / "scores.csv").write_text("older")
    assert symqk("scores", "missing", "--output", tmp_path / "scores.csv")[0] == 1
    assert (tmp_path / "scores.csv").read_text() == "older"


def test_run(symqk, tmp_path):
    """A row a step; with heads, a history that the library reads."""
    for step in (1000, 500):
        (tmp_path / f"checkpoint-{step}").mkdir()
    status, out, err = symqk("scores", tmp_path)
    assert (status, err) == (0, "")
    assert lines(out) == [
        ["step", "symmetry", "symmetry quartiles", "directionality", "directionality quartiles", "norm"],
        ["500", "0.250", "0.125…0.375", "-0.125", "-0.188…-0.062", "12.346"],
        ["1000", "0.500", "0.250…0.750", "-0.250", "-0.375…-0.125", "12.346"],
    ]
    assert symqk("scores", tmp_path, "--heads", "--output", tmp_path / "qk_scores.csv")[0] == 0
    history = read_history(tmp_path)
    layers = history[history["head"].isna()]
    assert list(layers["step"]) == [500, 500, 1000, 1000]
    assert list(layers["symmetry"]) == [0.5, 0.0, 1.0, 0.0]
    assert len(history) == 2 * 2 * (1 + 4)


def test_options_reach_the_scoring(symqk, asked, monkeypatch):
    """Nothing that was asked for is dropped on the way; the token comes from the environment, an empty one is none."""
    monkeypatch.setenv("HF_TOKEN", "from-environment")
    words = [
        "--layers",
        "encoder:0",
        "--attention",
        "all",
        "--gamma",
        "1.5",
        "--revision",
        "v2",
        "--subfolder",
        "inner",
        "--heads",
        "--spectral",
    ]
    symqk("scores", "plain", *words)
    monkeypatch.setenv("HF_TOKEN", "")
    symqk("scores", "plain")
    assert asked[0] == (
        "plain",
        {
            "layers": {"encoder": [0]},
            "attention": "all",
            "gamma": 1.5,
            "revision": "v2",
            "subfolder": "inner",
            "heads": True,
            "null_band": True,
            "spectral": True,
            "token": "from-environment",
        },
    )
    assert asked[1][1]["token"] is None
    assert asked[1][1]["spectral"] is False


def test_null_bands_are_computed_where_they_are_shown(symqk, asked):
    """They take as long as the scores: of one model and in JSON they are there, a row a model would lose them."""
    for arguments in (["plain"], ["plain", "grouped", "--json"], ["plain", "grouped"]):
        symqk("scores", *arguments)
    assert [options["null_band"] for _, options in asked] == [True, True, True, False, False]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["scores"], "Missing argument 'MODEL'"),
        (["scores", "plain", "--bogus"], "No such option: --bogus"),
        (["scores", "plain", "--json", "--csv"], "--json and --csv: these exclude each other"),
        (["scores", "plain", "--output", "scores.doc"], "--output: the suffix of 'scores.doc' is not one of .txt"),
        (["scores", "plain", "--output", "nowhere/scores.csv"], "--output: the folder 'nowhere' does not exist"),
        (["scores", "plain", "--plot", "nowhere/scores.png"], "--plot: the folder 'nowhere' does not exist"),
        (["scores", "plain", "--plot", "."], "--plot: '.' is a folder"),
        (["scores", "plain", "--plot", "scores.doc"], "--plot: the suffix of 'scores.doc'"),
        (["scores", "plain", "--layers", "a"], "--layers: 'a' cannot be read"),
        (["scores", "plain", "--attention", "both"], "'both' is not one of 'self', 'cross', 'all'"),
        (["scores", "plain", "--gamma", "nan"], "--gamma: nan is not a finite number"),
        (["scores", "plain", "--revisions", "main"], "--revisions: 'main' does not say which step"),
        (["bogus"], "No such command 'bogus'"),
    ],
)
def test_usage_errors(symqk, asked, arguments, message):
    """Exit status 2, one line that ends with where to look, and nothing scored first."""
    if "--plot" in arguments:
        pytest.importorskip("matplotlib")
    status, out, err = symqk(*arguments)
    assert (status, out, asked) == (2, "", [])
    assert err.startswith("symqk: ")
    assert message in err
    assert re.search(r"See 'symqk (scores )?--help'\.\n$", err)
    assert len(err.splitlines()) == 1
    assert CliRunner().invoke(app, arguments).exit_code == 2, "the app by itself, as typer runs it"


def test_interrupt(symqk, monkeypatch):
    """Ctrl-C ends with the status that shells know, without a word."""

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_symqk.cli.scores.score_checkpoint", interrupted)
    assert symqk("scores", "plain", "grouped") == (130, "", "")


def test_plot_without_matplotlib(symqk, asked, monkeypatch):
    """The extra is named before an hour of scoring, not after it."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, out, err = symqk("scores", "plain", "--plot", "scores.png")
    assert (status, out, asked) == (1, "", [])
    assert err == 'symqk: --plot needs matplotlib; install it with `pip install "hf_symqk[plots]"`.\n'


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["plain"], ["symmetry score", "directionality score"]),
        (["stacks", "--heads"], ["head"]),
        (["plain", "grouped"], ["parameters"]),
        (["who/what", "--revisions", "step1,step2"], ["step"]),
    ],
)
def test_plots(symqk, tmp_path, arguments, names):
    """One model, its heads, several models and a run each draw their own plot; the axes' labels tell which."""
    pytest.importorskip("matplotlib")
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none"}):  # letters as text, so that they can be found
        status, out, err = symqk("scores", *arguments, "--plot", tmp_path / "plot.svg")
    assert (status, err) == (0, "")
    assert out
    drawn = (tmp_path / "plot.svg").read_text(encoding="utf-8")
    assert all(f">{name}<" in drawn for name in names)
