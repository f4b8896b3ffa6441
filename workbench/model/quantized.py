"""Weights of products as INT8 or INT4, chosen when a model is loaded; norms, biases and an untied embedding stay
dense."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from compiled_kernels.expert_linear.packed import MX_GROUP, dequantize_stack
from compiled_kernels.linear.quantize import dequantize_int4, dequantize_int8
from workbench.errors import WorkbenchError
from workbench.model.attention_spec import MLASpec
from workbench.model.by_rows import row_blocks, store_quantized, store_quantized_stack
from workbench.model.formats.mapped import release
from workbench.model.recurrent_spec import RecurrentSpec
from workbench.model.spec import LayerSpec, ModelSpec

WeightDtype = Literal["dense", "int8", "int4"]
WEIGHT_DTYPES: tuple[WeightDtype, ...] = ("dense", "int8", "int4")
StoredDtype = Literal["dense", "int8", "int4", "mxfp4"]  # of experts: MXFP4 comes from files
Activations = Literal["float", "int8"]
ACTIVATIONS: tuple[Activations, ...] = ("float", "int8")
# Matrices by shape that are looked up, that multiply element by element, or that choose.
EXPERT_STACKS = ".feedforward.gate_up", ".feedforward.down"
DENSE_MATRICES = (
    "embedding.weight", "positions.weight", "norm.weight", "router.weight", "shared_gate.weight", "conv.weight",
    "_bias", "coefficients.weight",
)  # fmt: skip


@dataclass(frozen=True)
class WeightFormat:
    """The stored format of the matrices of blocks and head: `dense` in the model's type, `int8` with one scale an
    output row, `int4` with one for each `group` columns of a row. A tied embedding is stored as the head is.

    `experts` is the format of a mixture's experts, that of the blocks unless given: also `mxfp4`, as files have it. Of
    these `expert_group` columns share a scale: unless given `quant_group` with int4, and all of a row with int8.

    `activations` are what is multiplied with them: `float` in the model's type, or `int8`, each row quantized as it
    comes and multiplied as integers, wherever the matrix is int8 (see compiled_kernels/linear_w8a8)."""

    blocks: WeightDtype = "dense"
    head: WeightDtype = "dense"
    quant_group: int = 64
    activations: Activations = "float"
    experts: StoredDtype | None = None
    expert_group: int | None = None

    @classmethod
    def parse(
        cls,
        blocks: str,
        head: str | None = None,
        quant_group: int = 64,
        activations: str = "float",
        experts: str | None = None,
    ) -> WeightFormat:
        """`head` and `experts` are as the blocks unless given. Raises WorkbenchError for a format that is not known,
        and for activations in INT8 where the blocks' weights are not."""
        head = blocks if head is None else head
        for name in (blocks, head, experts):
            if name is not None and name not in WEIGHT_DTYPES:
                raise WorkbenchError(f"unknown weight format {name!r}; known: {', '.join(WEIGHT_DTYPES)}")
        if activations not in ACTIVATIONS:
            raise WorkbenchError(f"unknown activations {activations!r}; known: {', '.join(ACTIVATIONS)}")
        if activations == "int8" and blocks != "int8":
            raise WorkbenchError(f"activations: int8 want weights in int8, not {blocks}; set weights: int8 too")
        if quant_group < 2 or quant_group % 2:
            raise WorkbenchError(f"weight group of {quant_group}: INT4 groups are even, 32 or 64 as a rule")
        return cls(blocks, head, quant_group, activations, experts)  # type: ignore[arg-type] (checked above)

    def activations_of(self, matrix: WeightDtype) -> Activations:
        """Return the type of the activations that a matrix stored so is multiplied with."""
        return self.activations if matrix == "int8" else "float"

    @property
    def expert_dtype(self) -> StoredDtype:
        return self.blocks if self.experts is None else self.experts

    @property
    def columns_per_expert_scale(self) -> int:
        """Return how many columns of an expert's matrix share a scale; 0 where a row has one, or there are none."""
        if self.expert_dtype == "mxfp4":
            return MX_GROUP
        if self.expert_group is not None:
            return self.expert_group
        return self.quant_group if self.expert_dtype == "int4" else 0

    def group_of(self, name: str, axes: int) -> int:
        """Return how many columns of a quantized parameter share a scale; 0 where a row has one."""
        if is_expert_stack(name, axes):
            return self.columns_per_expert_scale
        return self.quant_group if self.of(name, axes) == "int4" else 0

    def of(self, name: str, axes: int) -> StoredDtype:
        """Return the stored format of a parameter: routers, norms and biases are dense."""
        if is_expert_stack(name, axes):
            return self.expert_dtype
        if axes != 2 or name.endswith(DENSE_MATRICES):
            return "dense"
        return self.head if name == "head.weight" else self.blocks

    @property
    def named(self) -> tuple[str | int, ...]:
        """Return the parts of this format's key in stored results."""
        activations = () if self.activations == "float" else (f"activations {self.activations}",)
        experts = () if self.experts is None else (f"experts {self.experts} {self.columns_per_expert_scale}",)
        return self.blocks, self.head, self.quant_group, *activations, *experts

    def check(self, spec: ModelSpec) -> None:
        """Raise WorkbenchError where groups do not divide a matrix's columns."""
        widths = [("hidden_size", spec.hidden_size)] if "int4" in (self.blocks, self.head) else []
        if self.blocks == "int4" and spec.altup is not None:
            widths += [("altup low_rank", spec.altup.low_rank), ("altup input_columns", spec.altup.input_columns)]
        if self.blocks == "int4":
            for kind in spec.layers:
                widths += _columns(kind).items()
        for name, columns in widths:
            if columns % self.quant_group:
                raise WorkbenchError(
                    f"{spec.name}: INT4 groups of {self.quant_group} do not divide its {name} of {columns}; "
                    "set weight_group"
                )
        group = self.columns_per_expert_scale
        for kind in spec.layers if group else ():
            for name, columns in (("hidden_size", spec.hidden_size), ("intermediate_size", kind.intermediate_size)):
                if kind.experts is not None and columns % group:
                    raise WorkbenchError(
                        f"{spec.name}: groups of {group} do not divide its experts' {name} of {columns}; set "
                        "weight_group, or expert_weights: dense"
                    )


def _columns(kind: LayerSpec) -> dict[str, int]:
    """Return the columns of a layer's matrices, but for those that read hidden states."""
    a = kind.attention
    shared = kind.experts and kind.experts.shared_intermediate_size
    found = {"intermediate_size": kind.intermediate_size} if kind.experts is None else {}
    found |= {"shared_intermediate_size": shared} if shared else {}
    if kind.beside is not None:
        found |= {"recurrent channels": kind.beside.recurrent.o_proj_inputs}
    if isinstance(a, RecurrentSpec):
        return found | {"recurrent channels": a.o_proj_inputs}
    if isinstance(a, MLASpec):
        found |= {"query latent": a.q_lora_rank} if a.q_lora_rank else {}
        return found | {"heads x value dim": a.o_proj_inputs}
    return found | {"heads x dim": a.o_proj_inputs}


def quantize(state: dict[str, Tensor], spec: ModelSpec, format: WeightFormat) -> dict[str, Tensor]:
    """Quantize the matrices of a state as `format` says: `X.weight`, and `X.scales` beside it; experts' stacks `X`, and
    `X_scales`. Routers and what latent attention absorbs stay dense.

    `state` is emptied as it goes, so that both are never in memory at once. A tied embedding that is not dense becomes
    the head. A matrix with scales beside it is stored so already.
    """
    format.check(spec)
    done = {name for name in state if scales_of(name) in state}
    found: dict[str, Tensor] = {}
    for name in list(state):
        tensor, ours = state.pop(name), stored_name(name, spec, format)
        kind = "dense" if name in done or name.endswith("scales") else format.of(ours, tensor.ndim)
        if kind == "dense":
            found[ours] = tensor
        else:
            shape, group = tuple(tensor.shape), format.group_of(ours, tensor.ndim)
            found[ours], found[scales_of(ours)] = store_as(shape, kind, group, row_blocks(tensor))
            release(tensor)
    return found


def is_expert_stack(name: str, axes: int) -> bool:
    """Return whether a parameter is the stack of all experts' matrices."""
    return axes == 3 and name.endswith(EXPERT_STACKS)


def store_as(shape: tuple[int, ...], kind: StoredDtype, group: int, blocks: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """Quantize a matrix, or a stack of such, that comes in blocks of rows: the stored values, and their scales."""
    if kind not in ("int8", "int4"):
        raise WorkbenchError(f"weights are not quantized as {kind} here; files that are so keep their codes")
    if len(shape) == 3:
        return store_quantized_stack(shape, kind, group, blocks)
    return store_quantized((shape[0], shape[1]), kind, group, blocks)


def scales_of(name: str) -> str:
    """Return the name of the scales of a matrix `X.weight`, or of a stack `X`."""
    return name.removesuffix("weight") + "scales" if name.endswith("weight") else f"{name}_scales"


def stored_name(name: str, spec: ModelSpec, format: WeightFormat) -> str:
    """Return the name under which a parameter is stored: a tied embedding that is not dense is the head."""
    tied = name == "embedding.weight" and spec.tie_word_embeddings and format.head != "dense"
    return "head.weight" if tied else name


def dequantize(values: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return a stored matrix, some of its rows, or a stack of such, as numbers of `dtype`."""
    if scales is None:
        return values.to(dtype)
    if values.ndim == 3:
        return dequantize_stack(values, scales).to(dtype)
    return (dequantize_int8 if values.dtype == torch.int8 else dequantize_int4)(values, scales).to(dtype)
