"""`SymmetricInit` as a value: what it takes and refuses, its JSON form, and profiles of trained models."""

import json
import math
from dataclasses import replace

import pytest
from architectures import BY_NAME
from transformers import AutoConfig, AutoModel

from hf_symqk import QKScores, SymmetricInit, score_model

from .family import MEMBERS


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("symetric", r"`scheme` must be one of 'symmetric', 'independent', .*, got 'symetric'.*import the module"),
        ({"scheme": 3}, r"`scheme` must be one of .*, got 3"),
        ({"attention": "both"}, r"`attention` must be one of 'self', 'cross', 'all', .*got 'both'"),
        ({"distribution": "xavier"}, r"`distribution` must be one of 'kaiming_uniform', got 'xavier'"),
        ({"layers": []}, r"`layers` must be a non-empty sequence"),
        ({"layers": [0, -1]}, r"got \[0, -1\]"),
        ({"layers": [True]}, r"got \[True\]"),
        ({"layers": "01"}, r"got '01'"),
        ({"layers": {"encoder": [0.5]}}, r"got \[0.5\]"),
        ({"sheme": "symmetric"}, r"no field 'sheme'; its fields are \['scheme'"),
        ({"symmetry": 1.2}, r"`symmetry` must be a number from -1 to 1, .*got 1.2"),
        ({"symmetry": math.nan}, r"got nan"),
        ({"symmetry": True}, r"got True"),
        ({"symmetry": "0.5"}, r"got '0.5'"),
        ({"symmetry": []}, r"got \[\]"),
        ({"symmetry": [0.5, None]}, r"got \[0.5, None\]"),
        ({"symmetry": {}}, r"`symmetry` names no stack"),
        ({"symmetry": {"encoder": {"0": 0.5}}}, r"got \{'0': 0.5\}"),
        ({"scheme": "negative", "symmetry": 0.5}, r"`symmetry` cannot be chosen with scheme 'negative'"),
        ({"scheme": "spectrum", "target": "layer"}, r"`target` cannot be chosen with scheme 'spectrum'"),
        ({"target": "model"}, r"`target` must be one of 'head', 'layer', got 'model'"),
        ({"norm": "unit"}, r"`norm` must be one of 'match', got 'unit'"),
        ({"scheme": "independent", "norm": "match"}, r"norm of those drawn, which 'independent' keeps"),
        ({"options": {"alpha": 1}}, r"scheme 'symmetric' has no 'alpha'; it has none"),
        ({"scheme": "mimetic", "options": {"gamma": 1}}, r"no 'gamma'; its options are 'alpha', 'beta'"),
        ({"scheme": "mimetic", "options": {"alpha": "1"}}, r"'alpha' of scheme 'mimetic' must be a finite number"),
        ({"scheme": "mimetic", "options": {"alpha": math.inf}}, r"must be a finite number, got inf"),
        ({"scheme": "mimetic", "options": [1]}, r"`options` must be a mapping"),
    ],
)
def test_bad_options_are_refused_on_construction(value, message):
    """An option that cannot be meant is an error where it is written, naming the choices."""
    with pytest.raises(ValueError, match=message):
        SymmetricInit.from_value(value)
    with pytest.raises(ValueError, match=message):
        BY_NAME["bert"].config(qk_init=value)


def test_a_value_of_another_type_is_refused():
    """Neither a name, a mapping nor the option."""
    with pytest.raises(TypeError, match="must be a string"):
        SymmetricInit.from_value(3)


CHOICES = [
    SymmetricInit(),
    SymmetricInit("independent", distribution="kaiming_uniform"),
    SymmetricInit(layers=[3, 1], attention="all"),
    SymmetricInit(layers={"encoder": [0], "decoder": (2, 1)}),
    SymmetricInit(symmetry=[0.5, -1, 0], target="layer"),
    SymmetricInit(symmetry={"encoder": 0.5, "decoder": (1, -0.25)}, norm="match"),
    SymmetricInit("mimetic", options={"beta": 1}),
    *map(SymmetricInit.from_value, MEMBERS.values()),
]


@pytest.mark.parametrize("init", CHOICES, ids=str)
def test_round_trip(init, tmp_path):
    """`to_dict` holds JSON values only, and an equal option with an equal hash is read back, also from config.json."""
    values = init.to_dict()
    again = SymmetricInit.from_value(json.loads(json.dumps(values)))
    assert (again, hash(again), again.to_dict()) == (init, hash(init), values)
    BY_NAME["bert"].config(qk_init=init).save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).qk_init == init


def test_equal_choices_have_one_form():
    """Defaults are left out and numbers are floats, so that arms and configs that mean the same are the same."""
    assert SymmetricInit().to_dict() == {"scheme": "symmetric"}
    assert SymmetricInit(symmetry=1) == SymmetricInit() == SymmetricInit(options={})
    assert SymmetricInit(symmetry=-0.0).to_dict() == {"scheme": "symmetric", "symmetry": 0.0}
    assert str(SymmetricInit(symmetry=-0.0)) == "SymmetricInit(scheme='symmetric', symmetry=0.0)"
    assert SymmetricInit("mimetic", options={"alpha": 0.7, "beta": 2}).to_dict() == {
        "scheme": "mimetic",
        "options": {"beta": 2.0},
    }
    assert len(set(CHOICES)) == len({json.dumps(init.to_dict(), sort_keys=True) for init in CHOICES})


def test_profile_of_a_model():
    """`from_scores` starts every layer where the other model's is, stack by stack, without its cross-attention."""
    bart = BY_NAME["bart"]
    wanted = {"encoder": [0.7, -0.2], "decoder": [0.9, 0.1, -0.6]}
    scores = score_model(bart.build(qk_init={"symmetry": wanted, "target": "layer"}), attention="all")
    init = SymmetricInit.from_scores(scores)
    assert init.target == "layer"
    assert {stack: list(values) for stack, values in init.symmetry.items()} == {
        stack: pytest.approx(values, abs=1e-4) for stack, values in wanted.items()
    }
    ours = score_model(bart.build(seed=1, qk_init=init), attention="all").layers
    for mine, theirs in zip(ours, scores.layers, strict=True):
        if mine.kind == "self":
            assert mine.symmetry == pytest.approx(theirs.symmetry, abs=1e-4)
    heads = score_model(
        BY_NAME["bert"].build(
            qk_init=SymmetricInit.from_scores(
                score_model(BY_NAME["bert"].build(qk_init={"symmetry": -0.3, "target": "layer"})), target="head"
            )
        )
    )
    assert heads.layers[1].head_symmetry == pytest.approx([-0.3] * 4, abs=1e-4)


def test_profiles_that_are_none():
    """A score beyond ±1 by rounding is the end of the range; NaN and cross-attention give no start."""
    scores = score_model(BY_NAME["bert"].build())
    first = scores.layers[0]

    def changed(**values) -> QKScores:
        return replace(scores, layers=(replace(first, **values), *scores.layers[1:]))

    assert SymmetricInit.from_scores(changed(symmetry=-1.0000001)).symmetry[""][0] == -1
    with pytest.raises(ValueError, match=r"'encoder.layer.0.attention.self' has no symmetry score"):
        SymmetricInit.from_scores(changed(symmetry=math.nan))
    with pytest.raises(ValueError, match="no self-attention layer"):
        SymmetricInit.from_scores(QKScores(layers=(replace(first, kind="cross"),)))


def test_values_by_layer_reach_what_a_checkpoint_lacks(tmp_path):
    """`from_pretrained(qk_init=…)` counts in the whole model, and loaded layers keep their weights."""
    model = BY_NAME["bert"].build()
    state = {name: value for name, value in model.state_dict().items() if "layer.1.attention.self" not in name}
    model.save_pretrained(tmp_path, state_dict=dict(state))
    loaded = AutoModel.from_pretrained(tmp_path, qk_init={"symmetry": [0.9, -0.5, 0.3]})
    assert score_model(loaded).layers[1].head_symmetry == pytest.approx([-0.5] * 4, abs=1e-4)
    kept = loaded.state_dict()
    assert all((kept[name] == value).all() for name, value in state.items() if name in kept)
    with pytest.raises(ValueError, match=r"gives 2 values, and stack '' has 3 attention layers"):
        AutoModel.from_pretrained(tmp_path, qk_init={"symmetry": [0.9, -0.5]})
