"""From records of the oracle to the data that the package carries, and the page that shows them."""

import json
from typing import Any

import pytest
import transformers

from hf_symqk.attention.verified import Support, load_support
from hf_symqk.cli.architectures import support_report

from .configs import model_types
from .support import DATA, PAGE, dumps, page, support_of, write


def _layer(outcome: str = "proven", note: str = "interface, all slots, self", **values: Any) -> dict[str, Any]:
    return {
        "name": "layers.0.attn",
        "class": "FooAttention",
        "outcome": outcome,
        "note": note,
        "layout": "q/k",
        "config": "foo",
        "kind": "self",
        "parameters": ["k", "q"],
        **values,
    }


def _record(*layers: dict[str, Any], **values: Any) -> dict[str, Any]:
    empty: dict[str, Any] = {"unknown": {}, "mixed": {}, "other": {}, "left_out": [], "errors": []}
    about = {"class": "FooModel", "level": 0, "found": len(layers), "layers": list(layers), "transformers": "5.24.0"}
    return {**about, **empty, **values}


UNKNOWN = {"BarAttention (wqk, out)": "layers.1.attn: H 4 G 2 E 8 self interface"}
MIXED = {
    "ConvAttention (q, k, conv)": "layers.1.attn: ProbingError: the response is not linear at 16 tokens: off by 0.1"
}


@pytest.mark.parametrize(
    ("record", "status"),
    [
        (_record(_layer()), "proven"),
        (_record(_layer("product")), "proven"),
        (_record(_layer(), mixed=MIXED), "proven"),
        (_record(_layer(), _layer("unproven", "not reached")), "partly proven"),
        (_record(_layer(), _layer("wrong", "off by 0.5 in q, 0.1 in k; interface")), "partly proven"),
        (_record(_layer(), unknown=UNKNOWN), "partly proven"),
        (_record(_layer("unproven", "not reached")), "unproven"),
        (_record(_layer("unproven", "problem: 'layers.0.attn' (FooAttention): no heads")), "unsupported"),
        (_record(unknown=UNKNOWN), "unsupported"),
        (_record(mixed=MIXED), "no attention"),
        (_record(), "no attention"),
        ({"status": "not built", "error": "RuntimeError: no", "transformers": "5.24.0"}, "not built"),
    ],
)
def test_status(record: dict[str, Any], status: str) -> None:
    """What is claimed of a type is never more than its layers bear out."""
    assert support_of({"foo": record})["types"]["foo"]["status"] == status


def test_what_is_left_out_is_named_with_its_parameters_and_the_reason() -> None:
    """The forward's own findings and those of the survey are one list, each class once."""
    left_out = [
        "  layers.1.attn and 5 more: BarAttention (model type 'foo') with wqk, out",
        "  layers.2.mixer: Mixer (model type 'foo') with q, k: conv1d mixes tokens",
        "  layers.3.attn: Odd (model type 'foo') with a, b",
        "  none that looks like attention",
    ]
    one = Support(support_of({"foo": _record(unknown=UNKNOWN, mixed=MIXED, left_out=left_out)})).types["foo"]
    assert [(other.module, other.parameters) for other in one.unsupported] == [
        ("BarAttention", ("out", "wqk")),
        ("Odd", ("a", "b")),
    ]
    assert "H 4 G 2 E 8" in one.unsupported[0].reason
    assert {other.module: other.reason.split()[0] for other in one.skipped} == {
        "ConvAttention": "its",
        "Mixer": "conv1d",
    }


def test_runs_do_not_differ() -> None:
    """Times and rounding errors of one machine would make every regeneration a change of all lines."""
    note = "the response is not linear at 16 tokens: off by {} of {}; and more"
    runs = [
        {
            "b": _record(_layer("unproven", note.format(*errors)), seconds=seconds, cpu_seconds=seconds),
            "a": _record(_layer()),
        }
        for seconds, errors in ((1.0, (0.1, 2.5)), (2.0, ("3e-05", "0.7")))
    ]
    first, second = (dumps(support_of(run)) for run in (runs[0], dict(reversed(runs[1].items()))))
    assert first == second
    assert first.index('"a"') < first.index('"b"')


def test_records_of_several_versions_are_refused() -> None:
    """The data have one version, or nobody could say what a guard's failure is a failure of."""
    with pytest.raises(ValueError, match=r"5\.24\.0.*6\.0\.0"):
        support_of({"a": _record(), "b": _record(transformers="6.0.0")})


def test_written_files(tmp_path: Any) -> None:
    """What is written is what is read."""
    values = write({"foo": _record(_layer(), unknown=UNKNOWN)}, tmp_path / "x.json", tmp_path / "x.md")
    assert (tmp_path / "x.json").read_text() == dumps(values)
    text = (tmp_path / "x.md").read_text()
    assert "| partly proven | 1 |" in text
    assert "| foo | partly proven | 1 self | q/k | interface |" in text
    assert "BarAttention (out, wqk)" in text


def test_the_page_is_that_of_the_data() -> None:
    """Neither is edited by hand, and no model type of the version that the data are of is left out."""
    support = load_support()
    text = PAGE.read_text(encoding="utf-8")
    report = support_report(support)
    assert len(text.splitlines()) == len(page(_values()).splitlines()) + 2 + len(support.types) + len(report.notes) * 2
    assert text.startswith(page(_values()))
    assert all(f"\n| {name} | {one.status} | " in text for name, one in support.types.items())


def test_every_model_type_has_a_line() -> None:
    """None is missing without a reason."""
    if load_support().transformers != transformers.__version__:
        pytest.skip(
            f"the data are of Transformers {load_support().transformers}, {transformers.__version__} is installed"
        )
    assert set(model_types()) == set(load_support().types)


def _values() -> dict[str, Any]:
    return json.loads(DATA.read_text(encoding="utf-8"))
