"""Compiled decode steps, bound to a model's weights and cache: one call from embedded tokens to logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from compiled_kernels.decode_step.shape import StepShape
from compiled_kernels.decode_step.text import buffers, step_inputs, step_text
from compiled_kernels.expect import check_argument
from compiled_kernels.backends import BackendError
from compiled_kernels.mlir import compile_text
from compiled_kernels.mlir_text import SIZE_BOUND, MLIR_TYPES, Named
from compiled_kernels.openmp import BoundCall, libgomp_path


class DecodeStep:
    """A compiled step. `tensors` holds those that `step_inputs(shape)` names: weights, keys and values; raises
    BackendError where one is missing, is too many, or is of another shape or type.

    Fill `x`, `lengths`, `tables` and `angles`, call, and read `logits` (or `x`): all of them buffers of the step's
    own, for `shape.rows` rows, where the step has such. An unused row has length 1 and pages that no other row reads.
    """

    def __init__(self, shape: StepShape, tensors: Mapping[str, Tensor]):
        check_tensors(tensors, step_inputs(shape))
        self.shape = shape
        self.kernel = compile_text(
            step_text(shape), "decode_step", level=shape.target.level, libraries=(libgomp_path(),)
        )
        self._own = allocate(buffers(shape))
        self._call = BoundCall(self.kernel.address, [*self._own.values(), *(tensors[name] for name, _ in step_inputs(shape))])
        self.x = self._own["x"]
        nothing = torch.empty(0)
        self.logits, self.lengths = (self._own.get(name, nothing) for name in ("logits", "lengths"))
        self.tables = tuple(self._own[f"table_{i}"] for i in range(shape.num_page_tables))
        self.angles = {i: (self._own[f"cos_{i}"], self._own[f"sin_{i}"]) for i in shape.rotary_dims}

    def __call__(self, threads: int | None = None) -> None:
        self._call(threads)

    @property
    def bytes(self) -> int:
        """Return the bytes of the step's own buffers: inputs, outputs and activations."""
        return sum(buffer.nbytes for buffer in self._own.values())


def check_tensors(tensors: Mapping[str, Tensor], wanted: Sequence[Named]) -> None:
    """Raise BackendError unless `tensors` are exactly those wanted, each as it is declared."""
    names = {name for name, _ in wanted}
    for told, wrong in (("lacks", names - tensors.keys()), ("has no place for", tensors.keys() - names)):
        if wrong:
            raise BackendError(
                f"decode step: {told} {', '.join(sorted(wrong)[:4])} ({len(wrong)} of {len(names)} tensors)"
            )
    for name, kind in wanted:
        sizes, types = _read(kind)
        if sizes[0] == SIZE_BOUND:  # a pool of any number of pages
            sizes = (len(tensors[name]), *sizes[1:])
        check_argument("decode step", name, tensors[name], sizes, types)


def allocate(wanted: Sequence[Named]) -> dict[str, Tensor]:
    """Allocate buffers of these names and types, all zero."""
    return {name: _buffer(kind) for name, kind in wanted}


def _buffer(kind: str) -> Tensor:
    sizes, types = _read(kind)
    return torch.zeros(sizes, dtype=types[0])


def _read(kind: str) -> tuple[tuple[int, ...], tuple[torch.dtype, ...]]:
    """Return shape and types of a tensor, from its memref type."""
    *sizes, element = kind.removeprefix("memref<").removesuffix(">").split("x")
    return tuple(map(int, sizes)), tuple(dtype for dtype, name in MLIR_TYPES.items() if name == element)
