"""Unpacking equals the packages that define the formats, bit for bit, on random bytes, where they are installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from compiled_kernels.expert_linear.packed import exponents
from tests.model.formats.test_quantized_folders import read_packed
from tests.model.test_weights import same
from tests.thorough import tries
from workbench.model.hf.families import read_spec
from workbench.model.hf.weights import load_weights
from workbench.testing import packers
from workbench.testing.packers import Packed

dtypes = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])


def octets(data: st.DataObject, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**30)))
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def floats(data: st.DataObject, *shape: int) -> Tensor:
    return octets(data, *shape).float() / 64 + 2.0**-9


@settings(max_examples=tries(40), deadline=None)
@given(st.data())
def test_compressed_tensors_reads_the_same(data: st.DataObject) -> None:
    package = pytest.importorskip("compressed_tensors", reason="pip install compressed-tensors")
    from compressed_tensors.compressors import BaseCompressor

    kinds = ["pack-quantized", "int-quantized", "float-quantized", "mxfp4-pack-quantized"]
    kind, dtype = data.draw(st.sampled_from(kinds)), data.draw(dtypes)
    rows, group, groups = data.draw(st.integers(1, 40)), 32 * data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    columns, zero = group * groups, False
    weights: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    tensors: dict[str, Tensor] = {"weight_scale": floats(data, rows, 1).to(dtype)}
    if kind == "pack-quantized":
        bits, zero = data.draw(st.sampled_from([2, 3, 4, 8])), data.draw(st.booleans())
        weights |= {"num_bits": bits, "symmetric": not zero, "strategy": "group", "group_size": group}
        tensors = {
            "weight_packed": octets(data, rows, columns * bits // 8).view(torch.int32),
            "weight_scale": floats(data, rows, groups).to(dtype),
            "weight_shape": torch.tensor([rows, columns]),
        }
        if zero:
            words = -(-rows * bits // 32)
            tensors["weight_zero_point"] = octets(data, groups, 4 * words).view(torch.int32).T.contiguous()
    elif kind == "int-quantized":
        tensors["weight"] = octets(data, rows, columns).view(torch.int8)
    elif kind == "float-quantized":
        values = octets(data, rows, columns)
        tensors["weight"] = torch.where(values & 127 == 127, 0, values).view(torch.float8_e4m3fn)  # no NaN
        weights["type"] = "float"
        if data.draw(st.booleans()):
            block = [data.draw(st.integers(1, 50)), data.draw(st.integers(1, 70))]
            weights |= {"strategy": "block", "block_structure": block}
            tensors["weight_scale"] = floats(data, -(-rows // block[0]), -(-columns // block[1])).to(dtype)
    else:
        dtype = torch.bfloat16
        weights |= {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
        tensors = {
            "weight_packed": octets(data, rows, columns // 2),
            "weight_scale": octets(data, rows, columns // 32) % 40 + 107,
        }
    scheme = package.quantization.QuantizationScheme(
        targets=["Linear"], weights=package.quantization.QuantizationArgs(**weights)
    )
    theirs = BaseCompressor.get_value_from_registry(kind).decompress(dict(tensors), scheme)["weight"]
    assert theirs is not None
    ours = read_packed(Packed(tensors, theirs, packers._compressed(kind, **weights))).read()
    assert theirs.dtype == dtype and torch.equal(ours.to(dtype), theirs)


@settings(max_examples=tries(40), deadline=None)
@given(st.data())
def test_bitsandbytes_reads_the_same(data: st.DataObject) -> None:
    package = pytest.importorskip("bitsandbytes", reason="pip install bitsandbytes")
    rows, columns = data.draw(st.integers(1, 40)), 2 * data.draw(st.integers(2, 200))
    kind, nested = data.draw(st.sampled_from(["nf4", "fp4"])), data.draw(st.booleans())
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 2**30))))
    packed, state = package.functional.quantize_4bit(weight, quant_type=kind, compress_statistics=nested)
    packed = octets(data, *packed.shape)
    theirs = package.functional.dequantize_4bit(packed, state)
    tensors = {"weight": packed} | {f"weight.{name}": each for name, each in state.as_dict(packed=True).items()}
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    assert torch.equal(read_packed(Packed(tensors, theirs, config)).read(), theirs)

    values, factors = octets(data, rows, columns).view(torch.int8), floats(data, rows)
    theirs = package.functional.int8_vectorwise_dequant(values, factors)
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    assert torch.equal(read_packed(Packed({"weight": values, "SCB": factors}, theirs, config)).read(), theirs)


def gpt_oss(folder: Path) -> None:
    """A tiny model of gpt-oss in bfloat16, by transformers."""
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed: pip install 'transformers>=5'"
    )
    config = transformers.GptOssConfig(
        vocab_size=40, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=3, num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"], pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).bfloat16()
    model.save_pretrained(folder)


def test_experts_of_gpt_oss_are_the_dense_ones(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    gpt_oss(tmp_path / "dense")
    (tmp_path / "m").mkdir()
    config = json.loads((tmp_path / "dense" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    plain = load_file(tmp_path / "dense" / "model.safetensors")
    packed = dict(plain)
    for name in [name for name in plain if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, width, out = packed.pop(name).shape
        blocks = torch.randint(0, 256, (experts, out, width // 32, 16), dtype=torch.uint8)
        scales = torch.randint(115, 122, (experts, out, width // 32), dtype=torch.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    save_file(packed, tmp_path / "m" / "model.safetensors")
    save_file(plain, tmp_path / "dense" / "model.safetensors")
    spec = read_spec(tmp_path / "m")
    states = [load_weights(tmp_path / name, spec, torch.float32) for name in ("m", "dense")]
    assert same(*states)


def test_exponents_are_powers_of_two() -> None:
    """The first is below float32's normal numbers, the last is no number."""
    found = exponents(torch.arange(256).to(torch.uint8))
    assert found[:255].double().tolist() == [2.0 ** (each - 127) for each in range(255)] and found[255].isnan()
