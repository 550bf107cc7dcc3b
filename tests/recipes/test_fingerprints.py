"""Fingerprints tell apart what makes two losses incomparable, and nothing else."""

import pytest
import torch
from fingerprints import BatchFingerprint, count_parameters, fingerprint_weights
from loss_run import in_two_processes, run
from oracle.building import build
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    ModernBertConfig,
    T5Config,
    ViTConfig,
    set_seed,
)


WIDTHS = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
# One architecture for each way to store Q and K: apart with biases, fused, fused and transposed, fused head by head,
# with fewer key heads, with another scale of K, and outside text.
MODELS = {
    "bert": lambda **kw: AutoModelForMaskedLM.from_config(BertConfig(vocab_size=99, **WIDTHS), **kw),
    "modernbert": lambda **kw: AutoModelForMaskedLM.from_config(
        ModernBertConfig(vocab_size=99, pad_token_id=0, **WIDTHS), **kw
    ),
    "gpt2": lambda **kw: AutoModelForCausalLM.from_config(
        GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=99), **kw
    ),
    "gpt_neox": lambda **kw: AutoModelForCausalLM.from_config(GPTNeoXConfig(vocab_size=99, **WIDTHS), **kw),
    "llama": lambda **kw: AutoModelForCausalLM.from_config(
        LlamaConfig(vocab_size=99, num_key_value_heads=2, **WIDTHS), **kw
    ),
    "t5": lambda **kw: AutoModel.from_config(
        T5Config(vocab_size=99, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4), **kw
    ),
    "vit": lambda **kw: AutoModel.from_config(ViTConfig(image_size=8, patch_size=4, **WIDTHS), **kw),
}


def fingerprint(model_type, seed=0, change=None, **options):
    set_seed(seed)
    model = MODELS[model_type](**options)
    if change is not None:
        with torch.no_grad():
            change(model)
    return fingerprint_weights(model)


@pytest.mark.parametrize("model_type", MODELS)
def test_initialisations_differ_in_queries_and_keys_only(model_type):
    plain, symmetric = fingerprint(model_type), fingerprint(model_type, qk_init="symmetric")
    assert plain == fingerprint(model_type)
    assert {name for name in plain if plain[name] != symmetric[name]} == {"qk"}
    other = fingerprint(model_type, seed=1)
    assert all(plain[name] != other[name] for name in plain)
    # Also where a scheme or a norm writes W_q too.
    level = {"symmetry": -0.5, "target": "layer", "norm": "match"}
    for member in (level, "indefinite") if model_type == "llama" else (level, "mimetic", "spectrum"):
        changed = fingerprint(model_type, qk_init=member)
        assert {name for name in plain if plain[name] != changed[name]} == {"qk"}
        assert changed["qk"] != symmetric["qk"]
    # This option redraws V as well, which is kept apart from the other weights for that reason.
    redrawn = fingerprint(model_type, qk_init={"scheme": "independent", "distribution": "kaiming_uniform"})
    assert {name for name in plain if plain[name] != redrawn[name]} == {"qk", "v"}


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda attention: attention.query.weight[3, 4].add_(1e-6), "qk"),
        (lambda attention: attention.key.bias[3].add_(1e-6), "qk"),
        (lambda attention: attention.value.bias[3].add_(1e-6), "v"),
        (lambda attention: attention.dropout, None),
    ],
)
def test_one_changed_entry_is_seen_where_it_belongs(change, kind):
    plain = fingerprint("bert")
    changed = fingerprint("bert", change=lambda model: change(model.bert.encoder.layer[1].attention.self))
    assert {name for name in plain if plain[name] != changed[name]} == ({kind} if kind else set())


def test_other_weights_and_buffers_count():
    plain = fingerprint("llama")
    for change in (
        lambda model: model.model.layers[0].self_attn.o_proj.weight[0, 0].add_(1e-6),
        lambda model: model.model.rotary_emb.inv_freq[0].add_(1e-3),
    ):
        changed = fingerprint("llama", change=change)
        assert {name for name in plain if plain[name] != changed[name]} == {"weights"}


def test_tied_parameters_count_once():
    model = MODELS["bert"]()
    assert count_parameters(model) == model.num_parameters()


def batch(seed=0, number=8):
    values = torch.randint(0, 99, (number, 5), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": values, "labels": values + 1}


def total(*added):
    result = BatchFingerprint()
    for step, values in added:
        result.add(values, step)
    result.combine()
    return result.result(steps=len({step for step, _ in added}))


def test_order_inside_a_step_does_not_count_and_everything_else_does():
    one, two = batch(0), batch(1)
    halves = [(0, {name: values[half] for name, values in one.items()}) for half in (slice(4, 8), slice(0, 4))]
    reference = total((0, one), (1, two))
    assert reference == total(*halves, (1, two))
    assert reference["steps"] == 2
    assert reference["sequences"] == 16
    one_token = {name: values.clone() for name, values in two.items()}
    one_token["labels"][7, 4] += 1
    swapped = {"input_ids": one["labels"], "labels": one["input_ids"]}
    others = [
        total((0, two), (1, one)),
        total((0, one), (1, one_token)),
        total((0, swapped), (1, two)),
        total((0, one), (1, two), (1, two)),
        total((0, {name: values.int() for name, values in one.items()}), (1, two)),
        total((0, {name: values.view(8, 1, 5) for name, values in one.items()}), (1, two)),
    ]
    assert len({reference["batches"], *(other["batches"] for other in others)}) == 1 + len(others)


def test_padding_does_not_count():
    """How far a sequence is padded, and on which side, is a matter of what stands beside it in its batch."""
    lengths, width = [3, 5, 2, 4], 5
    tokens = torch.arange(1, 21).view(4, 5)

    def padded(places, width, left=False):
        rows = {"input_ids": [], "attention_mask": []}
        for place in places:
            ids, gap = tokens[place, : lengths[place]], torch.zeros(width - lengths[place], dtype=torch.int64)
            for name, values in (("input_ids", ids), ("attention_mask", torch.ones_like(ids))):
                rows[name].append(torch.cat([gap, values] if left else [values, gap]))
        labels = torch.tensor(places)
        return {**{name: torch.stack(values) for name, values in rows.items()}, "labels": labels}

    reference = total((0, padded([0, 1, 2, 3], width)))
    assert reference["sequences"] == 4
    for others in (
        [padded([2, 0], 3), padded([3, 1], 8)],
        [padded([0, 1, 2, 3], 8, left=True)],
    ):
        assert total(*((0, other) for other in others)) == reference
    longer = padded([0, 1, 2, 3], width)
    longer["attention_mask"][0, 3] = 1  # a token that happens to be the one for padding
    assert total((0, longer)) != reference


def test_labels_of_one_dimension_and_images_in_half_precision():
    images = {"pixel_values": torch.ones(3, 1, 2, 2, dtype=torch.bfloat16), "labels": torch.arange(3)}
    assert total((0, images))["sequences"] == 3
    images["labels"] = images["labels"].flip(0) * 2
    assert total((0, images))["batches"] is not None


def test_steps_that_were_not_seen_leave_no_fingerprint():
    seen = BatchFingerprint()
    seen.add(batch(), 3)
    seen.combine()
    assert seen.result(steps=4)["batches"] is None


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return run("bert", 32, 1, tmp_path_factory.mktemp("reference"))["fingerprint"]


def test_accumulation_and_workers_change_nothing(reference, tmp_path):
    assert reference["steps"] == 3
    assert reference["sequences"] == 96
    assert run("bert", 8, 4, tmp_path, dataloader_num_workers=2)["fingerprint"] == reference
    # Another order of the same sequences inside each step, which holds all of them.
    assert run("bert", 32, 1, tmp_path, data_seed=5)["fingerprint"] == reference
    assert run("bert", 16, 1, tmp_path, steps=3)["fingerprint"] != reference


@pytest.mark.slow
def test_two_processes_and_a_resume_change_nothing(reference, tmp_path):
    """Each process sees half of the sequences; the checkpoint holds what both saw."""
    file = tmp_path / "result.json"
    for resume in ((), ("1",)):
        assert in_two_processes("bert", 8, 2, 32, 3, *resume, file=file)["fingerprint"] == reference


def test_layers_that_borrow_their_keys() -> None:
    """Gemma 3n's later layers have queries alone: their own and the borrowed keys are Q and K, and nothing else is."""
    model = build("gemma3n_text")
    before = fingerprint_weights(model)
    with torch.no_grad():
        model.get_parameter("layers.3.self_attn.q_proj.weight").add_(1)
        model.get_parameter("layers.1.self_attn.k_proj.weight").add_(1)
    after = fingerprint_weights(model)
    assert (after["weights"], after["v"]) == (before["weights"], before["v"])
    assert after["qk"] != before["qk"]
    with torch.no_grad():
        model.get_parameter("layers.3.self_attn.o_proj.weight").add_(1)
    assert fingerprint_weights(model)["weights"] != before["weights"]
