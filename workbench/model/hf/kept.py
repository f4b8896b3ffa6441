"""Matrices that stay in the few bits of their files: those that a product of ours can multiply from, bit for bit.

A product has one format in all blocks, and one in the head (see model/quantized.py): int8 with a scale a row, or int4
with a scale in float16 for a group of columns. Experts have a format of their own (see kept_experts.py). What fits none
is widened, and a line says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from compiled_kernels.linear.quantize import pack_int4
from workbench.model.formats.checkpoint import Checkpoint, QuantizedMatrix
from workbench.model.formats.safetensors_files import FLOAT_DTYPES
from workbench.model.hf.kept_experts import KeptStack, kept_stack
from workbench.model.parameters import RowLayout, StoredParameter, StoredPart
from workbench.model.quantized import StoredDtype, WeightDtype, WeightFormat, is_expert_stack

Wanted = Mapping[str, StoredParameter]
ORDERED = "its columns are in the order of activations"


@dataclass(frozen=True)
class KeptMatrix:
    """A parameter's parts, all of one format: int8, or int4 in groups of `group` columns."""

    kind: WeightDtype
    group: int
    parts: tuple[tuple[StoredPart, QuantizedMatrix], ...]

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Return codes and scales as a product of ours stores them."""
        codes = torch.cat([_rows(part, matrix.codes()) for part, matrix in self.parts])
        scales = torch.cat([_rows(part, _scales(matrix, part)) for part, matrix in self.parts])
        if self.kind == "int8":
            return codes, scales[:, 0].float()
        return pack_int4(codes, self.group), scales.half()


def kept_matrix(parameter: StoredParameter, checkpoint: Checkpoint) -> KeptMatrix | str:
    """Return a parameter as its file stores it, or why no product multiplies from that: "" where it is dense there."""
    parts = [(part, checkpoint.tensors[part.name]) for part in parameter.parts]
    matrices = [(part, tensor.quantized()) for part, tensor in parts]
    if all(matrix is None for _, matrix in matrices):
        packed = next((tensor.dtype for _, tensor in parts if tensor.dtype not in FLOAT_DTYPES), "")
        return packed and f"no product multiplies from {packed}"
    found: list[tuple[StoredPart, QuantizedMatrix]] = []
    for part, matrix in matrices:
        if matrix is None or parameter.viewed_as is not None:
            return f"{part.name} is dense beside quantized ones" if matrix is None else f"{part.name} is no matrix"
        if problem := _problem(part, matrix):
            return problem
        found.append((part, matrix))
    kinds = {_kind(matrix) for _, matrix in found}
    if len(kinds) > 1:
        return f"{found[0][0].name} and {found[1][0].name} have other bits or groups"
    return KeptMatrix(*kinds.pop(), tuple(found))


def stored_format(checkpoint: Checkpoint, wanted: Wanted, tied: bool) -> tuple[WeightFormat, str]:
    """Return the format in which a checkpoint's matrices can stay, and why others are widened: "" where all stay, or
    all are dense.

    Args:
        checkpoint: the model on disk.
        wanted: its parameters.
        tied: the head is the embedding.
    """
    any_format = WeightFormat("int8", "int8")
    blocks: dict[tuple[WeightDtype, int], str] = {}
    head: tuple[WeightDtype, int] = ("dense", 0)
    experts: dict[tuple[StoredDtype, int], str] = {}
    reasons: list[str] = []
    for name, parameter in wanted.items():
        if is_expert_stack(name, len(parameter.shape)):
            stack = kept_stack(parameter, checkpoint)
            if isinstance(stack, str):
                reasons += [stack] if stack else []
            experts[("dense", 0) if isinstance(stack, str) else (stack.kind, stack.group)] = parameter.parts[0].name
            continue
        is_head = name == ("embedding.weight" if tied else "head.weight")
        if any_format.of(name, len(parameter.shape)) == "dense" and not is_head:
            if any(checkpoint.tensors[part.name].dtype not in FLOAT_DTYPES for part in parameter.parts):
                reasons.append(f"{parameter.parts[0].name} is no matrix of a product")
            continue
        kept = kept_matrix(parameter, checkpoint)
        if isinstance(kept, str):
            reasons += [kept] if kept else []
        found: tuple[WeightDtype, int] = ("dense", 0) if isinstance(kept, str) else (kept.kind, kept.group)
        if is_head:
            head = found
        else:
            blocks[found] = parameter.parts[0].name
    if len(blocks) > 1:
        reasons.append(f"matrices of the blocks differ: {' and '.join(list(blocks.values())[:2])}")
    kind, group = next(iter(blocks)) if len(blocks) == 1 else ("dense", 0)
    if head[0] == "int4" and kind == "int4" and head[1] != group:
        head = "dense", 0
        reasons.append("the head has other groups than the blocks")
    size = group or head[1] or WeightFormat.quant_group
    format = WeightFormat(kind, head[0], size)
    if len(experts) > 1:
        reasons.append(f"experts differ: {' and '.join(list(experts.values())[:2])}")
    if experts:
        of_experts, group = next(iter(experts)) if len(experts) == 1 else ("dense", 0)
        format = replace(format, experts=of_experts, expert_group=group)
    return format, reasons[0] if reasons else ""


def kept_matrices(
    checkpoint: Checkpoint, wanted: Wanted, tied: bool, format: WeightFormat
) -> dict[str, KeptMatrix | KeptStack]:
    """Return the parameters that the files store exactly as `format` does, by our names."""
    found: dict[str, KeptMatrix | KeptStack] = {}
    for name, parameter in wanted.items():
        ours, axes = "head.weight" if tied and name == "embedding.weight" else name, len(parameter.shape)
        kind = format.of(ours, axes)
        if kind == "dense":
            continue
        if is_expert_stack(name, axes):
            stack = kept_stack(parameter, checkpoint)
            if isinstance(stack, KeptStack) and (stack.kind, stack.group) == (kind, format.group_of(name, axes)):
                found[name] = stack
            continue
        kept = kept_matrix(parameter, checkpoint)
        if isinstance(kept, KeptMatrix) and kept.kind == kind and (kind == "int8" or kept.group == format.quant_group):
            found[name] = kept
    return found


def cost_of_widening(
    checkpoint: Checkpoint, wanted: Wanted, tied: bool, format: WeightFormat, dtype: torch.dtype
) -> str:
    """Return what is said of tensors that are quantized in the files and dense in memory; "" where there are none."""
    kept = kept_matrices(checkpoint, wanted, tied, format)
    parts = [part for name, parameter in wanted.items() if name not in kept for part in parameter.parts]
    packed = [tensor for part in parts if (tensor := checkpoint.tensors[part.name]).dtype not in FLOAT_DTYPES]
    if not packed:
        return ""
    files = sum(tensor.nbytes for tensor in packed) / 1e6
    memory = sum(math.prod(tensor.shape) for tensor in packed) * dtype.itemsize / 1e6
    all_packed = len(packed) + sum(len(matrix.parts) for matrix in kept.values())
    widened = f"{checkpoint.format}, {len(packed)} of {all_packed} quantized tensors are widened"
    widened += f" to {str(dtype).removeprefix('torch.')}"
    if format.blocks != "dense" and not kept:
        widened += f" and quantized again as {format.blocks}"
    return f"{widened}, {memory:,.1f} MB for {files:,.1f} MB in the files"


def _problem(part: StoredPart, matrix: QuantizedMatrix) -> str:
    """Return why no product of ours multiplies from a matrix; "" where one does."""
    if matrix.kind in ("fp8", "mxfp4"):
        return f"no product multiplies from {matrix.kind.upper()}"
    if matrix.zeros is not None:
        return "no product multiplies from codes with zeros"
    if matrix.group_index is not None:
        return ORDERED
    if part.layout is not None and not (isinstance(part.layout, RowLayout) and not part.layout.transposed):
        return f"{part.name} is stored in another order"
    columns = part.shape[1]
    if matrix.kind == "int8":
        return "" if matrix.group >= columns else f"INT8 with a scale for {matrix.group} columns has no product"
    if matrix.group % 2 or columns % matrix.group:
        return f"groups of {matrix.group} do not divide {columns} columns, or are odd"
    exact = torch.equal(matrix.scales.half().double(), matrix.scales.double())
    return "" if exact else "scales are not exact in float16"


def _kind(matrix: QuantizedMatrix) -> tuple[WeightDtype, int]:
    return ("int8", 0) if matrix.kind == "int8" else ("int4", matrix.group)


def _rows(part: StoredPart, tensor: Tensor) -> Tensor:
    return tensor if part.layout is None else part.layout.from_stored(tensor)


def _scales(matrix: QuantizedMatrix, part: StoredPart) -> Tensor:
    return matrix.scales.repeat_interleave(min(matrix.rows, part.shape[0]), 0)[: part.shape[0]]
