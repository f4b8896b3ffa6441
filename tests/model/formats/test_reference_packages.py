"""Unpacking equals the packages that define the formats, bit for bit, on random bytes, where they are installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.model.formats.folders import read_packed, same, write_gpt_oss
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


def test_experts_of_gpt_oss_are_the_dense_ones(tmp_path: Path) -> None:
    module = pytest.importorskip("transformers.integrations.mxfp4", reason="pip install 'transformers>=5'")

    def widen(blocks: Tensor, scales: Tensor) -> Tensor:
        blocks = blocks.unflatten(2, (-1, 16))
        return module.convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)

    dense = write_gpt_oss(tmp_path / "m", widen)
    spec = read_spec(tmp_path / "m")
    assert same(*(load_weights(folder, spec, torch.float32) for folder in (tmp_path / "m", dense)))
