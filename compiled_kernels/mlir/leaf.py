"""Compile leaf operators of the backend mlir from their specifications: one kernel for each combination of shapes,
strides, types and constants.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compiled_kernels.backends import BackendError
from compiled_kernels.level import current_level
from compiled_kernels.mlir.compile import compile_function
from compiled_kernels.mlir.execute import Kernel
from compiled_kernels.operators import LOWERED


@dataclass(frozen=True)
class PreparedKernel:
    """A kernel for one combination of shapes and types: `run` takes addresses; `copied` are the inputs that must be
    contiguous, `outputs` the shapes and types of the results."""

    run: Callable[..., None]
    kernel: Kernel
    copied: frozenset[int]
    outputs: tuple[tuple[tuple[int, ...], torch.dtype], ...]

    def __call__(self, *inputs: Tensor) -> Any:
        """Run the kernel; return the specification's result: a tensor or a tuple of tensors, contiguous."""
        if self.copied:
            inputs = tuple(each.contiguous() if place in self.copied else each for place, each in enumerate(inputs))
        made = [torch.empty(shape, dtype=dtype) for shape, dtype in self.outputs]
        self.run(*[each.data_ptr() for each in inputs], *[each.data_ptr() for each in made])
        return made[0] if len(made) == 1 else tuple(made)


@dataclass(frozen=True)
class LeafOperator:
    """An operator whose kernels are compiled from its specification `function(*tensors, *constants)`. The source file
    of the specification is part of the cache key. `lanes` as in `lower`; `prepared` has the compiled kernels by shapes
    and types.

    Rows that are slices of wider rows are read directly; inputs with other strides are copied to be contiguous.
    """

    name: str
    function: Callable[..., Any]
    lanes: int = 0
    prepared: dict[tuple, PreparedKernel] = field(default_factory=dict)

    def prepare(self, inputs: Sequence[Tensor], *constants: float) -> PreparedKernel:
        """Return the kernel for inputs of these shapes, strides and types; it is compiled if it is not cached."""
        key = (current_level(), *[(each.shape, each.stride(), each.dtype, each.device) for each in inputs], constants)
        found = self.prepared.get(key)
        if found is None:
            found = self.prepared[key] = self._compiled(inputs, constants)
        return found

    def _compiled(self, inputs: Sequence[Tensor], constants: tuple[float, ...]) -> PreparedKernel:
        if any(each.device.type != "cpu" for each in inputs):
            raise BackendError(
                f"{self.name}: backend mlir runs on the CPU; {[str(each.device) for each in inputs]} given"
            )
        shapes = [tuple(each.shape) for each in inputs]
        wide = [enclosing_shape(each.shape, each.stride()) for each in inputs]
        stored = [whole or shape for whole, shape in zip(wide, shapes, strict=True)]

        def function(*whole: Tensor) -> Any:
            parts = [_slice(each, shape) for each, shape in zip(whole, shapes, strict=True)]
            return self.function(*parts, *constants)

        examples = [torch.empty(shape, dtype=each.dtype) for shape, each in zip(stored, inputs, strict=True)]
        source = Path(self.function.__code__.co_filename).read_text()
        recipe = {"function": self.function.__qualname__, "source": source, "slices": shapes, "constants": constants}
        kernel = compile_function(function, examples, self.name, recipe=recipe, lanes=self.lanes)
        with torch.no_grad():
            made = self.function(*(each.to("meta") for each in inputs), *constants)
        results = (made,) if isinstance(made, Tensor) else tuple(made)
        copied = frozenset(place for place, whole in enumerate(wide) if whole is None)
        outputs = tuple((tuple(each.shape), each.dtype) for each in results)
        return PreparedKernel(kernel.function(len(inputs) + len(results)), kernel, copied, outputs)


@functools.cache
def leaf_operator(name: str) -> LeafOperator:
    """Return the operator called `name`, with kernels compiled from its specification."""
    return LeafOperator(name, LOWERED[name].function, LOWERED[name].lanes)


def run(name: str, *arguments: Any) -> Any:
    """Run the operator called `name`; in `arguments`, its tensors come first."""
    tensors = [each for each in arguments if isinstance(each, Tensor)]
    return leaf_operator(name).prepare(tensors, *arguments[len(tensors) :])(*tensors)


def enclosing_shape(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """Return the contiguous shape of which a tensor with these strides is the leading slice of each axis; None if there
    is none.

    >>> enclosing_shape((5, 9, 64), (11 * 64, 64, 1))
    (5, 11, 64)
    >>> enclosing_shape((4, 3), (1, 4)) is None
    True
    """
    stored, inside = [], 1  # from the last axis to the first: the number of elements in one step of the axis
    for place in reversed(range(len(shape))):
        if place == 0:
            stored.append(shape[0])
            return tuple(reversed(stored)) if shape[0] == 1 or strides[0] == inside else None
        if shape[place] != 1 and strides[place] != inside:
            return None
        outer = strides[place - 1] if shape[place - 1] != 1 else inside * shape[place]
        if outer % inside or outer < inside * shape[place]:
            return None
        stored.append(outer // inside)
        inside = outer
    return ()


def _slice(whole: Tensor, shape: tuple[int, ...]) -> Tensor:
    for axis, extent in enumerate(shape):
        if whole.shape[axis] != extent:
            whole = whole.narrow(axis, 0, extent)
    return whole
