"""Training runs on the Hub: revisions as steps, and what goes wrong with one of them."""

import json

from architectures import BY_NAME
from hub_server import HubServer, hub

from hf_symqk import score_model


__all__ = ["hub"]


def test_revisions_are_a_history(hub: HubServer, tmp_path, symqk):
    """Each revision is scored as itself, by step; one that does not exist is named and the others stand."""
    models = {step: BY_NAME["bert"].build(seed=step) for step in (1, 16)}
    for step, model in models.items():
        model.save_pretrained(tmp_path / f"step{step}")
        hub.add_repo("who/run", tmp_path / f"step{step}", revision=f"step{step}")
    status, out, err = symqk("scores", "who/run", "--revisions", "step16,step8,step1", "--json")
    assert status == 1
    assert [entry["step"] for entry in json.loads(out)] == [1, 16]
    for entry in json.loads(out):
        live = score_model(models[entry["step"]]).layers
        assert [layer["symmetry"] for layer in entry["scores"]["layers"]] == [layer.symmetry for layer in live]
    assert len(err.splitlines()) == 1
    assert err.startswith("symqk: who/run@step8: ")


def test_a_private_repository(hub: HubServer, tmp_path, symqk, monkeypatch):
    """Without its token one line says that it cannot be had; with the token of the environment it is scored."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    BY_NAME["llama"].build().save_pretrained(tmp_path / "model")
    hub.add_repo("who/secret", tmp_path / "model", private=True, token="hf_right")
    status, out, err = symqk("scores", "who/secret")
    assert (status, out) == (1, "")
    assert err.startswith("symqk: who/secret: ")
    assert len(err.splitlines()) == 1
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    status, out, err = symqk("scores", "who/secret", "who/secret")
    assert (status, err) == (0, "")
    assert out.splitlines()[1].split()[:3] == ["who/secret", "decoder", "59.2k"]
