"""Experts' matrices that stay in the few bits of their files: INT8, symmetric INT4 and MXFP4, bit for bit.

A stack has one format in all experts. Files hold each expert's parts apart, or all experts in one tensor; rows of gate
and up may lie woven, codes of 4 bits in any order. Rows and nibbles are put in our order, codes and scales stay.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compiled_kernels.expert_linear.packed import MX_GROUP, pack_pairs
from compiled_kernels.memory import empty_pages
from workbench.model.formats.checkpoint import Checkpoint, QuantizedMatrix
from workbench.model.formats.mapped import release
from workbench.model.formats.safetensors_files import FLOAT_DTYPES
from workbench.model.parameters import StoredParameter
from workbench.model.quantized import StoredDtype


@dataclass(frozen=True)
class KeptStack:
    """A stack's matrices, those of one expert after those of another, all of one format: `group` columns share a scale,
    0 where a row has one. `order` is the row in the file of each row here, where they differ."""

    kind: StoredDtype
    group: int
    shape: tuple[int, ...]
    parts: tuple[QuantizedMatrix, ...]
    order: Tensor | None

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Return codes and scales as products of ours store them (see compiled_kernels/expert_linear/packed.py)."""
        experts, out, columns = self.shape
        stored = (columns, torch.int8) if self.kind == "int8" else (columns // 2, torch.uint8)
        dtype = torch.float32 if not self.group else torch.uint8 if self.kind == "mxfp4" else torch.float16
        codes = empty_pages((experts * out, stored[0]), stored[1])
        scales = empty_pages((experts * out, columns // self.group if self.group else 1), dtype)
        start = 0
        for part in self.parts:
            rows = _codes(part)
            of_rows, end = _scales(part, len(rows)), start + len(rows)
            codes[start:end] = rows if self.order is None else rows[self.order]
            scales[start:end] = of_rows if self.order is None else of_rows[self.order]
            release(rows)
            start = end
        scales = scales.view(experts, out, -1) if self.group else scales.view(experts, out)
        return codes.view(experts, out, -1), scales


def kept_stack(parameter: StoredParameter, checkpoint: Checkpoint) -> KeptStack | str:
    """Return a stack as its files store it, or why no product multiplies from that: "" where it is dense there."""
    stored = [checkpoint.tensors[part.name] for part in parameter.parts]
    whole = stored[0].stacked() if len(stored) == 1 else None
    matrices = [tensor.quantized() for tensor in stored] if whole is None else list(whole)
    if all(matrix is None for matrix in matrices):
        packed = next((tensor.dtype for tensor in stored if tensor.dtype not in FLOAT_DTYPES), "")
        return packed and f"no product of experts multiplies from {packed}"
    found: list[QuantizedMatrix] = []
    for matrix in matrices:
        if matrix is None:
            return f"{parameter.parts[0].name} is stored beside experts that are dense"
        if problem := _problem(matrix, parameter.shape[-1]):
            return problem
        found.append(matrix)
    kinds = {_kind(matrix, parameter.shape[-1]) for matrix in found}
    if len(kinds) > 1:
        return f"{parameter.parts[0].name} and other experts have other bits or groups"
    order = None
    if whole is not None and (layout := parameter.parts[0].layout) is not None:
        rows = torch.arange(parameter.shape[1])
        order = layout.from_stored(rows.expand(1, 1, -1)).flatten()
        order = None if torch.equal(order, rows) else order
    return KeptStack(*kinds.pop(), parameter.shape, tuple(found), order)


def _problem(matrix: QuantizedMatrix, columns: int) -> str:
    """Return why no product of ours multiplies from an expert's matrix; "" where one does."""
    if matrix.kind == "fp8":
        return "no product of experts multiplies from FP8"
    if matrix.zeros is not None or matrix.minima is not None or matrix.group_index is not None:
        return "experts have codes with zeros, or columns in the order of activations"
    kind, group = _kind(matrix, columns)
    if columns % (group or 1) or (kind != "int8" and group % 2):
        return f"groups of {group} do not divide {columns} columns of an expert, or are odd"
    if kind == "mxfp4":
        exact = group == MX_GROUP and torch.equal(matrix.scales.to(torch.float8_e8m0fnu).float(), matrix.scales)
        return "" if exact else "scales of experts are no powers of two for 32 columns"
    exact = not group or torch.equal(matrix.scales.half().double(), matrix.scales.double())
    return "" if exact else "scales of experts are not exact in float16"


def _kind(matrix: QuantizedMatrix, columns: int) -> tuple[StoredDtype, int]:
    if matrix.kind == "int8":
        return "int8", 0 if matrix.group >= columns else matrix.group
    return ("mxfp4" if matrix.kind == "mxfp4" else "int4"), min(matrix.group, columns)


def _codes(matrix: QuantizedMatrix) -> Tensor:
    if matrix.kind == "int8":
        return matrix.codes()
    if matrix.pairs is not None:
        return matrix.pairs()
    codes = matrix.codes()
    return pack_pairs(codes if matrix.kind == "mxfp4" else (codes + 8).view(torch.uint8))


def _scales(matrix: QuantizedMatrix, rows: int) -> Tensor:
    if matrix.kind == "mxfp4":
        return matrix.scales.to(torch.float8_e8m0fnu).view(torch.uint8)
    return matrix.scales.repeat_interleave(min(matrix.rows, rows), 0)[:rows]
