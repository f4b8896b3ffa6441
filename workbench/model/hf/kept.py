"""Matrices that stay in the few bits of their files: those that a product of ours can multiply from, bit for bit.

Each matrix has its own format (see model/quantized.py), and so have the parts of a fused one. Experts have a format of
their own (see kept_experts.py). What no product multiplies from is widened, and a line says which, why, and what it
costs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from compiled_kernels.linear.matrix_format import DENSE_MATRIX, SCALE_DTYPES, MatrixFormat
from compiled_kernels.linear.planes import pack_planes
from compiled_kernels.memory import empty_pages
from workbench.errors import WorkbenchError
from workbench.model.formats.checkpoint import Checkpoint, QuantizedMatrix, StoredTensor
from workbench.model.formats.safetensors_files import FLOAT_DTYPES
from workbench.model.hf.kept_experts import KeptStack, kept_stack
from workbench.model.parameters import RowLayout, StoredParameter, StoredPart
from workbench.model.quantized import DENSE_MATRICES, Rows, StoredDtype, WeightFormat, is_expert_stack

Wanted = Mapping[str, StoredParameter]
Refuses = Callable[[MatrixFormat], str | None]  # why no product multiplies from a format; None where one does
ORDERED = "its columns are in the order of activations"
MAX_GROUP = 128  # columns of a group that a kernel walks at once; larger ones are split


@dataclass(frozen=True)
class KeptPart:
    """A part of a parameter: its stored tensor, a format that holds it exactly, and why that is dense, where the file
    has fewer bits. `matrix` has its codes, where the format is not in words."""

    part: StoredPart
    tensor: StoredTensor
    format: MatrixFormat
    reason: str = ""
    matrix: QuantizedMatrix | None = None

    def fill(self, format: MatrixFormat, stored: list[Tensor]) -> None:
        """Write codes, scales and minima in a format that holds them exactly to these rows."""
        layout = self.part.layout
        if self.matrix is None and layout is None:
            self.tensor.fill_words(stored)
        else:
            read = [torch.empty_like(each) for each in stored] if self.matrix is None else [*self._codes(format)]
            if self.matrix is None:
                self.tensor.fill_words(read)
            for out, each in zip(stored, read, strict=True):
                octets = each.view(torch.uint8) if each.dtype == torch.float8_e4m3fn else each
                out.view(octets.dtype).copy_(octets if layout is None else layout.from_stored(octets))
        if self.matrix is None and not bool(stored[1].isfinite().all()):
            raise not_finite(self.part, self.tensor)

    def _codes(self, format: MatrixFormat) -> Iterator[Tensor]:
        """Yield codes, scales and minima in the file's order of rows."""
        matrix, (rows, columns) = self.matrix, self.part.shape
        assert matrix is not None
        codes, offset = matrix.codes(), 8 if matrix.minima is None else 0
        if format.codes == "fp8" and bool(((codes.view(torch.uint8) & 127) == 127).any()):
            raise WorkbenchError(f"{self.tensor.file}: {self.part.name} holds NaN; fetch the file again")
        starts = torch.arange(format.num_groups(columns)) * format.group
        by_row = torch.arange(rows) // min(matrix.rows, rows)

        def spread(each: Tensor) -> Tensor:
            return each.float()[by_row][:, starts // min(matrix.group, columns)]

        yield pack_planes(codes + offset, (4,)) if format.codes == "int4" else codes
        scales = spread(matrix.scales)
        yield (scales[:, 0] if format.scales_rows else scales).to(format.scales)
        if format.minima is not None:
            zeros = 0.0 if matrix.zeros is None else spread(matrix.zeros)
            of_zero = zeros + (offset if format.codes == "int4" else 0)
            yield (-of_zero * scales if matrix.minima is None else spread(matrix.minima)).to(format.minima)


@dataclass(frozen=True)
class KeptRun:
    """Parts of a parameter, one below the other, in one format that holds them exactly."""

    format: MatrixFormat
    parts: tuple[KeptPart, ...]

    @property
    def rows(self) -> int:
        return sum(part.part.shape_here[0] for part in self.parts)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return codes, scales and minima as a product of ours stores them."""
        shape = self.rows, self.parts[0].part.shape_here[1]
        stored = [empty_pages(*each) for each in self.format.storage(*shape).values()]
        start = 0
        for part in self.parts:
            end = start + part.part.shape_here[0]
            part.fill(self.format, [each[start:end] for each in stored])
            start = end
        return tuple(stored)


@dataclass(frozen=True)
class KeptMatrix:
    """A parameter in runs of rows, each in the bits of its file, or dense."""

    runs: tuple[KeptRun, ...]

    @property
    def rows(self) -> Rows:
        return tuple((run.rows, run.format) for run in self.runs)

    @property
    def is_dense(self) -> bool:
        return all(run.format.is_dense for run in self.runs)

    @property
    def parts(self) -> tuple[KeptPart, ...]:
        return tuple(part for run in self.runs for part in run.parts)

    def held_as(self, rows: Rows) -> KeptMatrix | None:
        """Return the same matrix in formats that hold it exactly; None where these do not."""
        if len(rows) != len(self.runs):
            return None
        runs = [replace(run, format=format) for run, (_, format) in zip(self.runs, rows, strict=True)]
        hold = all(_holds(run.format, own.format) for run, own in zip(runs, self.runs, strict=True))
        return KeptMatrix(tuple(runs)) if hold else None


def no_refusal(format: MatrixFormat) -> str | None:
    """Refuse no format."""


def kept_matrix(
    parameter: StoredParameter, checkpoint: Checkpoint, refuses: Refuses = no_refusal, one_format: str | None = None
) -> KeptMatrix:
    """Return a parameter as its file stores it, as far as a product multiplies from that; dense where it has several
    formats, and `one_format` is why it may not."""
    parts = [_kept_part(part, checkpoint, refuses) for part in parameter.parts]
    if parameter.viewed_as is not None:
        parts = [replace(each, format=DENSE_MATRIX, reason=_packed(each.tensor) and NO_MATRIX) for each in parts]
    runs: list[KeptRun] = []
    for part in parts:
        together = joined(runs[-1].format, part.format) if runs else None
        if together is None:
            runs.append(KeptRun(part.format, (part,)))
        else:
            runs[-1] = KeptRun(together, (*runs[-1].parts, part))
    if one_format is not None and len(runs) > 1:
        dense = (replace(each, format=DENSE_MATRIX, reason=each.reason or one_format) for each in parts)
        runs = [KeptRun(DENSE_MATRIX, tuple(dense))]
    return KeptMatrix(tuple(runs))


NO_MATRIX = "it is no matrix of a product"


def not_finite(part: StoredPart, tensor: StoredTensor) -> WorkbenchError:
    """Return the error of scales that are infinite or no numbers."""
    return WorkbenchError(f"{tensor.file}: {part.name} has scales that are not finite; fetch the file again")


def _packed(tensor: StoredTensor) -> str:
    """Return the type of a tensor that its file stores in few bits; "" of others."""
    return "" if tensor.dtype in FLOAT_DTYPES else tensor.dtype


def _kept_part(part: StoredPart, checkpoint: Checkpoint, refuses: Refuses) -> KeptPart:
    """Return a part in the first of its formats that is not refused: in words, then in groups, then dense."""
    tensor = checkpoint.tensors[part.name]
    ordered = part.layout is not None and not (isinstance(part.layout, RowLayout) and not part.layout.transposed)
    words, reason = tensor.words_format(), f"no product multiplies from {tensor.dtype}" if _packed(tensor) else ""
    if words is not None and not ordered:
        if (problem := refuses(words)) is None:
            return KeptPart(part, tensor, words)
        reason = problem
    if part not in checkpoint.kept:  # its scales are read once
        matrix = tensor.quantized()
        found = "it is stored in another order" if ordered or matrix is None else _format_of(part, matrix, tensor)
        checkpoint.kept[part] = matrix, found
    matrix, format = checkpoint.kept[part]
    if matrix is None:
        return KeptPart(part, tensor, DENSE_MATRIX, reason)
    if isinstance(format, str):
        return KeptPart(part, tensor, DENSE_MATRIX, format)
    if (problem := refuses(format)) is not None:
        return KeptPart(part, tensor, DENSE_MATRIX, problem)
    return KeptPart(part, tensor, format, matrix=matrix)


def stored_format(
    checkpoint: Checkpoint, wanted: Wanted, tied: bool, refuses: Refuses = no_refusal, one_format: str | None = None
) -> tuple[WeightFormat, dict[str, str]]:
    """Return the format in which each matrix of a checkpoint can stay, and why others are widened, by stored tensor.

    Args:
        checkpoint: the model on disk.
        wanted: its parameters.
        tied: the head is the embedding.
        refuses: why no product of the backend multiplies from a format.
        one_format: why parts of a fused matrix may not differ; None where they may.
    """
    rows: dict[str, Rows] = {}
    head = DENSE_MATRIX
    experts: dict[tuple[StoredDtype, int], str] = {}
    reasons: dict[str, str] = {}
    for name, parameter in wanted.items():
        packed = [part.name for part in parameter.parts if _packed(checkpoint.tensors[part.name])]
        if is_expert_stack(name, len(parameter.shape)):
            stack = kept_stack(parameter, checkpoint)
            if isinstance(stack, str):
                reasons |= dict.fromkeys(packed, stack)
            experts[("dense", 0) if isinstance(stack, str) else (stack.kind, stack.group)] = parameter.parts[0].name
            continue
        is_head = name == ("embedding.weight" if tied else "head.weight")
        if (len(parameter.shape) != 2 or name.endswith(DENSE_MATRICES)) and not is_head:
            reasons |= dict.fromkeys(packed, NO_MATRIX)
            continue
        kept = kept_matrix(parameter, checkpoint, refuses, one_format)
        reasons |= {each.part.name: each.reason for each in kept.parts if each.part.name in packed and each.reason}
        if is_head:
            head = kept.runs[0].format
        else:
            rows[name] = kept.rows
    whole = Counter(each[0][1] for each in rows.values() if len(each) == 1)
    blocks = whole.most_common(1)[0][0] if whole else DENSE_MATRIX
    own = tuple((name, each) for name, each in rows.items() if {format for _, format in each} != {blocks})
    format = WeightFormat(blocks, head, own=own)
    if experts:
        of_experts, group = next(iter(experts)) if len(experts) == 1 else ("dense", 0)
        format = replace(format, experts=of_experts, expert_group=group)
    if len(experts) > 1:
        differ = f"experts differ: {' and '.join(list(experts.values())[:2])}"
        stacks = (each for name, each in wanted.items() if is_expert_stack(name, len(each.shape)))
        reasons |= {part.name: differ for each in stacks for part in each.parts if part.name not in reasons}
    return format, reasons


def kept_matrices(
    checkpoint: Checkpoint, wanted: Wanted, tied: bool, format: WeightFormat
) -> dict[str, KeptMatrix | KeptStack]:
    """Return the parameters whose codes `format` holds exactly, in that format, by our names."""
    found: dict[str, KeptMatrix | KeptStack] = {}
    for name, parameter in wanted.items():
        ours, axes = "head.weight" if tied and name == "embedding.weight" else name, len(parameter.shape)
        if is_expert_stack(name, axes):
            stack = None if format.is_dense(ours, axes) else kept_stack(parameter, checkpoint)
            own = format.expert_dtype, format.columns_per_expert_scale
            if isinstance(stack, KeptStack) and (stack.kind, stack.group) == own:
                found[name] = stack
            continue
        rows = format.rows_of(ours, parameter.shape)
        if all(each.is_dense for _, each in rows):
            continue
        codes = {each.codes for _, each in rows}
        kept = kept_matrix(parameter, checkpoint, lambda each, codes=codes: None if each.codes in codes else "")
        held = kept.held_as(rows)
        if held is not None:
            found[name] = held
    return found


def cost_of_widening(
    checkpoint: Checkpoint, wanted: Wanted, tied: bool, format: WeightFormat, dtype: torch.dtype,
    reasons: Mapping[str, str],
) -> list[str]:  # fmt: skip
    """Return a line for each reason why tensors that are quantized in the files are dense in memory: which, and what
    that costs. `reasons` are by stored tensor; that of "" is of all others."""
    kept = kept_matrices(checkpoint, wanted, tied, format)
    in_few_bits = {
        part.name
        for name, matrix in kept.items()
        for part in (
            wanted[name].parts
            if isinstance(matrix, KeptStack)
            else [each.part for each in matrix.parts if not each.format.is_dense]
        )
    }
    packed = [p for each in wanted.values() for p in each.parts if _packed(checkpoint.tensors[p.name])]
    widened: dict[str, list[str]] = {}
    for part in packed:
        if part.name not in in_few_bits:
            widened.setdefault(reasons.get(part.name, reasons.get("", "")), []).append(part.name)
    lines = []
    for reason, names in widened.items():
        files = sum(checkpoint.tensors[name].nbytes for name in names) / 1e6
        memory = sum(math.prod(checkpoint.tensors[name].shape) for name in names) * dtype.itemsize / 1e6
        line = f"{checkpoint.format}, {len(names)} of {len(packed)} quantized tensors are widened"
        line += f" to {str(dtype).removeprefix('torch.')}"
        if not format.blocks.is_dense and not in_few_bits:
            line += f" and quantized again as {format.blocks.codes}"
        which = f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: " if names[0] in reasons else ""
        reason = f" ({which}{reason})" if reason else ""
        lines.append(f"{line}, {memory:,.1f} MB for {files:,.1f} MB in the files{reason}")
    return lines


def bytes_of_kept(kept: Iterable[KeptMatrix | KeptStack]) -> tuple[int, int]:
    """Return the bytes of matrices in few bits in memory, and of the same in the files; without stacks of experts."""
    runs = [run for each in kept if isinstance(each, KeptMatrix) for run in each.runs if not run.format.is_dense]
    memory = sum(run.format.nbytes(run.rows, run.parts[0].part.shape_here[1]) for run in runs)
    return memory, sum(part.tensor.nbytes for run in runs for part in run.parts)


def _format_of(part: StoredPart, matrix: QuantizedMatrix, tensor: StoredTensor) -> MatrixFormat | str:
    """Return the format that holds a matrix exactly, or why no product of ours multiplies from it."""
    columns = part.shape[1]
    if not bool(matrix.scales.float().isfinite().all()):
        raise not_finite(part, tensor)
    if matrix.kind == "mxfp4":
        return "no product multiplies from MXFP4"
    if matrix.group_index is not None:
        return ORDERED
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


def joined(one: MatrixFormat, other: MatrixFormat) -> MatrixFormat | None:
    """Return the format that holds matrices of both exactly, which differ in the types of scales at most; None where
    there is none."""
    if one == other:
        return one
    added = one.minima, other.minima
    if one.words or one.codes != other.codes or one.group != other.group or (None in added and added != (None, None)):
        return None
    minima = None if one.minima is None or other.minima is None else torch.promote_types(one.minima, other.minima)
    return replace(one, scales=torch.promote_types(one.scales, other.scales), minima=minima)


def _holds(format: MatrixFormat, own: MatrixFormat) -> bool:
    """Return whether a format holds exactly what has its own one: a scale for 128 columns is two for 64."""
    if own.words or own.codes != format.codes or not format.group or own.group % format.group:
        return joined(format, own) == format
    return joined(format, replace(own, group=format.group)) == format
