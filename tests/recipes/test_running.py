"""What a recipe does around training must not end a run that is otherwise well."""

import logging

import pytest
import running

import hf_symqk


def test_scores_that_cannot_be_had_end_no_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A weight that cannot be read costs the table of scores, and is said."""

    def fail(model: object) -> None:
        raise ValueError("gains of a kind that is not known")

    monkeypatch.setattr(hf_symqk, "score_model", fail)
    with caplog.at_level(logging.WARNING):
        assert running._scores(None) is None
    assert "gains of a kind" in caplog.text


def test_a_card_that_cannot_be_written_ends_no_run(tmp_path, caplog: pytest.LogCaptureFixture) -> None:
    """The run is over: neither a picture nor a text makes a failure of it, and the model is still pushed."""
    (tmp_path / "qk_scores.csv").write_text("no history\n")
    with caplog.at_level(logging.WARNING):
        running._write_card(tmp_path)
    assert "no figure" in caplog.text
    assert "no model card" in caplog.text
