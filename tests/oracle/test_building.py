"""
What the oracle is made of: small configs and inputs that reach attention, and a sweep that ends what does not end. An
oracle that cannot build a type says nothing about it, and one that drops its attention says nothing either.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_symqk.attention.probing import ProbedAttention

from . import report
from .building import NoModelError, build, shake
from .comparing import _compare
from .configs import small_config
from .inputs import InputTries


@pytest.mark.parametrize("model_type", ["jamba", "recurrent_gemma", "zamba2"])
def test_hybrids_keep_attention(model_type: str) -> None:
    """The first layers of a hybrid are often all recurrent; a config that keeps these alone proves nothing."""
    config: Any = small_config(model_type)
    kinds = set(getattr(config, "layers_block_type", None) or config.layer_types)
    assert config.num_hidden_layers <= 8
    assert len(kinds) > 1
    assert any(kind in ("full_attention", "sliding_attention", "attention", "hybrid") for kind in kinds)


def test_layers_with_fields_of_their_own_stay_with_their_layer() -> None:
    """Gemma 4 gives full-attention layers another head width, by number of the layer: also inside another config."""
    for config in (small_config("gemma4_text"), small_config("gemma4").get_text_config()):
        widths = {kind: one.head_dim for kind, one in zip(config.layer_types, config.per_layer_config, strict=True)}
        assert set(widths) == {"sliding_attention", "full_attention"}


def test_validators_are_obeyed_wherever_the_field_stands() -> None:
    """One part of a config has to fit another part's field; shrinking alone knows nothing of it."""
    config: Any = small_config("nemo_speechlm")
    assert config.audio_config.hidden_size == 64
    with pytest.raises(NoModelError, match="layoutxlm"):
        build("layoutxlm")


@pytest.mark.parametrize("model_type", ["parakeet_encoder", "videomae", "dia"])
def test_inputs_are_mended_by_what_a_forward_says(model_type: str) -> None:
    """Features with time before channels, videos, several streams of codes: found out, not listed by type."""
    model = build(model_type)
    tries = InputTries(model)
    for inputs in tries:
        try:
            with torch.no_grad():
                model(**inputs)
        except Exception as error:
            tries.failed(inputs, error)
        else:
            return
    pytest.fail("no inputs were taken")


def test_shaking_takes_parameters_without_elements() -> None:
    """DINOv3 has no register tokens by default, and a parameter for them of shape (1, 0, D)."""
    empty = torch.nn.Module()
    empty.register_parameter("tokens", torch.nn.Parameter(torch.empty(1, 0, 4)))
    shake(empty)


def test_heads_are_compared_as_query_heads_read_them() -> None:
    """Keys that the forward repeats for the query heads of a group are no more heads; another order is wrong."""
    generator = torch.Generator().manual_seed(0)
    w_q, w_k = torch.randn(4, 3, 8, generator=generator), torch.randn(2, 3, 8, generator=generator)

    def verdict(keys: torch.Tensor) -> str:
        nothing = torch.zeros(len(keys), 3)
        probed = ProbedAttention(w_q, keys, nothing, nothing, None, "matmul", "self", "all", "")
        return _compare(w_q, w_k, probed).outcome

    assert verdict(w_k) == verdict(w_k.repeat_interleave(2, 0)) == "proven"
    assert verdict(w_k.repeat(2, 1, 1)) == "wrong"
    assert verdict(torch.cat([w_k[:1], w_k[:1], 2 * w_k[1:], w_k[1:]])) == "wrong"


def _ends_not(model_type: str) -> Iterator[dict[str, Any]]:
    yield {"type": model_type, "status": "some"}
    while True:
        pass


def test_a_type_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What it had found by then is kept, and the next type gets its turn."""
    monkeypatch.setattr(report, "examine", _ends_not)
    output = tmp_path / "oracle.jsonl"
    report.run(["bert", "gpt2"], output, seconds=1, workers=2)
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert {record["type"] for record in records} == {"bert", "gpt2"}
    assert all(record["status"] == "some" and record["stopped"] == "after 1 s" for record in records)
