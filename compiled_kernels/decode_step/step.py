"""Compiled decode steps, bound to the tensors of a model's weights and cache.

`DecodeStep` goes from embedded tokens to logits in one call, `DecodeSteps` from tokens to the tokens that follow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from compiled_kernels.backends import BackendError
from compiled_kernels.builder.target import MLIR_TYPES, SIZE_BOUND, Named
from compiled_kernels.decode_step.draw import MAX_THREADS
from compiled_kernels.decode_step.multi_step import loop_buffers, loop_inputs, steps_text
from compiled_kernels.decode_step.shape import StepShape
from compiled_kernels.decode_step.text import buffers, step_inputs, step_text
from compiled_kernels.mlir import compile_shape
from compiled_kernels.mlir.invoke import BoundCall, check_argument


class DecodeStep:
    """A compiled step. `tensors` are the weights, keys and values named by `step_inputs(shape)`. Raises BackendError if
    one is missing, superfluous, or of another shape or type.

    Fill `x`, `lengths`, `tables` and `angles`, call the step, and read `logits` (or `x`): all are buffers of the step
    for `shape.rows` rows, as far as the step has them. For each mixture layer, by its index, `chosen` [row, chosen
    expert] has the numbers of the experts of each row. Give an unused row length 1 and pages that no other row reads.

    Steps with equal numbers of rows may share buffers: buffers in `pool` are reused by name, and others are added to
    it.
    """

    def __init__(self, shape: StepShape, tensors: Mapping[str, Tensor], pool: dict[str, Tensor] | None = None):
        check_tensors(tensors, step_inputs(shape))
        self.shape = shape
        self.kernel = compile_shape(step_text, shape, entry="decode_step", level=shape.target.level)
        self._own = allocate(buffers(shape), pool)
        self._call = BoundCall(
            self.kernel.address, [*self._own.values(), *(tensors[name] for name, _ in step_inputs(shape))]
        )
        self.x = self._own["x"]
        nothing = torch.empty(0)
        self.logits, self.lengths = (self._own.get(name, nothing) for name in ("logits", "lengths"))
        self.chosen = {
            i: self._own[f"chosen_{i}"].view(shape.rows, kind.experts.per_row)
            for i, kind in enumerate(shape.layers)
            if kind.experts is not None and shape.has("feedforward")
        }
        tables, angles = (range(shape.num_page_tables), shape.rotary_dims) if shape.has("attention") else ((), ())
        self.tables = tuple(self._own[f"table_{i}"] for i in tables)
        self.angles = {i: (self._own[f"cos_{i}"], self._own[f"sin_{i}"]) for i in angles}

    def __call__(self, threads: int | None = None) -> None:
        self._call(threads)

    @property
    def bytes(self) -> int:
        """Return the bytes of the step's own buffers: inputs, outputs and activations."""
        return sum(buffer.nbytes for buffer in self._own.values())


def check_tensors(tensors: Mapping[str, Tensor], wanted: Sequence[Named]) -> None:
    """Raise BackendError unless `tensors` has exactly the names in `wanted`, each with the declared shape and type."""
    names = {name for name, _ in wanted}
    for problem, wrong in (("lacks", names - tensors.keys()), ("has no place for", tensors.keys() - names)):
        if wrong:
            raise BackendError(
                f"decode step: {problem} {', '.join(sorted(wrong)[:4])} ({len(wrong)} of {len(names)} tensors)"
            )
    for name, kind in wanted:
        sizes, types = _read(kind)
        if sizes[0] == SIZE_BOUND:  # any number of pages is accepted
            sizes = (len(tensors[name]), *sizes[1:])
        check_argument("decode step", name, tensors[name], sizes, types)


def allocate(wanted: Sequence[Named], pool: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return zeroed buffers of these names and types; buffers in `pool` are reused."""
    pool = {} if pool is None else pool
    for name, kind in wanted:
        if name not in pool:
            pool[name] = _buffer(kind)
    return {name: pool[name] for name, _ in wanted}


def _buffer(kind: str) -> Tensor:
    sizes, types = _read(kind)
    return torch.zeros(sizes, dtype=types[0])


def _read(kind: str) -> tuple[tuple[int, ...], tuple[torch.dtype, ...]]:
    """Return shape and types of a tensor, from its memref type."""
    *sizes, element = kind.removeprefix("memref<").removesuffix(">").split("x")
    return tuple(map(int, sizes)), tuple(dtype for dtype, name in MLIR_TYPES.items() if name == element)


class DecodeSteps:
    """Up to `max_steps` decode steps of `shape` in one call. `tensors` has the tensors named by `step_inputs(shape)`,
    the `embedding`, and for each table i of angles `all_cos_i` and `all_sin_i` [context, dim / 2].

    Fill `ids` [row], `lengths` [row] (each context, that token included) and `tables`; call with the number of steps;
    read `next_tokens` [step, row], the token after each step: the largest logit (the first of equal ones), or the value
    of `forced_tokens` [step, row] if it is not -1.

    Steps that `weigh` also sample: fill `scale` [row], the reciprocal of the temperature, and `uniforms` [step, row]
    with numbers from [0, 1), or a negative number to take the largest logit. `all_logits` [step, row, vocab] are the
    logits that were sampled from. A row ends before the first token that is not forced, if the highest probability (of
    the softmax of scaled logits) is below `threshold` [1], 0 by default; the call ends when all rows have ended. Fill
    `kept` [row] with the number of steps, 0 for unused rows; afterwards it has the number of each row's valid
    `next_tokens`.
    """

    def __init__(
        self,
        shape: StepShape,
        tensors: Mapping[str, Tensor],
        max_steps: int,
        context: int,
        weigh: bool = False,
    ):
        check_tensors(tensors, [*loop_inputs(shape, context), *step_inputs(shape)])
        self.shape, self.max_steps, self.weighs = shape, max_steps, weigh
        self.kernel = compile_shape(
            steps_text, shape, max_steps, context, weigh, entry="decode_steps", level=shape.target.level
        )
        loop, own = allocate(loop_buffers(shape, max_steps, weigh)), allocate(buffers(shape))
        weights = [tensors[name] for name, _ in (*loop_inputs(shape, context), *step_inputs(shape))]
        first = len(loop_inputs(shape, context))
        self._call = BoundCall(self.kernel.address, [*loop.values(), *weights[:first], *own.values(), *weights[first:]])
        self._count = loop["count"]
        self.ids, self.forced_tokens, self.next_tokens = loop["ids"], loop["known"], loop["chosen"]
        nothing = torch.empty(0)
        self.threshold, self.scale, self.uniforms, self.all_logits, self.kept, self._left = (
            loop.get(name, nothing) for name in ("threshold", "scale", "uniforms", "all_logits", "kept", "left")
        )
        self.lengths, self.tables = own["lengths"], tuple(own[f"table_{i}"] for i in range(shape.num_page_tables))

    def __call__(self, steps: int, threads: int | None = None) -> None:
        if not 1 <= steps <= self.max_steps:
            raise ValueError(f"{steps} steps requested, but 1 to {self.max_steps} are compiled")
        self._count[0] = steps
        if self.weighs:
            self._left[0] = 1
        self._call(min(threads or torch.get_num_threads(), MAX_THREADS))
