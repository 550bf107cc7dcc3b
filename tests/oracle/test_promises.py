"""
What the package promises of a model, for models of all types: see `promises.py`. Quick: a type a scheme or kind of
model. Slow: every type, so that none is served wrongly without anybody knowing.
"""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_symqk
from hf_symqk import plugin
from hf_symqk.init import LayerDraw, registry

from .building import build, shake
from .configs import model_types, small_config
from .promises import PROMISES, files_score_like_the_model, keep_promises
from .report import examine_promises, read, run


_SYMMETRIC = registry.scheme_named("symmetric")
# A type a scheme or kind of model, and what comes of a promise where it is something else than "kept".
QUICK: dict[str, dict[str, str]] = {
    "t5": {},
    "bart": {},
    "whisper": {},
    "vit": {},
    "swin": {},
    "gpt2": {},
    "falcon": {},
    "mpt": {},
    "qwen3_next": {},  # linear attention beside it
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
    expected = dict.fromkeys(PROMISES, "kept") | QUICK[model_type]
    assert {name: finding.outcome for name, finding in findings.items()} == expected, findings


def test_a_refusal_names_module_and_reason() -> None:
    """What a user reads is enough to know which part of the model it is about, and why."""
    told = keep_promises("deepseek_v3")["init"].note
    assert "layers.0.self_attn" in told
    assert "product (q_a_proj, q_b_proj)" in told


# --- the checks themselves ----------------------------------------------------------------------------------------


def _draws(draw: LayerDraw) -> None:
    _SYMMETRIC.write(draw)
    torch.rand(1)


def _touches_queries(draw: LayerDraw) -> None:
    _SYMMETRIC.write(draw)
    draw.query.weight[0, 0, 0] += 1e-3


def _does_nothing(draw: LayerDraw) -> None:
    pass


@pytest.mark.parametrize(
    ("write", "note"),
    [(_draws, "random state"), (_touches_queries, "query|symmetry"), (_does_nothing, "symmetry")],
)
def test_a_broken_start_is_noticed(write: Any, note: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheme that draws, writes to something else, or writes nothing."""
    monkeypatch.setitem(registry._SCHEMES, "symmetric", replace(_SYMMETRIC, write=write))
    found = keep_promises("bert")["init"]
    assert found.outcome == "broken"
    assert re.search(note, found.note)


def test_weights_overwritten_on_load_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The option that is read back from config.json must not act on what was loaded."""
    monkeypatch.setattr(plugin, "_is_fresh", lambda module: True)
    found = keep_promises("bert")["load"]
    assert found.outcome == "broken"
    assert "key.weight" in found.note


@pytest.mark.parametrize(("change", "outcome"), [(1e-6, "rounded"), (1e-1, "broken")])
def test_other_scores_of_files_are_noticed(change: float, outcome: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last digits are told apart from anything else."""
    score = hf_symqk.score_checkpoint

    def changed(*args: Any, **kwargs: Any) -> hf_symqk.QKScores:
        scores = score(*args, **kwargs)
        first = scores.layers[0]
        return replace(scores, layers=(replace(first, symmetry=first.symmetry + change), *scores.layers[1:]))

    monkeypatch.setattr(hf_symqk, "score_checkpoint", changed)
    assert keep_promises("bert")["checkpoint"].outcome == outcome


def test_a_model_that_reading_changes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of parameters, modes and random state, one stands for all three here."""
    score = hf_symqk.score_model

    def changing(model: Any, **kwargs: Any) -> hf_symqk.QKScores:
        model.train(not model.training)
        return score(model, **kwargs)

    monkeypatch.setattr(hf_symqk, "score_model", changing)
    assert keep_promises("bert")["reading"].outcome == "broken"


# --- files of models that count their heads in ways of their own ---------------------------------------------------

# Counts that differ from all others of the model, so that one taken from elsewhere would show. Slow ones are large.
COUNTS: list[tuple[str, dict[str, int]]] = [
    ("aria", {"vision_config.num_attention_heads": 2}),
    ("bridgetower", {}),
    ("convbert", {"num_attention_heads": 8}),
    ("fun_asr_nano", {"adaptor_config.num_attention_heads": 2}),
    ("gemma3n_audio", {"conf_num_attention_heads": 2}),
    ("grounding-dino", {"encoder_attention_heads": 8, "decoder_attention_heads": 2}),
    ("idefics", {"perceiver_config.resampler_n_heads": 2}),
    ("idefics2", {"perceiver_config.resampler_n_heads": 8}),
    ("mask2former", {"num_attention_heads": 2}),
    ("omdet-turbo", {"decoder_num_heads": 2}),
    ("oneformer", {"num_attention_heads": 2}),
    ("perceiver", {"num_self_attention_heads": 2, "num_cross_attention_heads": 1}),
    ("sam3_tracker_video", {"mask_decoder_config.num_attention_heads": 2, "memory_attention_num_attention_heads": 8}),
    (
        "seamless_m4t",
        {"encoder_attention_heads": 2, "decoder_attention_heads": 8, "speech_encoder_attention_heads": 1},
    ),
    ("vjepa2", {"pred_num_attention_heads": 2}),
    ("xclip", {"vision_config.mit_num_attention_heads": 2, "prompt_num_attention_heads": 4}),
]
# What Transformers calls otherwise on load, or splits into tensors of different sizes.
NAMES = ["molmo2_text", "paddleocr_vl", "sam3", "shieldgemma2", "unlimited_ocr"]
# Parts that share words with several configs, read several texts, or of which only some layers have a step.
PARTS_OF_MODELS = ["cohere_asr", "deepseek_vl_hybrid", "groupvit", "musicgen", "unlimited_ocr_vision", "zamba2"]
OTHERS = ["ibert"]  # integers beside the weights, worked out from them


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [*COUNTS, *((name, {}) for name in (*NAMES, *PARTS_OF_MODELS, *OTHERS))],
    ids=lambda value: str(value),
)
def test_files_score_like_the_model(model_type: str, changes: dict[str, int], tmp_path: Path) -> None:
    """Head counts that a config has under names of their own, and names that differ between files and model."""
    config = small_config(model_type)
    for path, value in changes.items():
        *inner, name = path.split(".")
        part: Any = config
        for attribute in inner:
            part = getattr(part, attribute)
        assert getattr(part, name) != value, path
        setattr(part, name, value)
    torch.manual_seed(0)
    model = type(build(model_type))._from_config(config).eval()
    shake(model)
    model.save_pretrained(tmp_path)
    finding = files_score_like_the_model(model, tmp_path)
    assert finding.outcome == ("told" if model_type in _known("told") else "kept"), finding


# --- every type -----------------------------------------------------------------------------------------------------

# Types whose files cannot be scored, or score otherwise than the model, by outcome and reason. Every other one fails.
KNOWN_CHECKPOINTS: dict[str, dict[str, set[str]]] = {
    "refused": {
        "a factor that only the live module knows": {"deepseek_v4", "dots3_note", "dots3_note_text", "longcat_flash"},
        "grouped convolutions, whose stored width is that of one group": {"squeezebert"},
        "shared blocks, whose parts one layer alone has": {"zamba"},
        "a pooling head of torch's own attention": {"phi4_multimodal", "phi4_multimodal_vision"},
        "a small config that contradicts itself, live as well": {"pix2struct"},
        "a path that none of the config's parts is named after": {"janus"},
        "stages whose head counts only the live module knows": {
            "edgetam_video",
            "florence2",
            "florence_vision",
            "hiera",
            "levit",
            "sam2",
            "sam2_hiera_det_model",
            "sam2_video",
            "sam2_vision_model",
        },
        "layers that borrow keys look as if they had lost some": {"gemma4_unified_assistant"},
        "grouped keys, which Transformers itself does not load back from its three equal parts": {"nemo_speechlm"},
    },
    "broken": {
        "files have the names of another class": {"dinov3_vit", "sapiens2"},
        "config.json does not name the part, whose layers are listed as skipped": {"pp_formulanet"},
    },
    "told": {
        "the path and config.json name another part of the config than the module has": {
            "EvollaModel",
            "bridgetower",
            "clvp",
            "evolla",
            "fun_asr_nano",
            "molmo2",
            "sam3",
            "sam3_video",
            "xclip",
        },
    },
    "rounded": {
        "loading reorders the channels of heads for another rotary embedding": {
            "gradium_phonon_tts",
            "kimi_k25",
            "mistral_large4",
            "step3p5_vision",
            "step3p7",
        },
    },
}


def _known(outcome: str) -> set[str]:
    return {name for types in KNOWN_CHECKPOINTS[outcome].values() for name in types}


PARTS = 12
# A quarter of the types; all of them (twelve minutes): `python -m oracle.report --promises alone --output x.jsonl`.
RUN = range(0, PARTS, 4)


@pytest.mark.slow
@pytest.mark.parametrize("part", RUN)
def test_no_promise_is_broken(part: int, tmp_path: Path) -> None:
    """
    Of a quarter of the model types: nothing is broken, and files are refused of those alone that are known. What the
    start cannot serve is refused by name, which the check itself has seen to.
    """
    output = tmp_path / "promises.jsonl"
    run(model_types()[part::PARTS], output, seconds=60, workers=2, examination=examine_promises)
    records = read(output)
    known = {name: kind for kind in KNOWN_CHECKPOINTS for name in _known(kind)}
    wrong = {
        f"{name}: {promise}": finding
        for name, record in records.items()
        for promise, finding in record.get("promises", {}).items()
        if finding["outcome"] in ("broken", "told", "rounded")
        or (promise == "checkpoint" and finding["outcome"] == "refused")
        if (promise, known.get(name)) != ("checkpoint", finding["outcome"])
    }
    assert not wrong, json.dumps(wrong, indent=1)
    assert sum(bool(record.get("promises")) for record in records.values()) > len(records) / 2
