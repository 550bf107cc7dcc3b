"""The demonstration of updates on the built-in text: it runs, and its three runs are what they are called."""

import dynamics
import pytest
import torch
from dynamics import BLOCK, RUNS
from masking import TokenMasker
from tokenization import ENCODER_TOKENS, train_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.fixture(scope="module")
def masker():
    return TokenMasker(train_tokenizer(["a few words"], 300, ENCODER_TOKENS), 0.15, 0)


@pytest.mark.parametrize("name", RUNS)
def test_what_a_token_sees_and_is_asked_for(name, masker):
    """A later token reaches an earlier output in the bidirectional run alone; labels stand where outputs do."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=300)
    ).eval()
    blocks = torch.randint(10, 260, (2, BLOCK))  # what the tokenizer knows
    batch = RUNS[name].batch(blocks, masker, epoch=0)
    outputs = model(**batch)
    logits = outputs.logits
    asked = batch["labels"] != -100
    by_hand = torch.nn.functional.cross_entropy(logits[asked], batch["labels"][asked])
    assert torch.allclose(outputs.loss, by_hand), "each output is held to the label in its own place"
    if RUNS[name].is_masked:
        assert torch.equal(batch["labels"][asked], blocks[asked])
        assert 0 < asked.sum() < 0.3 * asked.numel()
    else:
        assert torch.equal(batch["labels"][:, :-1], blocks[:, 1:])
    changed = dict(batch, input_ids=batch["input_ids"].clone())
    changed["input_ids"][:, -1] = 5
    moved = (model(**changed).logits[:, :-1] - logits[:, :-1]).abs().max() > 1e-6
    assert moved != RUNS[name].is_causal


@pytest.mark.slow
def test_it_runs(capsys):
    """On a few steps: a row a layer, run and time, and the table that is printed."""
    table = dynamics.main(["--steps", "2", "--measured", "2"])
    assert len(table) == len(RUNS) * 2 * 4
    assert table.drop(columns=["run"]).notna().all().all()
    first = table[table.step == 0]
    weights = [first[first.run == name]["W_qk symmetry"].tolist() for name in RUNS]
    assert weights[0] == weights[1] == weights[2], "the same weights to start from"
    with pytest.raises(SystemExit):
        dynamics.main(["--steps", "100000"])
    printed = capsys.readouterr()
    assert "update directionality" in printed.out
    assert "steps at most" in printed.err
