import json

import pytest
from arguments import ModelArguments, RecipeError
from modeling import DECODER, ENCODER, build_config, build_model, check_positions, parse_config_overrides
from transformers import AutoModelForMaskedLM, RobertaConfig

import hf_symqk


SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def config(tokenizer, trained=True, kind=ENCODER, **arguments):
    return build_config(ModelArguments(**arguments), tokenizer, trained, kind)


def test_overrides_in_each_form():
    expected = {"hidden_size": 64, "hidden_act": "relu", "layer_norm_eps": 1e-5, "tie_word_embeddings": False}
    text = "hidden_size=64, hidden_act=relu,layer_norm_eps=1e-5,tie_word_embeddings=False"
    assert parse_config_overrides(text) == expected
    assert parse_config_overrides(json.dumps(expected)) == expected
    assert parse_config_overrides(expected) == expected
    assert parse_config_overrides(None) == {}
    for text, message in (("hidden_size", "not of the form"), ('{"a"', "not a JSON object")):
        with pytest.raises(RecipeError, match=message):
            parse_config_overrides(text)


def test_default_is_a_small_pre_norm_encoder(tokenizer):
    made = config(tokenizer)
    assert (made.model_type, made.num_hidden_layers, made.hidden_size) == ("modernbert", 4, 128)
    assert made.vocab_size == len(tokenizer)
    assert (made.pad_token_id, made.cls_token_id, made.bos_token_id) == (0, 1, 1)
    assert (made.sep_token_id, made.eos_token_id) == (2, 2)


def test_overrides_reach_what_the_config_derives(tokenizer):
    made = config(tokenizer, config_overrides="num_hidden_layers=2,hidden_size=64")
    assert len(made.layer_types) == made.num_hidden_layers == 2
    assert made.hidden_size == 64


def test_config_from_a_folder(tokenizer, tmp_path):
    from transformers import ModernBertConfig

    ModernBertConfig(vocab_size=512, pad_token_id=0, **{**SMALL, "num_hidden_layers": 5}).save_pretrained(tmp_path)
    name = str(tmp_path)
    made = config(tokenizer, config_name=name, config_overrides={"num_hidden_layers": 3})
    assert (made.hidden_size, made.num_hidden_layers, len(made.layer_types)) == (32, 3, 3)
    # The vocabulary of the file belongs to its own tokenizer, not to one that the recipe trains.
    assert made.vocab_size == 300
    assert config(tokenizer, trained=False, config_name=name).vocab_size == 512
    with pytest.raises(RecipeError, match="vocab_size=200, below the 300 entries"):
        config(tokenizer, config_name=name, config_overrides="vocab_size=200")
    with pytest.raises(RecipeError, match="give one"):
        config(tokenizer, config_name=name, model_type="bert")
    with pytest.raises(RecipeError, match="cannot be loaded"):
        config(tokenizer, config_name=str(tmp_path / "nothing"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"model_type": "gpt2"},
            r"'gpt2' is not a masked-language-model encoder\. .* clm.py trains it",
        ),
        ({"model_type": "vit"}, r"not a masked-language-model encoder\. .*bert.*roberta"),
        ({"model_type": "bart"}, "encoder-decoder"),
        ({"model_type": "bort"}, "no architecture 'bort'"),
        ({"model_type": "bert", "config_overrides": "is_decoder=true"}, "is_decoder=True"),
        ({"model_type": "bert", "config_overrides": "hidden_sise=64"}, "no 'hidden_sise'.*hidden_size"),
        ({"model_type": "bert", "config_overrides": "hidden_size=100"}, "hidden_size=100 .* num_attention_heads=12"),
        ({"config_overrides": "num_attention_heads=3"}, "hidden_size=128 .* num_attention_heads=3"),
        ({"config_overrides": "hidden_size=wide"}, "hidden_size"),
    ],
)
def test_configs_that_do_not_serve(tokenizer, arguments, message):
    with pytest.raises(RecipeError, match=message):
        config(tokenizer, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model_type": "modernbert"}, r"not a decoder .* It is a masked-language-model encoder: mlm.py trains it"),
        ({"model_type": "bert"}, r"'bert' is an encoder: train it with mlm.py, or .* is_decoder=true"),
        ({"model_type": "bart"}, "encoder-decoder"),
        ({"model_type": "vit"}, r"not a decoder .* gpt2.*llama"),
        ({"model_type": "xlm"}, r"'xlm' is an encoder: train it with mlm.py\.$"),
        ({"model_type": "gpt2", "config_overrides": "n_embd=100"}, "hidden_size=100 .* num_attention_heads=12"),
    ],
)
def test_configs_that_are_no_decoders(tokenizer, arguments, message):
    with pytest.raises(RecipeError, match=message):
        config(tokenizer, kind=DECODER, **arguments)


def test_default_decoder(decoder_tokenizer):
    made = config(decoder_tokenizer, kind=DECODER)
    assert (made.model_type, made.num_hidden_layers, made.hidden_size) == ("llama", 4, 128)
    assert (made.bos_token_id, made.eos_token_id, made.pad_token_id) == (0, 0, 1)
    assert build_model(made, "symmetric", 64, DECODER).config.vocab_size == len(decoder_tokenizer)


def test_decoder_that_reads_what_it_predicts_is_refused(tokenizer):
    """Its loss would fall to 0 and mean nothing."""
    bert = config(tokenizer, kind=DECODER, model_type="bert", config_overrides={**SMALL, "is_decoder": True})
    build_model(bert, "symmetric", 64, DECODER)
    bert.is_decoder = False
    with pytest.raises(RecipeError, match="BertLMHeadModel reads the tokens that it is to predict"):
        build_model(bert, "symmetric", 64, DECODER)


def test_positions_of_roberta_count_from_behind_the_padding_id(tokenizer):
    made = RobertaConfig(vocab_size=300, pad_token_id=1, max_position_embeddings=66, **SMALL)
    model = AutoModelForMaskedLM.from_config(made)
    check_positions(model, 64)
    with pytest.raises(RecipeError, match=r"block_size=65 is above the 64 positions of roberta .*66 less 2"):
        check_positions(model, 65)


def test_positions_of_bert(tokenizer):
    made = config(tokenizer, model_type="bert", config_overrides={**SMALL, "max_position_embeddings": 64})
    build_model(made, None, 64, ENCODER)
    with pytest.raises(RecipeError, match="block_size=65 is above the 64 positions of bert"):
        build_model(made, None, 65, ENCODER)


def test_initialisation_is_passed_on_and_kept_in_the_config(tokenizer):
    made = config(tokenizer, config_overrides=SMALL)
    plain = build_model(made, None, 64, ENCODER)
    symmetric = build_model(
        config(tokenizer, config_overrides=SMALL), {"scheme": "symmetric", "layers": [1]}, 64, ENCODER
    )
    scores = [layer.symmetry for layer in hf_symqk.score_model(symmetric).layers]
    assert scores[1] == pytest.approx(1, abs=1e-5)
    assert abs(scores[0]) < 0.5
    assert max(abs(layer.symmetry) for layer in hf_symqk.score_model(plain).layers) < 0.5
    assert "qk_init" in symmetric.config.to_dict()
    with pytest.raises(RecipeError, match="qk_init='symetric'"):
        build_model(made, "symetric", 64, ENCODER)


def test_argument_replaces_the_initialisation_that_a_config_carries(tokenizer, tmp_path, caplog):
    made = build_model(config(tokenizer, config_overrides=SMALL), "symmetric", 64, ENCODER)
    made.config.save_pretrained(tmp_path)
    again = build_model(config(tokenizer, config_name=str(tmp_path)), None, 64, ENCODER)
    assert max(abs(layer.symmetry) for layer in hf_symqk.score_model(again).layers) < 0.5
    assert "carries qk_init" in caplog.text
