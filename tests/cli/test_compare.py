"""`symqk compare`: what goes to stdout and to files, and how it ends."""

import json

import pytest
from comparison.making import fine_tuned


CURVES = "step,small,small--symmetric\n10,4.0,4.0\n20,3.0,2.0\n30,2.0,1.5\n40,2.0,1.0\n"


@pytest.fixture
def curves(tmp_path):
    path = tmp_path / "curves.csv"
    path.write_text(CURVES)
    return path


def test_tables(symqk, curves):
    """Losses, differences and speed-ups, each with its title; notes below; the paper's table last."""
    status, out, err = symqk("compare", curves)
    assert (status, err) == (0, "")
    titles = ["Final loss", "Differences, treated minus baseline", "Speed-up", "Published: Saponati et al. (2025)"]
    places = [out.index(title) for title in titles]
    assert places == sorted(places)
    assert "small    symmetric      1          1.000" in out
    assert "50 %  step 20" in out
    assert "one seed: no test" in out


def test_json(symqk, curves):
    """One document, and nothing else on stdout."""
    status, out, _ = symqk("compare", curves, "--json")
    assert status == 0
    assert json.loads(out)["contrasts"][0]["speed_up"]["raw"][0]["fraction"] == 0.5


def test_csv_keeps_notes_out_of_the_way(symqk, curves):
    """They go to stderr: the file holds the table alone."""
    status, out, err = symqk("compare", curves, "--csv")
    assert status == 0
    assert [line.split(",")[0] for line in out.splitlines()] == ["group", "small"]
    assert "symqk: One seed" in err


@pytest.mark.parametrize(("option", "start"), [("--markdown", "**Final loss**"), ("--latex", "% Final loss")])
def test_other_formats(symqk, curves, option, start):
    """Every table in the format that was asked for."""
    status, out, _ = symqk("compare", curves, option)
    assert status == 0
    assert out.startswith(start)
    assert out.count("Saponati") == 1


def test_files(symqk, curves, tmp_path):
    """Tables and figure in a folder, and a picture where it is wanted."""
    status, _, err = symqk("compare", curves, "--output-dir", tmp_path / "out", "--plot", tmp_path / "curves.svg")
    assert (status, err) == (0, "")
    assert (tmp_path / "out" / "comparison.tex").is_file()
    assert (tmp_path / "out" / "comparison.png").stat().st_size > 1000
    assert "<svg" in (tmp_path / "curves.svg").read_text()


def test_runs_that_cannot_be_compared(symqk, tmp_path):
    """One line, status 1."""
    status, out, err = symqk("compare", tmp_path)
    assert (status, out) == (1, "")
    assert err.startswith(f"symqk: '{tmp_path}' holds no run")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--contrast", "symmetric"], "is no pair"),
        (["--json", "--latex"], "exclude each other"),
        (["--plot", "curves.docx"], "no picture that can be drawn"),
    ],
)
def test_usage(symqk, curves, arguments, message):
    """Status 2, before anything is read."""
    status, out, err = symqk("compare", curves, *arguments)
    assert (status, out) == (2, "")
    assert message in err


def test_arms_that_are_asked_for(symqk, curves):
    """One that is not there is named, with those that are."""
    assert symqk("compare", curves, "--contrast", "symmetric:none")[0] == 0
    status, _, err = symqk("compare", curves, "--contrast", "symmetric:plain")
    assert status == 1
    assert "no run of 'plain'; there are runs of 'none', 'symmetric'" in err


def test_fine_tuned_pairs(symqk, tmp_path):
    """Two models, each pretrained by one arm and fine-tuned with two seeds: paired by seed, with arms named by their
    folders. Each seed has a head of its own, which is no difference between its runs."""
    for arm, init in (("plain", None), ("treated", {"scheme": "symmetric"})):
        for seed in (0, 1):
            fine_tuned(tmp_path, arm, init, seed)
    runs = [tmp_path / "plain", tmp_path / "treated"]
    options = ["--pattern", r"/(?P<arm>[^/]+)/seed\d+$", "--baseline", "plain", "--json"]
    status, out, err = symqk("compare", *runs, *options, "--differing", "model_name_or_path")
    assert (status, err) == (0, "")
    document = json.loads(out)
    (contrast,) = document["contrasts"]
    assert (contrast["treated"], contrast["baseline"], contrast["seeds"]) == ("treated", "plain", [0, 1])
    notes = document["notes"]
    assert "By wish these may differ between arms, and the first weights with them: model_name_or_path." in notes
    named = "Arms are named by the pattern; the initialisations that run.json records of them: "
    assert f"{named}plain: none; treated: symmetric." in notes
    # Without the wish, what differs is named.
    status, _, err = symqk("compare", *runs, *options)
    assert status == 1
    assert 'model_name_or_path ("out/plain" and "out/treated")' in err
