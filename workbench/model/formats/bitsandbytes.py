"""Read bitsandbytes weights of 4 bits (NF4, FP4) and INT8 (`quant_method: bitsandbytes`).

4 bits: `weight` uint8 [n / 2, 1] is the flattened matrix, the higher nibble first; a nibble is an index of
`weight.quant_map` (16 numbers), times `weight.absmax` of its block of values. `weight.quant_state.bitsandbytes__nf4` is
JSON: blocksize, shape. Where absmax is quantized too, absmax = nested_quant_map[byte] * nested_absmax[i // 256] +
nested_offset. INT8: `weight` int8 [out, in] and `SCB` [out]: w = q * SCB / 127.

https://github.com/bitsandbytes-foundation/bitsandbytes: functional.py, `QuantState`, `dequantize_4bit`,
`int8_vectorwise_dequant`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from workbench.errors import WorkbenchError
from workbench.files import UnreadableText, read_json_object
from workbench.model.formats.checkpoint import QuantizedMatrix, StoredTensor
from workbench.model.formats.packed import Module, PackedTensor, Stored, modules, refuse_unconverted
from workbench.model.hf.fields import ConfigFields

STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
NESTED = ("weight.nested_absmax", "weight.nested_quant_map")
PARTS_4BIT = ("weight", "weight.absmax", "weight.quant_map", *NESTED, *STATES)
PARTS_8BIT = ("weight", "SCB", "weight_format")
INVERSE_127 = 7.874015718698502e-3  # 1 / 127, as the package multiplies
MAX_STATE_BYTES = 10_000


@dataclass(frozen=True)
class Bits4Tensor(StoredTensor):
    module: Module
    block: int
    nested: tuple[int, float] | None  # blocksize and offset of quantized absmax

    def read(self) -> Tensor:
        octets = self.module.read("weight").flatten()
        codes = torch.stack([octets >> 4, octets & 15], -1).flatten()[: math.prod(self.shape)]
        values = self.module.read("weight.quant_map").float()[codes.int()]
        factors = self._absmax().repeat_interleave(min(self.block, len(values)))[: len(values)]
        return (values * factors).view(self.shape)

    def _absmax(self) -> Tensor:
        stored = self.module.read("weight.absmax")
        if self.nested is None:
            return stored.float()
        size, offset = self.nested
        factors = self.module.read("weight.nested_absmax").repeat_interleave(min(size, len(stored)))[: len(stored)]
        return self.module.read("weight.nested_quant_map")[stored.int()] * factors + offset


@dataclass(frozen=True)
class Bits8Tensor(PackedTensor):
    def quantized(self) -> QuantizedMatrix:
        scales = self.parts["SCB"].read()[:, None] * INVERSE_127
        return QuantizedMatrix("int8", self.parts["weight"].read, scales, self.shape[1])

    def read(self) -> Tensor:
        return self.parts["weight"].read().float() * self.parts["SCB"].read()[:, None] * INVERSE_127


def bitsandbytes_tensors(config: ConfigFields, stored: Stored) -> tuple[dict[str, StoredTensor], str]:
    """Return the bitsandbytes matrices of a folder by name, and a description of the format. Raises WorkbenchError for
    unsupported variants, and if tensors disagree with the config.
    """
    four = config.boolean("load_in_4bit")
    if four == config.boolean("load_in_8bit"):
        raise WorkbenchError(f"{config.source}: one of load_in_4bit and load_in_8bit must be true")
    marks = ("weight.quant_map", PARTS_4BIT) if four else ("SCB", PARTS_8BIT)
    packed = modules(stored, *marks)
    refuse_unconverted(config, "llm_int8_skip_modules", packed)
    found: dict[str, StoredTensor] = {}
    for name, parts in packed.items():
        read = _four_bits if four else _eight_bits
        found[f"{name}.weight"] = read(Module(name, config, parts))
    kind = str(config.get("bnb_4bit_quant_type") or "fp4").upper()
    return found, f"bitsandbytes {kind if four else 'INT8'}"


def _eight_bits(module: Module) -> StoredTensor:
    shape = module.shape("weight", ("I8",))
    module.expect("SCB", ("F32",), shape[0])
    if "weight_format" in module.parts and int(module.read("weight_format").flatten()[0]) != 0:
        raise WorkbenchError(f"{module.file}: {module.name}.weight_format must be 0, row by row")
    file = Path(str(module.file))
    return Bits8Tensor(file, "I8", shape, module.nbytes, module.name, module.parts)


def _four_bits(module: Module) -> StoredTensor:
    kinds = [state for state in STATES if state in module.parts]
    if len(kinds) != 1:
        raise WorkbenchError(f"{module.file}: {module.name} must have one of {' and '.join(STATES)}")
    module.shape(kinds[0], ("U8",), 1)
    where = f"{module.file}: {module.name}.{kinds[0]}"
    if module.parts[kinds[0]].nbytes > MAX_STATE_BYTES:
        raise WorkbenchError(f"{where} has more than {MAX_STATE_BYTES:,} bytes")
    try:
        state = ConfigFields(read_json_object(bytes(module.read(kinds[0]).tolist()), where), where)
    except UnreadableText as error:
        raise WorkbenchError(str(error)) from None
    block, shape = state.integer("blocksize"), state.get("shape")
    if not (isinstance(shape, list) and len(shape) == 2 and all(type(size) is int and size > 0 for size in shape)):
        raise state.invalid("shape", shape, "two positive integers")
    rows, columns = shape
    stored, weight = -(-rows * columns // 2), module.parts["weight"]
    if weight.shape not in ((stored, 1), (1, stored)) or weight.dtype != "U8":
        given = f"{weight.dtype} {list(weight.shape)}"
        raise WorkbenchError(f"{module.file}: {module.name}.weight is {given}; {kinds[0]} asks for U8 [{stored}, 1]")
    blocks = -(-rows * columns // block)
    module.expect("weight.quant_map", ("F32",), 16)
    nested = None
    if "weight.nested_absmax" in module.parts:
        size = state.integer("nested_blocksize")
        offset = state.get("nested_offset")
        if isinstance(offset, bool) or not isinstance(offset, (int, float)):
            raise state.invalid("nested_offset", offset, "a number")
        nested = size, float(offset)
        module.expect("weight.absmax", ("U8",), blocks)
        module.expect("weight.nested_absmax", ("F32",), -(-blocks // size))
        module.expect("weight.nested_quant_map", ("F32",), 256)
    else:
        module.expect("weight.absmax", ("F32",), blocks)
    return Bits4Tensor(
        Path(str(module.file)), kinds[0][-3:].upper(), (rows, columns), module.nbytes, module, block, nested
    )
