"""A compiled decode step, bound to a model's weights and cache: one call from embedded tokens to logits."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from compiled_kernels.decode_step.shape import StepShape
from compiled_kernels.decode_step.text import arguments, step_text
from compiled_kernels.mlir import compile_text
from compiled_kernels.openmp import Call, library

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "i32": torch.int32}


class DecodeStep:
    """`tensors` holds what `arguments(shape)` names after the scratch buffers: weights, keys and values.

    Fill `x`, `lengths`, `tables` and `angles`, call, and read `logits`: all of them buffers of the step's own, for
    `shape.rows` rows. A row that is not used has length 1 and pages that nobody reads.
    """

    def __init__(self, shape: StepShape, tensors: Mapping[str, Tensor]):
        self.shape = shape
        self.kernel = compile_text(step_text(shape), "decode_step", libraries=(library(),))
        self._own = {name: _buffer(kind) for name, kind in arguments(shape) if name not in tensors}
        self._call = Call(self.kernel.address, [tensors.get(name, self._own.get(name)) for name, _ in arguments(shape)])  # type: ignore[misc]
        self.x, self.logits, self.lengths = self._own["x"], self._own["logits"], self._own["lengths"]
        self.tables = tuple(self._own[f"table_{i}"] for i in range(shape.tables))
        self.angles = {i: (self._own[f"cos_{i}"], self._own[f"sin_{i}"]) for i in shape.turns}

    def __call__(self, threads: int | None = None) -> None:
        self._call(threads)

    @property
    def bytes(self) -> int:
        """What the step's own buffers take: inputs, outputs and activations."""
        return sum(buffer.nbytes for buffer in self._own.values())


def _buffer(kind: str) -> Tensor:
    *sizes, element = kind.removeprefix("memref<").removesuffix(">").split("x")
    return torch.zeros([int(size) for size in sizes], dtype=DTYPES[element])
