"""Bind the compiled parts of a block, before and after attention, to the block's weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from compiled_kernels.backends import BackendError
from compiled_kernels.blocked.shape import TILE_ROWS
from compiled_kernels.builder.target import MLIR_TYPES, Named
from compiled_kernels.decode_step.step import check_tensors
from compiled_kernels.mlir import Kernel, compile_shape
from compiled_kernels.mlir.invoke import BoundCall, check_argument
from compiled_kernels.prefill.shape import BlockShape
from compiled_kernels.prefill.text import after_text, before_text


class PrefillBuffers:
    """Tensors for the results between the products of blocks, for up to `rows` rows. Blocks of equal sizes share
    them.
    """

    def __init__(self, rows: int):
        self.rows = max(rows, TILE_ROWS)
        self.sizes = torch.zeros(1, dtype=torch.long)
        self._tensors: dict[tuple[str, int, str], Tensor] = {}

    def get(self, name: str, columns: int, element: str) -> Tensor:
        """Return the buffer [row, columns] called `name`; a new buffer is filled with zeros."""
        key = name, columns, element
        if key not in self._tensors:
            dtype = next(dtype for dtype, name in MLIR_TYPES.items() if name == element)
            self._tensors[key] = torch.zeros(self.rows, columns, dtype=dtype)
        return self._tensors[key]


class PrefillBlock:
    """The compiled parts of one block before and after attention. `weights` has the tensors that the parts' arguments
    name and that are no buffers. Raises BackendError if one is missing or of another shape or type.

    Fill `x` (and the angles) of `buffers`; `before(rows)` gives q, k, v [row, head, dim]; `after(mixed)` takes the
    result of attention, in the same order, and adds to x. Results are views of the buffers, valid until the next call.
    """

    def __init__(self, shape: BlockShape, weights: Mapping[str, Tensor], buffers: PrefillBuffers):
        own = {}
        for name, (columns, element) in shape.buffers().items():
            whose = f"{name}_{shape.layer.rotary_index}" if name in ("cos", "sin") else name
            own[name] = buffers.get(whose, columns, element)
        wanted = {named.name: named for named in (*shape.before, *shape.after) if named.name not in own}
        check_tensors(weights, list(wanted.values()))
        self.shape, self.buffers, self._rows = shape, buffers, 0
        level, tensors = shape.target.level, {**weights, **own}
        before = compile_shape(before_text, shape.code_key, entry="before", level=level)
        after = compile_shape(after_text, shape.code_key, entry="after", level=level)
        self.kernels = before, after
        self._before = _bound(before, shape.before, tensors, buffers)
        self._after = _bound(after, shape.after, tensors, buffers)
        self.angles = [own[named.name] for named in shape.layer_kernel.angles]
        self._heads = [own[name] for name, _ in shape.heads]
        self.x, self._mixed = own["x"], own["mixed"]

    def before(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        if not 0 < rows <= self.buffers.rows:
            raise BackendError(f"prefill: {rows} rows, but the buffers are for 1 to {self.buffers.rows}")
        self._rows, self.buffers.sizes[0] = rows, max(rows, TILE_ROWS)  # rows beyond are computed and not read
        self._before()
        q, k, v = (part[:rows].view(rows, -1, self.shape.layer.head_dim) for part in self._heads)
        return q, k, v

    def after(self, mixed: Tensor) -> None:
        """Run the part after attention, for the rows that `before` was called with."""
        rows, heads, dim = self._rows, self.shape.layer.num_heads, self.shape.layer.head_dim
        check_argument("prefill", "mixed", mixed, (rows, heads, dim), (self._mixed.dtype,), contiguous=False)
        self._mixed[:rows].view(rows, heads, dim).copy_(mixed)
        self._after()


def _bound(
    kernel: Kernel, arguments: Sequence[Named], tensors: Mapping[str, Tensor], buffers: PrefillBuffers
) -> BoundCall:
    return BoundCall(kernel.address, [*(tensors[name] for name, _ in arguments), buffers.sizes])
