"""
Cost of finding a model's attention layers, against a walk over its modules alone.

    python benchmarks/finding.py [--repeats 20] [--quick] [--json results.json]

The models stand on the meta device: finding reads names, attributes and shapes, and runs nothing. See README.md beside
this file for how to read the table.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from report import Result, argument_parser, facts, ms, show
from torch import nn
from transformers import (
    AutoModel,
    BertConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2_5OmniConfig,
    Qwen2_5OmniForConditionalGeneration,
)
from transformers import logging as transformers_logging

from hf_symqk.attention import survey_attention


TARGET = 50e-3  # seconds, for 48 layers


def model_of(config: PreTrainedConfig) -> nn.Module:
    """A model without values."""
    with torch.device("meta"):
        return AutoModel.from_config(config)


def multimodal(layers: int) -> nn.Module:
    """Text, images, sound and speech in one model: the language models that think and talk, and their towers."""
    thinker = {
        "text_config": {"num_hidden_layers": layers},
        "audio_config": {"encoder_layers": layers},
        "vision_config": {"depth": layers},
    }
    config = Qwen2_5OmniConfig(thinker_config=thinker, talker_config={"num_hidden_layers": layers})
    with torch.device("meta"):
        return Qwen2_5OmniForConditionalGeneration._from_config(config)


def models(layers: int) -> dict[str, Callable[[], nn.Module]]:
    """What is measured, by name."""
    grouped: dict[str, Any] = {"num_key_value_heads": 8, "intermediate_size": 14336}
    return {
        "LLaMA": lambda: model_of(LlamaConfig(num_hidden_layers=layers, **grouped)),
        "BERT": lambda: model_of(BertConfig(num_hidden_layers=layers)),
        "Qwen2.5-Omni": lambda: multimodal(layers),
    }


def walk(model: nn.Module) -> int:
    """What any way of finding something in a model has to do at least."""
    return sum(1 for _ in model.named_modules())


def fastest(functions: list[Callable[[], object]], repeats: int) -> list[float]:
    """Seconds of the fastest turn of each; the functions take turns."""
    best = [float("inf")] * len(functions)
    for _ in range(repeats):
        for number, function in enumerate(functions):
            start = time.perf_counter()
            function()
            best[number] = min(best[number], time.perf_counter() - start)
    return best


def compare(name: str, model: nn.Module, repeats: int, is_target: bool) -> Result:
    """One model: finding against walking, and the target where it holds for the model."""
    start = time.perf_counter()
    found = survey_attention(model).layers
    first = time.perf_counter() - start
    ours, walked = fastest([lambda: survey_attention(model), lambda: walk(model)], repeats)
    return Result(
        what=f"{name}: {len(found)} layers among {walk(model)} modules (first call {ms(first)})",
        ours=ms(ours),
        against=ms(walked),
        ratio=ours / walked,
        target=f"< {ms(TARGET)}" if is_target else "",
        met=ours < TARGET,
    )


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=20, help="turns of each, of which the fastest counts")
    parser.add_argument("--layers", type=int, default=48, help="layers of each stack")
    arguments = parser.parse_args()
    if min(arguments.repeats, arguments.layers) < 1:
        parser.error("--repeats and --layers must be 1 or more")
    if arguments.quick:
        arguments.repeats, arguments.layers = 1, 2
    transformers_logging.set_verbosity_error()
    about = facts(arguments, layers=arguments.layers, repeats=arguments.repeats) | {"device": "meta"}
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    built = {name: make() for name, make in models(arguments.layers).items()}
    results = [compare(name, model, arguments.repeats, name in ("LLaMA", "BERT")) for name, model in built.items()]
    show(results, about, arguments.json)


if __name__ == "__main__":
    main()
