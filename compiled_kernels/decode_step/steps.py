"""Multi-step decode, bound to a model's weights and cache: one call from tokens to the tokens that follow."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from compiled_kernels.decode_step.several import MAX_THREADS, loop_buffers, loop_inputs, steps_text
from compiled_kernels.decode_step.shape import StepShape
from compiled_kernels.decode_step.step import check_tensors, allocate
from compiled_kernels.decode_step.text import buffers, step_inputs
from compiled_kernels.mlir import compile_text
from compiled_kernels.openmp import BoundCall, libgomp_path


class DecodeSteps:
    """Up to `max_steps` greedy steps of `shape`; `tensors` holds those that `step_inputs(shape)` names, `embedding`,
    and for each table of angles `all_cos_i` and `all_sin_i` [context, dim / 2].

    Fill `ids` [row], `lengths` [row] (of each text, that token included) and `tables`; call with the number of steps;
    read `chosen` [step, row], what follows each step's token: the largest logit, the first of equal ones, or what
    `known` [step, row] says, where that is not -1.

    Steps that `weigh` also draw tokens: fill `scale` [row], one over the temperature, and `uniforms` [step, row] with
    numbers from [0, 1), below 0 where the largest is taken; `all_logits` [step, row, vocab] are what they were drawn
    from. And a row ends before the first token that is not known and of whose likeliest the probability (of the softmax
    of its scaled logits) is below `threshold` [1], 0 unless filled; the call, where all rows have ended. Fill `kept`
    [row] with the number of steps, 0 for rows that are not used; read there how many of each row's `chosen` count.
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
        self.kernel = compile_text(
            steps_text(shape, max_steps, context, weigh), "decode_steps", level=shape.target.level, libraries=(libgomp_path(),)
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
