"""
Protects: each stored form of a linear map gives the matrix that the library which wrote it computes with, whatever
the shape; and whatever is not fully understood is refused by name, never taken for a plain weight.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from hf_symqk.checkpoint.forms import Form, form_of


PATH = "model.layers.0.self_attn.q_proj"
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Stored:
    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def form_and_matrix(values: Mapping[str, Tensor], config: Mapping[str, Any] | None = None) -> tuple[Form, Tensor]:
    """What a reader does: tells the form from the headers, reads what it asks for, and no more."""
    tensors = {name: Stored(f"{PATH}.{name}", value.dtype, tuple(value.shape)) for name, value in values.items()}
    form = form_of(tensors, config)
    matrix = form.dense({name: values[name] for name in form.needed})
    assert form.shape({name: values[name] for name in form.needed_for_shape}) == tuple(matrix.shape)
    return form, matrix


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def integers(high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


# --- plain and fp8 ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8, torch.float8_e5m2])
def test_a_matrix_without_scales_is_taken_as_it_is_beside_scales_of_activations(dtype):
    weight = draw(6, 4).to(dtype)
    beside = {name: torch.tensor(2.0) for name in ("bias", "input_scale", "activation_scale", "k_scale", "v_scale")}
    form, matrix = form_and_matrix({"weight": weight, **beside})
    assert matrix is weight
    assert form.rows
    assert form.needed == ("weight",)


@pytest.mark.parametrize(
    ("shape", "grid", "config"),
    [
        ((256, 384), (2, 3), {"weight_block_size": [128, 128]}),
        ((48, 64), (3, 2), {"weight_block_size": [16, 32]}),
        ((48, 64), (3, 2), {}),
        ((8, 64), (8, 2), {"weight_block_size": [1, 32]}),
        ((8, 64), (1, 1), {"weight_block_size": None}),
    ],
)
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float8_e8m0fnu])
def test_fp8_blocks_are_those_of_transformers(shape, grid, config, scale_dtype):
    # transformers' own operation is the reference; it knows blocks that divide the shape. Products of an fp8 and a
    # scale of at most 24 bits are rounded once in float32 on both sides, so that they agree exactly.
    weight = draw(*shape).to(FP8)
    exponents = integers(12, *grid)
    scale = (exponents + 120).to(torch.uint8) if scale_dtype == torch.uint8 else draw(*grid).abs().to(scale_dtype)
    _, matrix = form_and_matrix({"weight": weight, "weight_scale_inv": scale}, config)
    torch.testing.assert_close(
        matrix, Fp8Dequantize(None)._dequantize_one(weight, scale, torch.float32), rtol=0, atol=0
    )


@pytest.mark.parametrize("config", [{"weight_block_size": [128, 128]}, {}])
def test_the_last_fp8_blocks_are_cut_off(config):
    # DeepSeek-V3 has such (576 rows). 130 rows in two blocks divide evenly too, by 65: wrong.
    weight, scale = draw(130, 300).to(FP8), draw(2, 3).abs()
    _, matrix = form_and_matrix({"weight": weight, "weight_scale_inv": scale}, config)
    for row, column in ((0, 0), (127, 127), (128, 128), (129, 299), (100, 256)):
        assert matrix[row, column] == weight[row, column].float() * scale[row // 128, column // 128]


@pytest.mark.parametrize("scale_shape", [(), (1,), (6,), (6, 1)])
@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv"])
def test_one_fp8_scale_for_all_or_one_a_row(scale_shape, name):
    weight, scale = draw(6, 4).to(FP8), draw(*scale_shape).abs()
    _, matrix = form_and_matrix({"weight": weight, name: scale, "input_scale": torch.ones(1)})
    expected = weight.float() * scale.reshape(-1, 1)
    torch.testing.assert_close(matrix, expected, rtol=0, atol=0)


def test_a_scale_of_another_shape_is_an_error_that_names_it():
    with pytest.raises(ValueError, match=rf"{PATH}: weight_scale has shape \(5,\).*\(6, 4\)"):
        form_and_matrix({"weight": draw(6, 4).to(FP8), "weight_scale": draw(5)})


# --- bitsandbytes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("carrier", [torch.uint8, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(48, 40), (13, 11), (160, 129)])
def test_four_bits_are_those_of_bitsandbytes(kind, nested, carrier, dtype, shape):
    # Shapes that are no multiples of a block (64), with an odd number of entries, and with several outer blocks (256).
    bnb = pytest.importorskip("bitsandbytes")
    linear = bnb.nn.Linear4bit(
        shape[1], shape[0], quant_type=kind, compress_statistics=nested, quant_storage=carrier
    )  # fmt: skip
    linear.weight.data = draw(*shape).to(dtype)
    linear = linear.to("cpu")
    expected = bnb.functional.dequantize_4bit(linear.weight.data, linear.weight.quant_state)
    form, matrix = form_and_matrix(linear.state_dict())
    assert form.name == "bitsandbytes 4-bit"
    assert matrix.dtype == dtype == expected.dtype
    torch.testing.assert_close(matrix, expected, rtol=0, atol=0)


def test_eight_bits_are_those_of_bitsandbytes():
    bnb = pytest.importorskip("bitsandbytes")
    linear = bnb.nn.Linear8bitLt(40, 48, has_fp16_weights=False)
    linear.weight.data = draw(48, 40)
    linear = linear.to("cpu")
    expected = bnb.functional.int8_vectorwise_dequant(linear.weight.data, linear.weight.SCB)
    values = linear.state_dict()
    form, matrix = form_and_matrix(values)
    assert form.name == "bitsandbytes LLM.int8"
    torch.testing.assert_close(matrix, expected)
    with pytest.raises(ValueError, match=f"{PATH}: weight_format is 2"):
        form_and_matrix({**values, "weight_format": torch.tensor(2, dtype=torch.uint8)})


# --- compressed-tensors -------------------------------------------------------------------------------------------


def pack(entries: Tensor, bits: int) -> Tensor:
    """Unsigned entries along the last dimension into int32, by a plain loop."""
    count = 32 // bits
    entries = nn.functional.pad(entries.long(), (0, -entries.shape[-1] % count))
    words = torch.zeros(*entries.shape[:-1], entries.shape[-1] // count, dtype=torch.int64)
    for place in range(count):
        words += entries[..., place::count] << (bits * place)
    return (words - (words >= 2**31).long() * 2**32).to(torch.int32)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("columns", "groups"), [(64, 4), (64, 1), (36, 3)])
@pytest.mark.parametrize("order", ["none", "unset", "activations"])
def test_packed_integers(bits, symmetric, columns, groups, order):
    rows = 10  # not a multiple of the entries of a word: zero points are packed along rows
    entries, zeros = integers(2**bits, rows, columns), integers(2**bits, rows, groups, seed=1)
    scale = draw(rows, groups).abs().to(torch.bfloat16)
    group = torch.arange(columns) // (columns // groups)
    values = {
        "weight_packed": pack(entries, bits),
        "weight_scale": scale,
        "weight_shape": torch.tensor([rows, columns]),
    }
    if order == "unset":
        values["weight_g_idx"] = torch.full((columns,), -1, dtype=torch.int32)
    elif order == "activations":
        group = group[torch.randperm(columns, generator=torch.Generator().manual_seed(2))]
        values["weight_g_idx"] = group.int()
    signed, zero = entries - 2 ** (bits - 1), torch.zeros(rows, groups)
    if not symmetric:
        values["weight_zero_point"] = pack(zeros.T, bits).T.contiguous()
        zero = (zeros - 2 ** (bits - 1)).float()
    _, matrix = form_and_matrix(values, {"quant_method": "compressed-tensors"})
    expected = (signed.float() - zero[:, group]) * scale.float()[:, group]
    torch.testing.assert_close(matrix, expected, rtol=0, atol=0)


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
FLOAT = {"num_bits": 8, "type": "float", "symmetric": True}
SCHEMES = {
    "int4 groups": {**INT4, "symmetric": True},
    "int4 groups with zeros": {**INT4, "symmetric": False},
    "int8 rows packed": {**INT8, "symmetric": True},
    "int8 rows": {**INT8, "symmetric": True},
    "int8 rows with zeros": {**INT8, "symmetric": False},
    "fp8 rows": {**FLOAT, "strategy": "channel"},
    "fp8": {**FLOAT, "strategy": "tensor"},
    "fp8 blocks": {**FLOAT, "strategy": "block", "block_structure": [16, 32]},
}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_forms_are_those_of_compressed_tensors(scheme):
    # Against the library, where it is installed: it compresses, both decompress. It multiplies in the type of the
    # scales, here float32.
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    arguments = QuantizationArgs(**SCHEMES[scheme])
    rows, columns = 40, 80
    weight = draw(rows, columns)
    height, width = {
        "tensor": (rows, columns),
        "channel": (1, columns),
        "group": (1, 16),
        "block": (16, 32),
    }[SCHEMES[scheme]["strategy"]]
    padded = nn.functional.pad(weight, (0, -columns % width, 0, -rows % height))
    blocks = padded.unflatten(1, (-1, width)).unflatten(0, (-1, height))
    low, high = blocks.amin(dim=(1, 3)), blocks.amax(dim=(1, 3))
    scale, zero = calculate_qparams(low, high, arguments)
    if SCHEMES[scheme]["strategy"] == "tensor":
        scale, zero = scale.flatten(), zero.flatten()
    name = "pack-quantized" if "int4" in scheme or "packed" in scheme else "naive-quantized"
    compressor = BaseCompressor.get_value_from_registry(name)
    how = QuantizationScheme(targets=["Linear"], weights=arguments)
    values = compressor.compress({"weight": weight, "weight_scale": scale, "weight_zero_point": zero}, how)
    config = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": SCHEMES[scheme], "targets": ["Linear"]}},
    }
    _, matrix = form_and_matrix(values, config)
    expected = compressor.decompress(values, how)["weight"]
    torch.testing.assert_close(matrix, expected, rtol=1e-6, atol=1e-7)
    # ... and close to what went in: by half a step of the coarsest scheme (1/15 of a range of about 6).
    assert (matrix - weight).abs().max() < 0.3


# --- GPTQ and AWQ -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2", None])
@pytest.mark.parametrize("order", ["none", "groups", "activations"])
def test_gptq(bits, version, order):
    inputs, outputs, size = 64, 96, 16
    entries, zeros = integers(2**bits, inputs, outputs), integers(2**bits - 1, inputs // size, outputs, seed=1) + 1
    scales = draw(inputs // size, outputs).abs().half()
    group = torch.arange(inputs) // size
    if order == "activations":
        group = group[torch.randperm(inputs, generator=torch.Generator().manual_seed(2))]
    values = {
        "qweight": pack(entries.T, bits).T.contiguous(),
        "qzeros": pack(zeros if version == "gptq_v2" else zeros - 1, bits),
        "scales": scales,
    }
    if order != "none":
        values["g_idx"] = group.int()
    config = {"quant_method": "gptq", "bits": bits, **({"checkpoint_format": version} if version else {})}
    _, matrix = form_and_matrix(values, config)
    expected = scales.float()[group] * (entries - zeros[group])
    torch.testing.assert_close(matrix, expected.T, rtol=0, atol=0)


def test_awq():
    inputs, outputs, size = 64, 96, 16
    entries, zeros = integers(16, inputs, outputs), integers(16, inputs // size, outputs, seed=1)
    scales = draw(inputs // size, outputs).abs().half()
    # AutoAWQ writes entry `order[i]` of eight to place i of a word.
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    qweight, qzeros = (pack(x.unflatten(1, (-1, 8))[..., order].flatten(1), 4) for x in (entries, zeros))
    values = {"qweight": qweight, "qzeros": qzeros, "scales": scales}
    _, matrix = form_and_matrix(values, {"quant_method": "awq", "bits": 4, "version": "gemm", "group_size": size})
    group = torch.arange(inputs) // size
    torch.testing.assert_close(matrix, (scales.float()[group] * (entries - zeros[group])).T, rtol=0, atol=0)


# --- refusals -----------------------------------------------------------------------------------------------------

BYTES = torch.zeros(8, 4, dtype=torch.uint8)
WORDS = torch.zeros(8, 4, dtype=torch.int32)
SIGNED = torch.zeros(8, 4, dtype=torch.int8)
GPTQ = {"qweight": WORDS, "qzeros": torch.zeros(1, 1, dtype=torch.int32), "scales": torch.ones(1, 8)}


@pytest.mark.parametrize(
    ("values", "config", "named"),
    [
        ({"weight": draw(4, 4), "weight_scale": draw(4)}, {}, "what weight_scale does to the weight"),
        ({"weight": draw(4, 4), "scale_weight": draw(4)}, {}, "what scale_weight does to the weight"),
        ({"weight": draw(4, 4), "lora_A.weight": draw(1, 4)}, {}, "what lora_A.weight does to the weight"),
        ({"weight": draw(4, 4).to(FP8), "scale": draw(4)}, {}, "what scale does to the weight"),
        ({"weight": BYTES, "weight_scale": torch.ones(1)}, {}, r"weight \(uint8\), weight_scale \(float32\)"),
        ({"weight": SIGNED}, {}, r"weight \(int8\)"),
        ({"weight": SIGNED, "weight_scale": torch.ones(8)}, {"quant_method": "mine"}, "quant_method .* 'mine'"),
        ({"weight": draw(4, 4)}, {"quant_method": "bitnet"}, "quant_method .* 'bitnet'"),
        ({"weight": draw(4, 4)}, {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
        ({"weight_g": draw(4), "weight_v": draw(4, 4)}, {}, "weight_g .*, weight_v .* no form that is known"),
        (GPTQ, {"quant_method": "gptq", "checkpoint_format": "marlin"}, "checkpoint_format .* 'marlin'"),
        (GPTQ, {"quant_method": "awq", "version": "gemv"}, "version .* 'gemv'"),
        ({"weight": SIGNED, "weight_scales": torch.ones(8)}, {}, "EETQ"),
        ({"weight": BYTES, "weight_scale": BYTES, "weight_scale_2": torch.ones(1)}, {}, "NVFP4"),
        ({"weight_packed": BYTES, "weight_scale": BYTES, "weight_global_scale": torch.ones(1)}, {}, "NVFP4"),
        ({"weight_blocks": BYTES, "weight_scales": BYTES}, {}, "MXFP4"),
        ({"weight._data": BYTES, "weight._scale": draw(4)}, {}, "quanto"),
        ({"_weight_qdata": BYTES, "_weight_scale": draw(4)}, {}, "torchao"),
        ({"W_q": BYTES, "scale": draw(4), "zero": draw(4)}, {}, "HQQ"),
        ({"codes": SIGNED, "codebooks": draw(4), "scales": draw(4)}, {}, "AQLM"),
        ({"Qidxs": BYTES, "SU": draw(4), "SV": draw(4)}, {}, "QuIP#"),
        ({"dense_weights": WORDS}, {}, "SpQR"),
        ({"indices": WORDS, "centroids.weight": draw(4)}, {}, "VPTQ"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(values, config, named):
    tensors = {name: Stored(f"{PATH}.{name}", value.dtype, tuple(value.shape)) for name, value in values.items()}
    form = form_of(tensors, config)
    assert form.shape() is None
    with pytest.raises(ValueError, match=rf"^{PATH} is stored as .*{named}.*dequantize"):
        form.dense(values)


def test_a_weight_that_is_no_matrix_has_no_shape():
    form = form_of({"weight": Stored("conv.weight", torch.float32, (4, 4, 3))})
    assert form.problem is None
    assert form.shape() is None
