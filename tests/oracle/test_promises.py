"""
What the package promises of a model, for models of all types: see `promises.py`. Quick: a type a scheme or kind of
model. Slow: every type, so that none is served wrongly without anybody knowing.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import hf_symqk.init
from hf_symqk.attention import AttentionLayer

from . import promises
from .configs import model_types
from .promises import Finding, keep_promises
from .report import examine_promises, read, run


# Promise and outcome by type, where it is another one than "kept", with the reason.
KNOWN: dict[str, dict[str, tuple[str, str]]] = {}

QUICK = {
    "t5": {},
    "bart": {},
    "whisper": {},
    "vit": {},
    "swin": {},
    "gpt2": {},
    "falcon": {},
    "mpt": {},
    "qwen3_next": {"init": "partly"},  # linear attention beside it
    "deepseek_v3": {"init": "refused"},  # W_q is a product
    "albert": {},
    "deberta": {},
    "xlnet": {},
    "clip": {},
    "llava": {},
    "siglip": {},  # torch's own attention
}


@pytest.mark.parametrize("model_type", QUICK)
def test_one_type_a_scheme(model_type: str) -> None:
    """Files, the symmetric start, loading and reading, each on its own."""
    findings = keep_promises(model_type)
    expected = dict.fromkeys(promises.PROMISES, "kept") | QUICK[model_type]
    assert {name: finding.outcome for name, finding in findings.items()} == expected, findings


def test_a_refusal_names_module_and_reason() -> None:
    """What a user reads is enough to know which part of the model it is about, and why."""
    told = keep_promises("deepseek_v3")["init"].note
    assert "layers.0.self_attn" in told
    assert "product (q_a_proj, q_b_proj)" in told
