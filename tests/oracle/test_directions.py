"""
Role and direction of layers, told from names and config, against what the models' forward passes do. Quick: types of
every kind. Slow: every type.
"""

from pathlib import Path
from typing import Any

import pytest

from . import report
from .building import build
from .configs import model_types, small_config
from .directions import directions, examine


QUICK: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ("bert", "gpt2", "llama", "t5", "bart", "whisper", "clip", "llava", "vit", "detr")),
    *((name, {}) for name in ("xlnet", "modernbert", "gemma3_text", "blip-2", "decision_transformer", "imagegpt")),
    ("bert", {"is_decoder": True}),
    ("gemma3_text", {"use_bidirectional_attention": True}),
]


@pytest.mark.parametrize(("model_type", "values"), QUICK, ids=lambda value: str(value) if value else "")
def test_direction_is_that_of_the_forward(model_type: str, values: dict[str, Any]) -> None:
    """A later token's hidden state is changed at the attention module's input: does an earlier one's output change?"""
    model = build(model_type) if not values else _built(model_type, values)
    seen = [
        (layer.name, layer.causal, direction.causal)
        for layer, direction in directions(model, []).values()
        if direction.causal is not None
    ]
    assert seen
    assert [told for _, told, _ in seen] == [forward for _, _, forward in seen], seen
    assert all(layer.role in ("encoder", "decoder") for layer, _ in directions(model, []).values())


def _built(model_type: str, values: dict[str, Any]) -> Any:
    import transformers

    config = small_config(model_type)
    for name, value in values.items():
        setattr(config, name, value)
    return transformers.AutoModel.from_config(config).eval()


# Not told, since the inputs of a forward pass decide: prefix language models. And not told from the config at all: an
# encoder of proteins inside another model, whose config names no model type.
NOT_TOLD = {
    "EvollaModel",
    "colpali",
    "cpmant",
    "evolla",
    "git",
    "paligemma",
    "phi4_multimodal",
    "phi4_multimodal_vision",
    "pi0",
}
PARTS = 8
# A quarter of the types; all of them: `python -m oracle.directions --output x.jsonl --workers 2`.
RUN = range(0, PARTS, 4)


@pytest.mark.slow
@pytest.mark.parametrize("part", RUN)
def test_no_type_is_told_wrongly(part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a quarter of the model types: what a forward reaches looks as the package says, or is listed as not told."""
    monkeypatch.setattr(report, "examine", examine)
    output = tmp_path / "directions.jsonl"
    report.run(model_types()[part::PARTS], output, seconds=20, workers=2)
    layers = [
        (name, layer["name"], layer["causal"], layer["forward"])
        for name, record in report.read(output).items()
        for layer in record.get("layers", ())
        if layer["forward"] is not None
    ]
    wrong = [layer for layer in layers if layer[2] is not None and layer[2] != layer[3]]
    assert not wrong, wrong
    assert {name for name, _, told, _ in layers if told is None} <= NOT_TOLD
    assert len({name for name, *_ in layers}) > len(model_types()) / PARTS / 2
