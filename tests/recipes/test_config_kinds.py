"""`--config_name` of a model that a recipe does not train: each recipe says what it is instead, before it reads on."""

import clm
import finetune
import mlm
import pytest
import vit
from arguments import RecipeError
from transformers import BertConfig, GPT2Config, ModernBertConfig, T5Config, ViTConfig


CONFIGS = {
    "bert": BertConfig,
    "modernbert": ModernBertConfig,
    "gpt2": GPT2Config,
    "t5": T5Config,
    "vit": ViTConfig,
}


@pytest.mark.parametrize(
    ("recipe", "kind", "message"),
    [
        (mlm, "gpt2", "is not a masked-language-model encoder.*clm.py trains it"),
        (mlm, "t5", "is not a masked-language-model encoder"),
        (mlm, "vit", "is not a masked-language-model encoder"),
        (clm, "modernbert", "is not a decoder.*mlm.py trains it"),
        (clm, "bert", "is an encoder.*is_decoder=true"),
        (clm, "t5", "is not a decoder"),
        (clm, "vit", "is not a decoder"),
        (vit, "bert", "is not an image classifier"),
        (finetune, "gpt2", "is not a masked-language-model encoder"),
        (finetune, "vit", "is not a masked-language-model encoder"),
    ],
)
def test_config_of_another_kind(recipe, kind, message, text_files, tmp_path):
    CONFIGS[kind]().save_pretrained(tmp_path / "config")
    words = ["--config_name", str(tmp_path / "config"), "--output_dir", str(tmp_path / "out"), "--use_cpu"]
    words += [] if recipe in (vit, finetune) else ["--train_file", text_files["txt"], "--vocab_size", "300"]
    with pytest.raises(RecipeError, match=rf"config_name='.*config' {message}"):
        recipe.main(words)
    assert not (tmp_path / "out" / "run.json").exists()
