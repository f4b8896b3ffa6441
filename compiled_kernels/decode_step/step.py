"""Compiled decode steps, bound to a model's weights and cache.

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
    """A compiled step. `tensors` holds those that `step_inputs(shape)` names: weights, keys and values; raises
    BackendError where one is missing, is too many, or is of another shape or type.

    Fill `x`, `lengths`, `tables` and `angles`, call, and read `logits` (or `x`): all of them buffers of the step's
    own, for `shape.rows` rows, where the step has such; `chosen` [row, expert's place] says for each layer that is a
    mixture, by its index, which experts each row took. An unused row has length 1 and pages that no other row reads.

    Steps of as many rows may share their buffers: those whose name is in `pool` are taken, others are added to it.
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
    """Raise BackendError unless `tensors` are exactly those wanted, each as it is declared."""
    names = {name for name, _ in wanted}
    for problem, wrong in (("lacks", names - tensors.keys()), ("has no place for", tensors.keys() - names)):
        if wrong:
            raise BackendError(
                f"decode step: {problem} {', '.join(sorted(wrong)[:4])} ({len(wrong)} of {len(names)} tensors)"
            )
    for name, kind in wanted:
        sizes, types = _read(kind)
        if sizes[0] == SIZE_BOUND:  # a pool of any number of pages
            sizes = (len(tensors[name]), *sizes[1:])
        check_argument("decode step", name, tensors[name], sizes, types)


def allocate(wanted: Sequence[Named], pool: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return buffers of these names and types, new ones all zero; what `pool` has already is taken from there."""
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
    """Up to `max_steps` greedy steps of `shape`; `tensors` holds those that `step_inputs(shape)` names, `embedding`,
    and for each table of angles `all_cos_i` and `all_sin_i` [context, dim / 2].

    Fill `ids` [row], `lengths` [row] (of each text, that token included) and `tables`; call with the number of steps;
    read `next_tokens` [step, row], what follows each step's token: the largest logit, the first of equal ones, or what
    `forced_tokens` [step, row] says, where that is not -1.

    Steps that `weigh` also draw tokens: fill `scale` [row], one over the temperature, and `uniforms` [step, row] with
    numbers from [0, 1), below 0 where the largest is taken; `all_logits` [step, row, vocab] are what they were drawn
    from. And a row ends before the first token that is not known and of whose likeliest the probability (of the softmax
    of its scaled logits) is below `threshold` [1], 0 unless filled; the call, where all rows have ended. Fill `kept`
    [row] with the number of steps, 0 for rows that are not used; read there how many of each row's `next_tokens` count.
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
            raise ValueError(f"{steps} steps asked for, 1 to {self.max_steps} are compiled")
        self._count[0] = steps
        if self.weighs:
            self._left[0] = 1
        self._call(min(threads or torch.get_num_threads(), MAX_THREADS))
