"""`symqk layouts`, `symqk architectures`, `--version` and help, on checkpoints that models of Transformers saved."""

import json
import re

import pytest
from architectures import BY_NAME
from typer.testing import CliRunner

from hf_symqk.attention import HeadRows, Projection, layouts, register_qk_layout, unregister_qk_layout
from hf_symqk.attention.verified import load_support
from hf_symqk.cli import app


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Checkpoints of a model with three kinds of attention, and of one with grouped keys."""
    root = tmp_path_factory.mktemp("checkpoints")
    for name in ("t5", "llama"):
        BY_NAME[name].build().save_pretrained(root / name)
    return root


def test_layers_stored_alike_share_a_row(symqk, folder):
    """Each stack and kind has its query and key tensors, with the number of the layer, and no other, left open."""
    status, out, err = symqk("layouts", folder / "t5")
    assert (status, err) == (0, "")
    rows = [line.split() for line in out.splitlines()]
    assert rows[0][:3] == ["stack", "layers", "kind"]
    assert sorted(rows[1:]) == sorted(
        [
            stack,
            layers,
            kind,
            "q/k",
            "4",
            "4",
            "16",
            f"{stack[:7]}.block.*.layer.{part}.{x}.weight",
            "64x48",
            "float32",
        ]
        for stack, layers, kind, part in (
            ("encoder", "0-1", "self", "0.SelfAttention"),
            ("decoder", "0-2", "self", "0.SelfAttention"),
            ("decoder_cross", "0-2", "cross", "1.EncDecAttention"),
        )
        for x in "qk"
    )


def test_grouped_keys_are_said(symqk, folder):
    """H, G, E and what grouping means; the shapes are those in the file."""
    _, out, _ = symqk("layouts", folder / "llama")
    row = next(line.split() for line in out.splitlines() if "k_proj.weight" in line)
    assert row == ["0-2", "q_proj/k_proj", "6", "2", "16", "layers.*.self_attn.k_proj.weight", "32x48", "float32"]
    assert out.splitlines()[-1] == "grouped keys: 3 query heads read each key head"


def test_layouts_as_json(symqk, folder):
    """Every layer and tensor, with the file that holds it."""
    _, out, _ = symqk("layouts", folder / "llama", "--json")
    found = json.loads(out)
    assert (found["source"], found["left_out"]) == (str(folder / "llama"), [])
    assert [layer["index"] for layer in found["layers"]] == [0, 1, 2]
    last = found["layers"][-1]
    assert (last["num_heads"], last["num_key_value_heads"], last["head_dim"], last["grouped"]) == (6, 2, 16, True)
    assert last["tensors"][0] == {
        "key": "layers.2.self_attn.q_proj.weight",
        "shape": [96, 48],
        "dtype": "float32",
        "file": "model.safetensors",
    }


def test_layouts_of_nothing(symqk, tmp_path):
    """One line, status 1."""
    status, out, err = symqk("layouts", tmp_path)
    assert (status, out) == (1, "")
    assert err.startswith(f"symqk: {tmp_path}: ")
    assert len(err.splitlines()) == 1


def test_architectures(symqk):
    """A row a type, of those that are asked for: how it is found, what proves it, what is left out and why."""
    support = load_support()
    _, out, _ = symqk("architectures")
    assert len(out.split("\n\n")[0].splitlines()) == 1 + len(support.types)
    assert out.splitlines()[-1] == f"as of Transformers {support.transformers}"
    _, out, _ = symqk("architectures", "bert", "LongT5")
    heading, bert, longt5 = out.split("\n\n")[0].splitlines()
    assert heading.split()[:3] == ["model", "type", "status"]
    assert re.split(r" {2,}", bert) == ["bert", "proven", "2 self", "query/key", "interface"]
    assert longt5.startswith("longt5")
    _, document, _ = symqk("architectures", "bert", "--json")
    (layers,) = json.loads(document)["types"]["bert"]["layers"]
    assert (layers["module"], layers["verified"]) == ("BertSelfAttention", True)
    assert layers["parameters"] == ["key", "query", "value"]


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("albert", {"albert"}),
        ("deberta_v2", {"deberta-v2"}),
        ("clip_text", {"clip_text_model", "chinese_clip_text_model"}),
        ("*bert", {"bert", "albert"}),
    ],
)
def test_names_of_types(asked, found, symqk):
    """A name alone where there is one, dashes or not; else all that have it as a part, or fit the pattern."""
    _, document, _ = symqk("architectures", asked, "--json")
    types = set(json.loads(document)["types"])
    assert found <= types
    assert len(types) == 1 or all(asked.strip("*") in name for name in types)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["brt"], "is called 'brt'. Near it: bert"), (["bert", "--layouts"], "leave the types away")],
)
def test_names_that_are_no_types(arguments, said, symqk):
    """An error of usage that names the value and the way out."""
    status, out, err = symqk("architectures", *arguments)
    assert (status, out) == (2, "")
    assert said in err


def test_list_of_layouts(symqk):
    """The whole table of layouts, one that was registered included; how rows lie is in words."""
    register_qk_layout(
        name="of a test",
        query=Projection("to_kq", HeadRows("query", order=("key", "query"), interleaved=True), transposed=True),
        key=Projection("to_kq", HeadRows("key", order=("key", "query"), interleaved=True), transposed=True),
        model_types=["b", "a"],
    )
    try:
        _, out, _ = symqk("architectures", "--layouts")
        _, document, _ = symqk("architectures", "--layouts", "--json")
        known = [layout.name for layout in layouts()]
    finally:
        unregister_qk_layout("of a test")
    table = out.split("\n\n")[0].splitlines()
    assert [entry["name"] for entry in json.loads(document)] == known[::-1]
    assert len(table) == 1 + len(known)
    assert table[-1].split("  ")[0] == "of a test"
    assert table[-1].endswith("key query, interleaved by head, transposed  a, b")
    assert json.loads(document)[-1]["model_types"] == ["a", "b"]


@pytest.mark.parametrize("command", [[], ["scores"], ["layouts"], ["architectures"]])
def test_help(command, monkeypatch):
    """Each help has examples, and fits 80 columns without a word cut in two."""
    monkeypatch.setenv("COLUMNS", "80")
    result = CliRunner().invoke(app, [*command, "--help"], prog_name="symqk")
    assert result.exit_code == 0
    after = result.stdout.partition("Examples")[2]
    examples = [line for line in after.splitlines() if "symqk " in line]
    assert len(examples) >= 2
    assert all("symqk" in line and len(line) <= 80 for line in examples)
    assert "…" not in result.stdout


def test_no_command_and_version(symqk):
    """Without a command, nothing is done; the version is one line."""
    assert symqk() == (2, "", "symqk: Missing command. See 'symqk --help'.\n")
    status, out, err = symqk("--version")
    assert (status, err) == (0, "")
    assert len(out.splitlines()) == 1
