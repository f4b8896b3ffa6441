"""Matrices that stay in the few bits of their files: those that a product of ours can multiply from, bit for bit.

The blocks' products have one format, and the head's one (see model/quantized.py). Matrices of other groups, types of
scales, or without zeros beside others with them, come under one format where that loses nothing: a scale for 128
columns is two for 64, and a code without a zero has a minimum too. Experts have a format of their own (see
kept_experts.py). What fits none is widened, and a line says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from compiled_kernels.linear.matrix_format import DENSE_MATRIX, SCALE_DTYPES, MatrixFormat
from compiled_kernels.linear.planes import pack_planes
from workbench.errors import WorkbenchError
from workbench.model.formats.checkpoint import Checkpoint, QuantizedMatrix
from workbench.model.formats.safetensors_files import FLOAT_DTYPES
from workbench.model.hf.kept_experts import KeptStack, kept_stack
from workbench.model.parameters import RowLayout, StoredParameter, StoredPart
from workbench.model.quantized import DENSE_MATRICES, StoredDtype, WeightFormat, is_expert_stack

Wanted = Mapping[str, StoredParameter]
ORDERED = "its columns are in the order of activations"
MAX_GROUP, MIN_GROUP = 128, 16  # columns: of a group that a kernel walks at once, and of one that others are split into


@dataclass(frozen=True)
class KeptPart:
    """A part of a parameter, its matrix, and the file that holds it."""

    part: StoredPart
    matrix: QuantizedMatrix
    file: Path

    def tensors(self, format: MatrixFormat) -> tuple[Tensor, ...]:
        """Return codes, scales and minima in a format that holds them exactly."""
        matrix, (rows, columns) = self.matrix, self.part.shape
        codes, offset = matrix.codes(), 8 if matrix.minima is None else 0
        if format.codes == "fp8":
            codes = codes.view(torch.uint8)
            if bool(((codes & 127) == 127).any()):
                raise WorkbenchError(f"{self.file}: {self.part.name} holds NaN; fetch the file again")
        starts = torch.arange(format.num_groups(columns)) * format.group
        by_row = torch.arange(rows) // min(matrix.rows, rows)

        def spread(each: Tensor) -> Tensor:
            return each.float()[by_row][:, starts // min(matrix.group, columns)]

        found = [codes, spread(matrix.scales)]
        if format.minima is not None:
            zeros = 0.0 if matrix.zeros is None else spread(matrix.zeros)
            of_zero = zeros + (offset if format.codes == "int4" else 0)
            found.append(-of_zero * found[1] if matrix.minima is None else spread(matrix.minima))
        layout = self.part.layout
        codes, *others = (each if layout is None else layout.from_stored(each) for each in found)
        codes = pack_planes(codes + offset, (4,)) if format.codes == "int4" else codes
        others = [others[0][:, 0]] if format.scales_rows else others
        dtypes = (format.scales, format.minima or format.scales)
        return codes, *(each.to(dtype) for each, dtype in zip(others, dtypes, strict=False))


@dataclass(frozen=True)
class KeptMatrix:
    """A parameter's parts, and a format that holds them exactly."""

    format: MatrixFormat
    parts: tuple[KeptPart, ...]

    def tensors(self) -> tuple[Tensor, ...]:
        """Return codes, scales and minima as a product of ours stores them."""
        parts = [part.tensors(self.format) for part in self.parts]
        codes, *others = (torch.cat(each) for each in zip(*parts, strict=True))
        return codes.view(torch.float8_e4m3fn) if self.format.codes == "fp8" else codes, *others


def kept_matrix(parameter: StoredParameter, checkpoint: Checkpoint) -> KeptMatrix | str:
    """Return a parameter as its file stores it, or why no product multiplies from that: "" where it is dense there.

    Its scales are read once: the checkpoint remembers them.
    """
    if parameter not in checkpoint.kept:
        checkpoint.kept[parameter] = _kept_matrix(parameter, checkpoint)
    return checkpoint.kept[parameter]


def _kept_matrix(parameter: StoredParameter, checkpoint: Checkpoint) -> KeptMatrix | str:
    parts = [(part, checkpoint.tensors[part.name]) for part in parameter.parts]
    matrices = [(part, tensor.quantized(), tensor.file) for part, tensor in parts]
    if all(matrix is None for _, matrix, _ in matrices):
        packed = next((tensor.dtype for _, tensor in parts if tensor.dtype not in FLOAT_DTYPES), "")
        return packed and f"no product multiplies from {packed}"
    found: list[KeptPart] = []
    common: MatrixFormat | str = DENSE_MATRIX
    for part, matrix, file in matrices:
        if matrix is None or parameter.viewed_as is not None:
            return f"{part.name} is dense beside quantized ones" if matrix is None else f"{part.name} is no matrix"
        own = _format_of(KeptPart(part, matrix, file))
        if isinstance(own, str):
            return own
        joined = own if not found else common_format(common, own)
        if joined is None:
            return f"{found[0].part.name} and {part.name} have other bits or groups"
        common = joined
        found.append(KeptPart(part, matrix, file))
    return KeptMatrix(common, tuple(found))


def stored_format(checkpoint: Checkpoint, wanted: Wanted, tied: bool) -> tuple[WeightFormat, str]:
    """Return the format in which a checkpoint's matrices can stay, and why others are widened: "" where all stay, or
    all are dense.

    Args:
        checkpoint: the model on disk.
        wanted: its parameters.
        tied: the head is the embedding.
    """
    blocks: dict[MatrixFormat, str] = {}
    head = DENSE_MATRIX
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
        if (len(parameter.shape) != 2 or name.endswith(DENSE_MATRICES)) and not is_head:
            if any(checkpoint.tensors[part.name].dtype not in FLOAT_DTYPES for part in parameter.parts):
                reasons.append(f"{parameter.parts[0].name} is no matrix of a product")
            continue
        kept = kept_matrix(parameter, checkpoint)
        if isinstance(kept, str):
            reasons += [kept] if kept else []
        found = DENSE_MATRIX if isinstance(kept, str) else kept.format
        if is_head:
            head = found
        else:
            blocks.setdefault(found, parameter.parts[0].name)
    common: MatrixFormat | None = next(iter(blocks), DENSE_MATRIX)
    for each in blocks:
        common = common and common_format(common, each)
    if common is None:
        reasons.append(f"matrices of the blocks differ: {' and '.join(list(blocks.values())[:2])}")
    format = WeightFormat(common or DENSE_MATRIX, head)
    if len(experts) > 1:
        reasons.append(f"experts differ: {' and '.join(list(experts.values())[:2])}")
    if experts:
        of_experts, group = next(iter(experts)) if len(experts) == 1 else ("dense", 0)
        format = replace(format, experts=of_experts, expert_group=group)
    return format, reasons[0] if reasons else ""


def kept_matrices(
    checkpoint: Checkpoint, wanted: Wanted, tied: bool, format: WeightFormat
) -> dict[str, KeptMatrix | KeptStack]:
    """Return the parameters whose codes `format` holds exactly, in that format, by our names."""
    found: dict[str, KeptMatrix | KeptStack] = {}
    for name, parameter in wanted.items():
        ours, axes = "head.weight" if tied and name == "embedding.weight" else name, len(parameter.shape)
        if format.is_dense(ours, axes):
            continue
        if is_expert_stack(name, axes):
            stack = kept_stack(parameter, checkpoint)
            own = format.expert_dtype, format.columns_per_expert_scale
            if isinstance(stack, KeptStack) and (stack.kind, stack.group) == own:
                found[name] = stack
            continue
        kept, kind = kept_matrix(parameter, checkpoint), format.of(ours, axes)
        if isinstance(kept, KeptMatrix) and common_format(kept.format, kind) == kind:
            found[name] = replace(kept, format=kind)
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
    if not format.blocks.is_dense and not kept:
        widened += f" and quantized again as {format.blocks.codes}"
    return f"{widened}, {memory:,.1f} MB for {files:,.1f} MB in the files"


def _format_of(kept: KeptPart) -> MatrixFormat | str:
    """Return the format that holds a matrix exactly, or why no product of ours multiplies from it."""
    part, matrix, columns = kept.part, kept.matrix, kept.part.shape[1]
    if not bool(matrix.scales.float().isfinite().all()):
        raise WorkbenchError(f"{kept.file}: {part.name} has scales that are not finite; fetch the file again")
    if matrix.kind == "mxfp4":
        return "no product multiplies from MXFP4"
    if matrix.group_index is not None:
        return ORDERED
    if part.layout is not None and not (isinstance(part.layout, RowLayout) and not part.layout.transposed):
        return f"{part.name} is stored in another order"
    codes = matrix.kind if matrix.kind in ("int8", "fp8") else "int4"
    with_minima = matrix.zeros is not None or matrix.minima is not None
    scales = _exact_dtype(matrix.scales)
    if matrix.zeros is not None and scales == torch.float32:
        return "scales of float32 beside zeros are not exact"
    group = min(matrix.group, columns)
    if group == columns and codes != "int4" and not with_minima:
        return MatrixFormat(codes)
    if codes == "int4" and (group % 8 or columns % group):
        return f"groups of {group} do not divide {columns} columns, or are no multiple of 8"
    minima = _exact_dtype(matrix.minima) if matrix.minima is not None else torch.float32 if with_minima else None
    return MatrixFormat(codes, _walked(group), scales, minima)


def _walked(group: int) -> int:
    """Return the columns of the groups into which one of `group` columns is split, if it is."""
    while group > MAX_GROUP and group % 16 == 0:
        group //= 2
    return group


def _exact_dtype(values: Tensor) -> torch.dtype:
    """Return the first type of SCALE_DTYPES that holds these numbers exactly."""
    return next(dtype for dtype in SCALE_DTYPES if torch.equal(values.to(dtype).double(), values.double()))


def common_format(one: MatrixFormat, other: MatrixFormat) -> MatrixFormat | None:
    """Return the smallest format that holds matrices of both exactly; None where there is none."""
    if one == other:
        return one
    if one.codes != other.codes or one.is_dense:
        return None
    group = math.gcd(one.group, other.group)
    if group < min(MIN_GROUP, max(one.group, other.group)):
        return None
    scales = one.scales if one.scales == other.scales else torch.float32
    minima = one.minima if one.minima == other.minima else torch.float32
    return MatrixFormat(one.codes, group, scales, minima)
