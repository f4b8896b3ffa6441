"""Choose the storage formats of a model's weights at load time; norms and biases stay dense."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from compiled_kernels.linear.int8_activations import int8_problem
from compiled_kernels.linear.matrix_format import CODE_DTYPES, DENSE_MATRIX, INT8_MATRIX, MatrixFormat
from workbench.errors import WorkbenchError
from workbench.model.by_rows import row_blocks, store_quantized
from workbench.model.formats.mapped import release
from workbench.model.model_parameters import parameter_shapes
from workbench.model.spec import ModelSpec

WeightDtype = Literal["dense", "int8", "int4"]
WEIGHT_DTYPES: tuple[WeightDtype, ...] = ("dense", "int8", "int4")
Activations = Literal["float", "int8"]
ACTIVATIONS: tuple[Activations, ...] = ("float", "int8")
Rows = tuple[tuple[int, MatrixFormat], ...]  # (number of rows, their format), in order
BESIDE = ("scales", "minima")  # format of a quantized matrix
# Two-dimensional parameters that are not products: lookups, element-wise factors, routers.
EXPERT_STACKS = ".feedforward.gate_up", ".feedforward.down"
DENSE_MATRICES = (
    "input_embedding.weight", "positions.weight", "norm.weight", "router.weight", "shared_gate.weight", "conv.weight",
    "_bias", "coefficients.weight",
)  # fmt: skip


def matrix_format(name: str, quant_group: int = 64) -> MatrixFormat:
    """Return the matrix format that a setting names: dense, int8 with a scale per row, or int4 with a float16 scale per
    `quant_group` columns. Raises WorkbenchError for other names.
    """
    if name not in WEIGHT_DTYPES:
        raise WorkbenchError(f"unknown weight format {name!r}; known: {', '.join(WEIGHT_DTYPES)}")
    if quant_group < 8 or quant_group % 8:
        raise WorkbenchError(f"weight group of {quant_group}: INT4 groups are multiples of 8, 32 or 64 as a rule")
    return {
        "dense": DENSE_MATRIX,
        "int8": INT8_MATRIX,
        "int4": MatrixFormat("int4", quant_group, torch.float16),
    }[name]


@dataclass(frozen=True)
class WeightFormat:
    """The storage formats of a model's matrices, in the blocks and in the head. A tied embedding has the head's format;
    an untied embedding keeps the format of its file (`embedding`).

    `experts` is the format of a mixture's experts; default: the blocks' format.

    `activations` is the format of the products' inputs: `float` (the model's type), or `int8`: quantized in each call
    and multiplied as integers, if the codes are integers (see compiled_kernels/linear/int8_activations.py).

    `own` has the exceptions by parameter name: matrices of the blocks and stacks of experts in other formats, with the
    format of each range of rows. Parts of a fused matrix in several formats are named X.0.weight, X.1.weight, ...
    """

    blocks: MatrixFormat = DENSE_MATRIX
    head: MatrixFormat = DENSE_MATRIX
    activations: Activations = "float"
    experts: MatrixFormat | None = None
    own: tuple[tuple[str, Rows], ...] = ()
    embedding: MatrixFormat = DENSE_MATRIX

    @classmethod
    def parse(
        cls,
        blocks: str,
        head: str | None = None,
        quant_group: int = 64,
        activations: str = "float",
        experts: str | None = None,
    ) -> WeightFormat:
        """Make the format from the names in the settings; `head` and `experts` default to the blocks' format. Raises
        WorkbenchError for unknown names.
        """
        formats = [matrix_format(name, quant_group) for name in (blocks, blocks if head is None else head)]
        if activations not in ACTIVATIONS:
            raise WorkbenchError(f"unknown activations {activations!r}; known: {', '.join(ACTIVATIONS)}")
        of_experts = None if experts is None else matrix_format(experts, quant_group)
        return cls(*formats, activations, of_experts)  # type: ignore[arg-type] (checked above)

    @property
    def of_experts(self) -> MatrixFormat:
        """Return the format of experts that have no exception in `own`."""
        return self.blocks if self.experts is None else self.experts

    def with_experts(self, experts: MatrixFormat) -> WeightFormat:
        """Return a copy with this format for every stack of experts."""
        return replace(self, experts=experts, own=tuple(x for x in self.own if not x[0].endswith(EXPERT_STACKS)))

    def is_dense(self, name: str, axes: int) -> bool:
        """Return whether the parameter `name` is stored dense."""
        rows = dict(self.own).get(name, ())
        return all(format.is_dense for _, format in rows) if len(rows) > 1 else self.of(name, axes).is_dense

    def of(self, name: str, axes: int) -> MatrixFormat:
        """Return the storage format of the parameter `name`: routers, norms and biases are dense."""
        if name in self._own_parts:
            return self._own_parts[name]
        if is_expert_stack(name, axes):
            return self.of_experts
        if axes != 2 or name.endswith(DENSE_MATRICES):
            return DENSE_MATRIX
        return {"head.weight": self.head, "embedding.weight": self.embedding}.get(name, self.blocks)

    def rows_of(self, name: str, shape: tuple[int, ...]) -> Rows:
        """Return the ranges of rows of a parameter, or of experts of a stack, with the format of each."""
        rows = dict(self.own).get(name, ())
        return rows if len(rows) > 1 else ((shape[0] if shape else 1, self.of(name, len(shape))),)

    @cached_property
    def _own_parts(self) -> dict[str, MatrixFormat]:
        """Return the formats of `own`, by the names under which parts are stored."""
        return {part_name(name, i, rows): format for name, rows in self.own for i, (_, format) in enumerate(rows)}

    @property
    def of_blocks(self) -> tuple[MatrixFormat, ...]:
        """Return every format that a matrix of the blocks may have."""
        return tuple(dict.fromkeys((self.blocks, *self._own_parts.values())))

    def __str__(self) -> str:
        return ", ".join(map(str, self.of_blocks))

    @property
    def named(self) -> tuple[str, ...]:
        """Return the words that describe this format in the keys of stored results."""
        activations = () if self.activations == "float" else (f"activations {self.activations}",)
        experts = () if self.experts is None else (f"experts {self.experts!r}",)
        own = (repr(self.own),) if self.own else ()
        embedding = () if self.embedding.is_dense else (f"embedding {self.embedding!r}",)
        return repr(self.blocks), repr(self.head), *activations, *experts, *own, *embedding

    def check(self, spec: ModelSpec) -> None:
        """Raise WorkbenchError if a format's groups or blocks do not divide a matrix's columns, or if activations are
        INT8 and no matrix of the blocks has integer codes.
        """
        if self.activations == "int8" and all(int8_problem(each.codes, each.group, 0) for each in self.of_blocks):
            raise WorkbenchError(f"activations: int8 needs integer weights, not {self}; set weights: int8 or int4")
        matrices = [each for each in parameter_shapes(spec).items() if len(each[1]) > 1]
        for name, shape in matrices:
            stack = is_expert_stack(name, len(shape))
            for _, format in self.rows_of(stored_name(name, spec, self), shape):
                problem = format.problem(shape[-1])
                if stack and format.group and shape[-1] % format.group:
                    problem = f"groups of {format.group} in stacks of experts do not divide"
                if problem:
                    setting = "weight_group, or expert_weights: dense" if stack else "weight_group"
                    raise WorkbenchError(f"{spec.name}: {name}: {problem} {shape[-1]} columns; set {setting}")


def quantize(state: dict[str, Tensor], spec: ModelSpec, format: WeightFormat) -> dict[str, Tensor]:
    """Quantize the matrices of a state to `format`: `X.weight` gets `X.scales` (and `X.minima`); a stack of experts `X`
    gets `X_scales`. Routers and the absorbed matrices of latent attention stay dense.

    `state` is emptied during the conversion, so that the dense and the quantized model are never in memory at once. A
    quantized tied embedding becomes the head. A matrix that already has the dtype of its codes is kept.
    """
    format.check(spec)
    found: dict[str, Tensor] = {}
    for name in list(state):
        tensor, ours = state.pop(name), stored_name(name, spec, format)
        done = tensor.dtype == CODE_DTYPES.get(format.of(ours, tensor.ndim).codes, torch.int32)
        if format.is_dense(ours, tensor.ndim) or done or name.endswith(BESIDE):
            found[ours] = tensor
            continue
        rows = format.rows_of(ours, tuple(tensor.shape))
        for index, part in enumerate(tensor.split([count for count, _ in rows])):
            own = part_name(ours, index, rows)
            dense = format.is_dense(own, part.ndim)
            tensors = (part,) if dense else store_as(own, tuple(part.shape), format, row_blocks(part))
            found |= named_parts(own, tensors)
        release(tensor)
    return found


def is_expert_stack(name: str, axes: int) -> bool:
    """Return whether a parameter is a stack of all experts' matrices."""
    return axes == 3 and name.endswith(EXPERT_STACKS)


def store_as(name: str, shape: tuple[int, ...], format: WeightFormat, blocks: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Quantize a matrix, or a stack of matrices, from blocks of rows; return codes, scales, and minima if the format
    has them.
    """
    return store_quantized(shape, format.of(name, len(shape)), blocks)


def _beside(name: str, part: str) -> str:
    if part == "weight":
        return name
    return name.removesuffix("weight") + part if name.endswith("weight") else f"{name}_{part}"


def part_name(name: str, index: int, rows: Rows) -> str:
    """Return the stored name of a part of a matrix `X.weight`; a single part keeps the matrix's name."""
    return name if len(rows) == 1 else f"{name.removesuffix('weight')}{index}.weight"


def named_parts(name: str, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the given tensors (codes, scales, and minima if present) under their names in a state."""
    return {_beside(name, part): tensor for part, tensor in zip(("weight", *BESIDE), tensors, strict=False)}


def stored_name(name: str, spec: ModelSpec, format: WeightFormat) -> str:
    """Return the stored name of a parameter: a quantized tied embedding is stored as the head."""
    tied = name == "embedding.weight" and spec.tie_word_embeddings and not format.head.is_dense
    return "head.weight" if tied else name
