"""Keep quantized matrices exactly as their files store them, if one of our products supports the format.

Each matrix has its own format (see model/quantized.py), and so has each part of a fused matrix; a stack of experts has
one format. A matrix in an unsupported format is widened, that is stored dense, and a report line gives the tensors, the
reason and the cost.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from compiled_kernels.linear.matrix_format import DENSE_MATRIX, SCALE_DTYPES, MatrixFormat
from compiled_kernels.linear.planes import pack_planes
from compiled_kernels.memory import zero_pages
from workbench.errors import WorkbenchError
from workbench.model.formats.checkpoint import Checkpoint, QuantizedMatrix, StoredTensor
from workbench.model.formats.safetensors_files import FLOAT_DTYPES
from workbench.model.parameters import Layout, RowLayout, StoredParameter, StoredPart
from workbench.model.quantized import DENSE_MATRICES, Rows, WeightFormat, is_expert_stack
from workbench.units import format_bytes

Wanted = Mapping[str, StoredParameter]
Refuses = Callable[[MatrixFormat], str | None]  # the reason why no product supports a format; None if one does
BY_ACTIVATION = "a group of its columns lies scattered over the row, in the order of activations"
REORDERED = "its file stores its columns in another order"
MAX_GROUP = 128  # columns of a group that a kernel processes at once; larger groups are split


@dataclass(frozen=True)
class KeptPart:
    """One stored tensor of a parameter, with a format that holds it exactly. If that format is dense although the file
    has fewer bits, `reason` says why. `matrix` has the codes if the format differs from the file's.
    """

    part: StoredPart
    tensor: StoredTensor
    format: MatrixFormat
    reason: str = ""
    matrix: QuantizedMatrix | None = None

    @property
    def rows(self) -> int:
        """Return the number of rows that the part has in memory; for a stack, the rows of all experts."""
        return math.prod(self.part.shape_here[:-1])

    def fill(self, format: MatrixFormat, stored: list[Tensor]) -> None:
        """Write codes, scales and minima of this part into `stored`, in `format`, which holds the part exactly."""
        layout, as_stored = self.part.layout, self.matrix is None and format == self.format
        if as_stored and layout is None:
            self.tensor.fill(stored)
        else:
            read = [torch.empty_like(each) for each in stored] if as_stored else [*self._codes(format)]
            if as_stored:
                self.tensor.fill(read)
            for out, each in zip(stored, read, strict=True):
                octets = each.view(torch.uint8) if each.dtype == torch.float8_e4m3fn else each
                out.view(octets.dtype).copy_(octets if layout is None else self._ordered(layout, octets))
        if self.matrix is None and not all(bool(each.isfinite().all()) for each in stored[1:]):
            raise not_finite(self.part, self.tensor)

    def _ordered(self, layout: Layout, rows: Tensor) -> Tensor:
        """Reorder the stored rows of a matrix, or of all experts of a stack, to our order; columns stay."""
        if len(self.part.shape) == 2:
            return layout.from_stored(rows)
        order = layout.from_stored(torch.arange(self.part.shape[-1]).expand(1, 1, -1)).flatten()
        return rows.unflatten(0, (self.part.shape[0], -1))[:, order].flatten(0, 1)

    def _codes(self, format: MatrixFormat) -> Iterator[Tensor]:
        """Yield codes, scales and minima in the file's order of rows."""
        matrix, columns = self.matrix or self.tensor.quantized(), self.part.shape_here[-1]
        assert matrix is not None
        codes, offset = matrix.codes(), 8 if matrix.minima is None and format.codes == "int4" else 0
        if format.codes == "fp8" and bool(((codes.view(torch.uint8) & 127) == 127).any()):
            raise WorkbenchError(f"{self.tensor.file}: {self.part.name} holds NaN; fetch the file again")
        starts = torch.arange(format.num_groups(columns)) * format.group
        by_row = torch.arange(len(codes)) // min(matrix.rows, len(codes))

        def spread(each: Tensor) -> Tensor:
            return each.float()[by_row][:, starts // min(matrix.group, columns)]

        yield pack_planes(codes + offset, (4,)) if format.codes in ("int4", "mxfp4") else codes
        scales = spread(matrix.scales)
        if format.codes == "mxfp4":
            yield scales.to(torch.float8_e8m0fnu).view(torch.uint8)
        else:
            yield (scales[:, 0] if format.scales_rows else scales).to(format.scales)
        if format.minima is not None:
            zeros = 0.0 if matrix.zeros is None else spread(matrix.zeros)
            yield (-(zeros + offset) * scales if matrix.minima is None else spread(matrix.minima)).to(format.minima)


@dataclass(frozen=True)
class KeptRun:
    """Consecutive stored tensors of a parameter that have the same format in memory."""

    format: MatrixFormat
    parts: tuple[KeptPart, ...]

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return codes, scales and minima in the layout of our products."""
        shape = self.rows, self.parts[0].part.shape_here[-1]
        stored = [zero_pages(*each) for each in self.format.storage(*shape).values()]
        start = 0
        for part in self.parts:
            end = start + part.rows
            part.fill(self.format, [each[start:end] for each in stored])
            start = end
        return tuple(stored)


@dataclass(frozen=True)
class KeptMatrix:
    """A parameter as ranges of rows; each range is stored exactly as in its file, or dense."""

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
        """Return the same matrix with its ranges of rows in the formats of `rows`; None if these do not hold it
        exactly.
        """
        if len(rows) != len(self.runs):
            return None
        runs = [replace(run, format=format) for run, (_, format) in zip(self.runs, rows, strict=True)]
        hold = all(_holds(run.format, own.format) for run, own in zip(runs, self.runs, strict=True))
        return KeptMatrix(tuple(runs)) if hold else None


def no_refusal(format: MatrixFormat) -> str | None:
    """Return None for every format: none is refused."""


def kept_matrix(
    parameter: StoredParameter, checkpoint: Checkpoint, refuses: Refuses = no_refusal, one_format: str | None = None,
    stack: bool = False,
) -> KeptMatrix:  # fmt: skip
    """Return a parameter (a matrix or a stack of experts) in the format of its file, as far as a product supports it.
    If its parts have several formats and `one_format` gives a reason against that, it is dense.
    """
    if stack:
        one_format = "experts of its stack are stored in several formats"
    parts = [_kept_part(part, checkpoint, refuses) for part in parameter.parts]
    if parameter.viewed_as is not None and not stack:
        parts = _dense(parts, NO_MATRIX)
    runs: list[KeptRun] = []
    for part in parts:
        together = joined(runs[-1].format, part.format) if runs else None
        if together is None:
            runs.append(KeptRun(part.format, (part,)))
        else:
            runs[-1] = KeptRun(together, (*runs[-1].parts, part))
    if one_format is not None and len(runs) > 1:
        runs = [KeptRun(DENSE_MATRIX, tuple(_dense(parts, one_format)))]
    return KeptMatrix(tuple(runs))


NO_MATRIX = "it is multiplied as a dense tensor"


def not_finite(part: StoredPart, tensor: StoredTensor) -> WorkbenchError:
    """Return the error for infinite or NaN scales or minima."""
    return WorkbenchError(f"{tensor.file}: {part.name} has scales or minima that are not finite; fetch the file again")


def _dense(parts: Iterable[KeptPart], reason: str) -> list[KeptPart]:
    """Return the parts as dense; for quantized ones with this reason."""
    return [each if each.format.is_dense else replace(each, format=DENSE_MATRIX, reason=reason) for each in parts]


def _kind(tensor: StoredTensor, dtype: torch.dtype) -> str:
    """Return the kind of conversion for a dense part: a quantized tensor, or a float16 matrix in a model of another
    type; "" for none.
    """
    if tensor.dtype not in FLOAT_DTYPES:
        return "quantized"
    return "float16" if dtype != torch.float16 and tensor.own_format() is not None else ""


def _kept_part(part: StoredPart, checkpoint: Checkpoint, refuses: Refuses) -> KeptPart:
    """Return a part in the first format that is not refused: its own, then groups, then dense."""
    tensor = checkpoint.tensors[part.name]
    of_rows = len(part.shape) == 3 or (isinstance(part.layout, RowLayout) and not part.layout.transposed)
    ordered = part.layout is not None and not of_rows
    own, reason = tensor.own_format(), "" if tensor.dtype in FLOAT_DTYPES else f"no kernel multiplies {tensor.dtype}"
    if own is not None and (reason := refuses(own)) is None:
        if not ordered:
            return KeptPart(part, tensor, own)
        reason = REORDERED
    if part not in checkpoint.kept:  # its scales are read once
        matrix = tensor.quantized()
        kept = REORDERED if ordered or matrix is None else _format_of(part, matrix, tensor)
        checkpoint.kept[part] = matrix, kept
    matrix, format = checkpoint.kept[part]
    if matrix is None:
        return KeptPart(part, tensor, DENSE_MATRIX, reason)
    if isinstance(format, str):
        return KeptPart(part, tensor, DENSE_MATRIX, format)
    if (problem := refuses(format)) is not None:
        return KeptPart(part, tensor, DENSE_MATRIX, problem)
    return KeptPart(part, tensor, format, matrix=matrix)


def stored_format(
    checkpoint: Checkpoint, wanted: Wanted, tied: bool, refuses: Refuses = no_refusal, one_format: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[WeightFormat, dict[str, str]]:  # fmt: skip
    """Return a format that keeps the matrices of a checkpoint as they are stored, and the reasons, by stored tensor,
    why other matrices are widened.

    Args:
        checkpoint: the model on disk.
        wanted: the model's stored parameters.
        tied: whether the head is the embedding.
        refuses: returns why no product of the backend supports a format, or None.
        one_format: why parts of a fused matrix must have the same format; None if they may differ.
        dtype: the model's dtype of computation.
    """

    def refused(format: MatrixFormat, stack: bool, looked_up: bool) -> str | None:
        if format.codes == "float16" and dtype == torch.float16:
            return ""  # a dense matrix has the same numbers
        if format.codes == "float16" and stack:
            return "no kernel for experts reads float16 together with another type"
        return None if looked_up else refuses(format)

    rows: dict[str, Rows] = {}
    head = embedding = DENSE_MATRIX
    experts: dict[str, MatrixFormat] = {}
    reasons: dict[str, str] = {}
    for name, parameter in wanted.items():
        stack = is_expert_stack(name, len(parameter.shape))
        is_head = name == ("embedding.weight" if tied else "head.weight")
        if (len(parameter.shape) != 2 or name.endswith(DENSE_MATRICES)) and not is_head and not stack:
            reasons |= {p.name: NO_MATRIX for p in parameter.parts if _kind(checkpoint.tensors[p.name], dtype)}
            continue
        looked_up = name == "embedding.weight" and not tied
        own = partial(refused, stack=stack, looked_up=looked_up)
        kept = kept_matrix(parameter, checkpoint, own, one_format, stack)
        reasons |= {each.part.name: each.reason for each in kept.parts if each.reason}
        if is_head:
            head = kept.runs[0].format
        elif looked_up:
            embedding = kept.runs[0].format
        elif stack:
            experts[name] = kept.runs[0].format
        else:
            rows[name] = kept.rows
    whole = Counter(each[0][1] for each in rows.values() if len(each) == 1)
    blocks = whole.most_common(1)[0][0] if whole else DENSE_MATRIX
    own = tuple((name, each) for name, each in rows.items() if {format for _, format in each} != {blocks})
    of_experts = Counter(experts.values()).most_common(1)[0][0] if experts else None
    own += tuple((name, ((wanted[name].shape[0], each),)) for name, each in experts.items() if each != of_experts)
    return WeightFormat(blocks, head, experts=of_experts, own=own, embedding=embedding), reasons


def kept_matrices(checkpoint: Checkpoint, wanted: Wanted, tied: bool, format: WeightFormat) -> dict[str, KeptMatrix]:
    """Return, by our names, the parameters that `format` holds exactly as they are stored."""
    found: dict[str, KeptMatrix] = {}
    for name, parameter in wanted.items():
        ours, axes = "head.weight" if tied and name == "embedding.weight" else name, len(parameter.shape)
        rows = format.rows_of(ours, parameter.shape)
        if all(each.is_dense for _, each in rows):
            continue
        codes = {each.codes for _, each in rows}
        refuses: Refuses = lambda each, codes=codes: None if each.codes in codes else ""  # noqa: E731 (bound here)
        kept = kept_matrix(parameter, checkpoint, refuses, stack=is_expert_stack(name, axes))
        held = kept.held_as(rows)
        if held is not None:
            found[name] = held
    return found


def cost_of_widening(
    checkpoint: Checkpoint, wanted: Wanted, tied: bool, format: WeightFormat, dtype: torch.dtype,
    reasons: Mapping[str, str],
) -> list[str]:  # fmt: skip
    """Return one line for each reason why tensors are dense in memory although the files have fewer bits (quantized, or
    float16 in a model of another type); it names the tensors and the cost. `reasons` are by stored tensor; the key ""
    stands for all other quantized tensors.
    """
    kept = kept_matrices(checkpoint, wanted, tied, format)
    in_few_bits = {each.part.name for matrix in kept.values() for each in matrix.parts if not each.format.is_dense}
    parts = [part.name for each in wanted.values() for part in each.parts]
    kinds = [(name, _kind(checkpoint.tensors[name], dtype)) for name in parts]
    count = Counter(kind for _, kind in kinds)
    widened: dict[tuple[str, str], list[str]] = {}
    for name, kind in kinds:
        if name not in in_few_bits and (kind == "quantized" or name in reasons):
            widened.setdefault((kind, reasons.get(name, reasons.get("", ""))), []).append(name)
    lines = []
    for (kind, reason), names in widened.items():
        files = sum(checkpoint.tensors[name].nbytes for name in names)
        memory = sum(math.prod(checkpoint.tensors[name].shape) for name in names) * dtype.itemsize
        line = f"{checkpoint.format}, {len(names)} of {count[kind]} {kind} tensors are"
        line += f" {'cast' if kind == 'float16' else 'widened'} to {str(dtype).removeprefix('torch.')}"
        if not format.blocks.is_dense and not in_few_bits:
            line += f" and quantized again as {format.blocks.codes}"
        which = f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: " if names[0] in reasons else ""
        reason = f" ({which}{reason})" if reason else ""
        lines.append(f"{line}, {format_bytes(memory)} for {format_bytes(files)} in the files{reason}")
    return lines


def bytes_of_kept(kept: Iterable[KeptMatrix]) -> tuple[int, int]:
    """Return two numbers of bytes of the kept quantized matrices: in memory, and in the files."""
    runs = [run for each in kept for run in each.runs if not run.format.is_dense]
    memory = sum(run.format.nbytes(run.rows, run.parts[0].part.shape_here[-1]) for run in runs)
    return memory, sum(part.tensor.nbytes for run in runs for part in run.parts)


def _format_of(part: StoredPart, matrix: QuantizedMatrix, tensor: StoredTensor) -> MatrixFormat | str:
    """Return the format that holds a matrix exactly, or the reason why no product supports it."""
    columns = part.shape_here[-1]
    if not all(bool(each.float().isfinite().all()) for each in (matrix.scales, matrix.minima) if each is not None):
        raise not_finite(part, tensor)
    if matrix.kind == "mxfp4":
        exact = matrix.group == 32 and torch.equal(matrix.scales.to(torch.float8_e8m0fnu).float(), matrix.scales)
        return MatrixFormat.named("mxfp4") if exact else "its MXFP4 scales are not powers of two, each of 32 columns"
    if matrix.group_index is not None:
        return BY_ACTIVATION
    codes = matrix.kind if matrix.kind in ("int8", "fp8") else "int4"
    with_minima = matrix.zeros is not None or matrix.minima is not None
    scales = _exact_dtype(matrix.scales)
    if matrix.zeros is not None and scales == torch.float32:
        return "its zeros times its float32 scales are not exact in float32"
    group = min(matrix.group, columns)
    if group == columns and codes != "int4" and not with_minima:
        return MatrixFormat(codes)
    if codes == "int4" and (group % 8 or columns % group):
        return f"groups of {group} do not divide {columns} columns, or are no multiple of 8"
    minima = _exact_dtype(matrix.minima) if matrix.minima is not None else torch.float32 if with_minima else None
    return MatrixFormat(codes, _walked(group), scales, minima)


def _walked(group: int) -> int:
    """Return the number of columns after splitting a group of `group` columns for the kernels."""
    while group > MAX_GROUP and group % 16 == 0:
        group //= 2
    return group


def _exact_dtype(values: Tensor) -> torch.dtype:
    """Return the first type of SCALE_DTYPES that holds these numbers exactly."""
    return next(dtype for dtype in SCALE_DTYPES if torch.equal(values.to(dtype).double(), values.double()))


def joined(one: MatrixFormat, other: MatrixFormat) -> MatrixFormat | None:
    """Return a format that holds matrices of both formats exactly, if they differ only in the types of scales;
    otherwise None.
    """
    if one == other:
        return one
    added = one.minima, other.minima
    if one.words or one.codes != other.codes or one.group != other.group or (None in added and added != (None, None)):
        return None
    minima = None if one.minima is None or other.minima is None else torch.promote_types(one.minima, other.minima)
    return replace(one, scales=torch.promote_types(one.scales, other.scales), minima=minima)


def _holds(format: MatrixFormat, own: MatrixFormat) -> bool:
    """Return whether a format holds matrices of another format exactly (a scale for 128 columns equals two for 64)."""
    if own.words or own.codes != format.codes or not format.group or own.group % format.group:
        return joined(format, own) == format
    return joined(format, replace(own, group=format.group)) == format
