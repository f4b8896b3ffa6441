"""Read weights in the format of llm-compressor (`quant_method: compressed-tensors`): integers, FP8 and MXFP4.

Tensors of a matrix [out, in], by `format`:

- pack-quantized: `weight_packed` int32 [out, in * bits / 32], the lowest bits first, codes + 2^(bits - 1);
  `weight_scale` [out, group]; `weight_shape`; with zeros `weight_zero_point` int32 [out * bits / 32, group], packed
  along rows.
- int-quantized, naive-quantized: `weight` int8 [out, in], `weight_scale` [out, group].
- float-quantized, naive-quantized: `weight` F8_E4M3, `weight_scale` [out, 1] or by block [out / 128, in / 128].
- mxfp4-pack-quantized: `weight_packed` uint8 [out, in / 2], the lower nibble first, `weight_scale` uint8
  [out, in / 32]: 2^(scale - 127).

Each of the `config_groups` is a scheme with its matrices, listed by name, by regular expression (`re:`) or as the class
Linear; `ignore` lists dense matrices. Schemes for activations are ignored: activations stay in the model's type.

https://github.com/vllm-project/compressed-tensors: compressors/*/base.py, quantization/quant_config.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from workbench.errors import WorkbenchError
from workbench.model.formats.checkpoint import QuantizedKind, QuantizedMatrix, StoredTensor
from workbench.model.formats.fp8 import FP8Tensor
from workbench.model.formats.mxfp4 import BLOCK
from workbench.model.formats.packed import FLOATS, Module, PackedTensor, Stored, modules, unpack_bits
from workbench.model.hf.fields import ConfigFields

PACKED, INTEGERS, FP8, NAIVE, MXFP4 = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mxfp4-pack-quantized"
)  # fmt: skip
FORMATS = (PACKED, INTEGERS, FP8, NAIVE, MXFP4)
DENSE = ("dense", None)
STRATEGIES = ("tensor", "channel", "group", "block")
ACTIVATION_PARTS = ("input_scale", "input_zero_point", "input_global_scale", "output_scale")
PARTS = ("weight_packed", "weight", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")
KINDS: dict[int, QuantizedKind] = {2: "int2", 3: "int3", 4: "int4", 8: "int8"}


@dataclass(frozen=True)
class _Scheme:
    """One of `config_groups`."""

    config: ConfigFields
    format: str
    targets: tuple[str, ...]
    bits: int
    kind: str  # int or float
    strategy: str
    group: int | None
    block: tuple[int, int] | None
    symmetric: bool

    def scale_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        if self.strategy == "group":
            return rows, -(-columns // (self.group or columns))
        if self.block is not None:
            return -(-rows // self.block[0]), -(-columns // self.block[1])
        return (rows, 1) if self.strategy == "channel" else (1,)


@dataclass(frozen=True)
class CompressedIntegers(PackedTensor):
    """A matrix in the format pack-quantized or int-quantized."""

    bits: int
    group: int
    rows: int

    def quantized(self) -> QuantizedMatrix:
        rows, columns = self.shape
        scales = self.parts["weight_scale"].read()
        scales = scales if scales.ndim == 2 else scales.reshape(-1, 1)
        zeros = self.parts.get("weight_zero_point")
        index = self.parts["weight_g_idx"].read() if "weight_g_idx" in self.parts else None
        half = 1 << (self.bits - 1)

        def codes() -> Any:
            if "weight" in self.parts:
                return self.parts["weight"].read()
            return (unpack_bits(self.parts["weight_packed"].read(), self.bits, columns) - half).view(torch.int8)

        values = None
        if zeros is not None:
            values = zeros.read()
            if values.dtype == torch.int32:
                values = (unpack_bits(values.T, self.bits, rows).T - half).view(torch.int8)
            values = values.reshape(scales.shape) if values.any() else None
        return QuantizedMatrix(
            KINDS[self.bits],
            codes,
            scales,
            self.group,
            self.rows,
            zeros=values,
            group_index=index,
        )


@dataclass(frozen=True)
class CompressedMXFP4(PackedTensor):
    """A matrix in the format mxfp4-pack-quantized."""

    def quantized(self) -> QuantizedMatrix:
        packed = self.parts["weight_packed"]
        return QuantizedMatrix(
            "mxfp4",
            lambda: unpack_bits(packed.read(), 4, self.shape[1]),
            self.parts["weight_scale"].read().view(torch.float8_e8m0fnu).float(),
            BLOCK,
        )


def compressed_tensors(config: ConfigFields, stored: Stored) -> tuple[dict[str, StoredTensor], str]:
    """Return the compressed matrices of a folder under their dense names, and a description of the format. Raises
    WorkbenchError for unsupported formats, and if tensors disagree with the config.
    """
    for key in ("sparsity_config", "kv_cache_scheme", "transform_config"):
        section = config.get(key)
        if section and not (isinstance(section, dict) and section.get("format") in DENSE and key == "sparsity_config"):
            raise config.invalid(key, section, "null: this section is not supported")
    schemes = _schemes(config)
    ignored = _names(config, "ignore")
    found: dict[str, StoredTensor] = {}
    packed = modules(stored, "weight_scale", (*PARTS, *ACTIVATION_PARTS))
    for name, parts in packed.items():
        if wrong := next((pattern for pattern in ignored if _matches(pattern, name)), None):
            raise WorkbenchError(f"{config.source}: ignore has {wrong!r}, yet the weights of {name} are compressed")
        scheme = _scheme_of(name, schemes)
        if scheme is None:
            raise WorkbenchError(f"{config.source}: {name} is compressed, but no target of config_groups matches")
        found[f"{name}.weight"] = _matrix(name, parts, scheme)
    kinds = dict.fromkeys(_words(scheme) for scheme in schemes)
    return found, f"compressed-tensors {', '.join(kinds)}"


def _matrix(name: str, parts: dict[str, StoredTensor], scheme: _Scheme) -> StoredTensor:
    module = Module(name, scheme.config, {part: each for part, each in parts.items() if part not in ACTIVATION_PARTS})
    zeros = () if scheme.symmetric else ("weight_zero_point",)
    file, made = Path(str(module.file)), (name, module.parts)
    if scheme.format == MXFP4:
        module.only("weight_packed", "weight_scale")
        rows, half = module.shape("weight_packed", ("U8",))
        module.expect("weight_scale", ("U8", "F8_E8M0"), rows, -(-2 * half // BLOCK))
        return CompressedMXFP4(file, "MXFP4", (rows, 2 * half), module.nbytes, *made)
    if scheme.format == PACKED:
        module.only("weight_packed", "weight_scale", "weight_shape", "weight_g_idx", *zeros)
        rows, words = module.shape("weight_packed", ("I32",))
        module.expect("weight_shape", ("I64", "I32"), 2)
        shape = tuple(int(size) for size in module.read("weight_shape"))
        if shape[0] != rows or shape[1] < 1 or -(-shape[1] * scheme.bits // 32) != words:
            raise WorkbenchError(
                f"{file}: {name}.weight_shape is {list(shape)}, but words are {[rows, words]} of {scheme.bits} bits"
            )
    else:
        module.only("weight", "weight_scale", *zeros)
        shape = module.shape("weight", ("I8",) if scheme.kind == "int" else ("F8_E4M3",))
    scales = scheme.scale_shape(*shape)
    # A scale for the whole is stored as [1], as [1, 1], or without axes.
    given = len(parts["weight_scale"].shape)
    module.expect("weight_scale", FLOATS, *((1,) * given if scales == (1,) else scales))
    rows, columns = scheme.block or (shape[0] if scheme.strategy == "tensor" else 1, scheme.group or shape[1])
    if scheme.kind == "float":
        return FP8Tensor(file, "F8_E4M3", shape, module.nbytes, *made, "weight_scale", (rows, columns))
    if zeros and module.parts.get("weight_zero_point", parts["weight_scale"]).dtype == "I32":
        module.expect("weight_zero_point", ("I32",), -(-shape[0] * scheme.bits // 32), *scales[1:])
    elif zeros:
        module.expect("weight_zero_point", ("I8",), *scales)
    if "weight_g_idx" in module.parts:
        module.expect("weight_g_idx", ("I32",), shape[1])
        index = module.read("weight_g_idx")
        if int(index.min()) < 0 or int(index.max()) >= scales[-1]:
            raise WorkbenchError(f"{file}: {name}.weight_g_idx must lie in 0..{scales[-1] - 1}")
    return CompressedIntegers(file, f"I{scheme.bits}", shape, module.nbytes, *made, scheme.bits, columns, rows)


def _schemes(config: ConfigFields) -> list[_Scheme]:
    groups = config.nested("config_groups")
    if groups is None:
        raise config.invalid("config_groups", None, "an object of schemes")
    found = []
    for key in groups.values:
        scheme = groups.nested(key)
        if scheme is None or (weights := scheme.nested("weights")) is None:
            continue  # a scheme for activations only
        format = scheme.get("format") or config.get("format")
        if format not in FORMATS:
            raise (scheme if scheme.get("format") else config).invalid("format", format, f"one of {', '.join(FORMATS)}")
        found.append(_scheme(format, scheme, weights))
    return found


def _scheme(format: str, scheme: ConfigFields, weights: ConfigFields) -> _Scheme:
    kind, bits, strategy = weights.get("type") or "int", weights.integer("num_bits"), weights.get("strategy")
    group, block = weights.get("group_size"), weights.get("block_structure")
    strategy = strategy or ("group" if group not in (None, -1) else "channel" if group == -1 else "tensor")
    right = {PACKED: ("int", tuple(KINDS)), INTEGERS: ("int", (8,)), FP8: ("float", (8,)), MXFP4: ("float", (4,))}
    kinds, known = right.get(format, (kind, (8,)))
    if kind != kinds or kind not in ("int", "float"):
        raise weights.invalid("type", kind, f"{kinds} in {format}")
    if bits not in known:
        raise weights.invalid("num_bits", bits, f"{' or '.join(map(str, known))} in {format}")
    if strategy not in STRATEGIES:
        raise weights.invalid("strategy", strategy, f"one of {', '.join(STRATEGIES)}")
    if strategy == "group":
        group = weights.integer("group_size")
        if format == MXFP4 and group != BLOCK:
            raise weights.invalid("group_size", group, str(BLOCK))
    if strategy == "block":
        if isinstance(block, str) and re.fullmatch(r"\d+x\d+", block):
            block = [int(size) for size in block.split("x")]
        if not (isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)):
            raise weights.invalid("block_structure", block, "two positive integers")
    return _Scheme(
        weights, format, _names(scheme, "targets"), bits, kind, strategy, group if strategy == "group" else None,
        (block[0], block[1]) if strategy == "block" else None, weights.boolean("symmetric", default=True),
    )  # fmt: skip


def _names(config: ConfigFields, key: str) -> tuple[str, ...]:
    names = config.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise config.invalid(key, names, "a list of names")
    for name in names:
        if name.startswith("re:"):
            try:
                re.compile(name[3:])
            except re.error as error:
                raise config.invalid(key, name, f"a regular expression after re: ({error})") from None
    return tuple(names)


def _matches(pattern: str, name: str) -> bool:
    return bool(re.match(pattern[3:], name)) if pattern.startswith("re:") else pattern == name


def _scheme_of(name: str, schemes: list[_Scheme]) -> _Scheme | None:
    """Return the scheme with a target that equals the module's name, matches it, or is its class."""
    for rank in (lambda target: target == name, lambda target: _matches(target, name), lambda t: t == "Linear"):
        for scheme in schemes:
            if any(map(rank, scheme.targets)):
                return scheme
    return None


def _words(scheme: _Scheme) -> str:
    if scheme.format == MXFP4:
        return "MXFP4"
    size = f" in groups of {scheme.group}" if scheme.group else ""
    size = f" in blocks of {scheme.block[0]}x{scheme.block[1]}" if scheme.block else size
    return f"{'FP8' if scheme.kind == 'float' else f'INT{scheme.bits}'}{size}"
