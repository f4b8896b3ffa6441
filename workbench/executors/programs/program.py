"""Define the interface of a program: it packs a plan into its bucket and computes the logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from workbench.executors.packing import pack_batch
from workbench.executors.programs.kernels import StepKernels, unknown
from workbench.kv_cache.store import KVStore
from workbench.model.transformer import Transformer
from workbench.scheduler.plan import Span, StepPlan

Timed = Callable[[Callable[..., Any], str], Callable[..., Any]]  # a function to time, with its name
Call = tuple[list[int], tuple[Span, ...]]  # indices of spans in a plan, and the parts of these spans


class StepProgram:
    """The interface of a program, which computes batches of one kind of bucket. By default a program accepts any plan,
    computes it in one call, and compiles nothing.
    """

    kind = "blocks"  # its key in the table of a `StepRunner`
    made = 0  # number of functions compiled or captured so far
    resets = False  # whether `reset` has an effect
    every_row = False  # logits are of every row of the bucket, not only of the sampled rows
    is_timed = False  # all work is in functions that `StepThreads` times
    gathers_logits = False  # logits are gathered from ranks; fewer are sent if only the largest of each row is needed
    untimed = ""  # the reason why its functions cannot be timed one by one
    described: StepKernels | None = None  # the functions of any step
    artifacts: Mapping[str, str] = MappingProxyType({})  # digests of compiled code, by name
    chosen: Mapping[int, Tensor] | None = None  # expert counts by layer in the last call; None: see the modules

    def __init__(self, model: Transformer, store: KVStore):
        self.model, self.store = model, store

    def accept(self, plan: StepPlan) -> StepPlan | None:
        """Return the plan in the rows that this program computes; None if it does not accept the plan."""
        return plan

    def calls(self, plan: StepPlan) -> Iterator[Call] | None:
        """Split a plan into consecutive calls; None if one call computes it."""
        return None

    def pack(self, plan: StepPlan) -> Any:
        """Pack a plan into the argument of a call: a `TokenBatch`, or the buffers of a bucket."""
        return pack_batch(plan, self.store.page_size, self.model.device, self.rows_of(plan))

    def rows_of(self, plan: StepPlan) -> int | None:
        """Return the number of rows that a plan of decodes is padded to; None: no padding."""
        return len(plan.spans) + plan.padding_rows if plan.padding_rows else None

    def __call__(self, batch: Any, layers: tuple[int, ...] = ()) -> Tensor:
        """Return logits [sample, vocab], with the states after `layers` as further columns (see early_layers.py); with
        `every_row`, [row, vocab]. The next call may overwrite them.
        """
        raise NotImplementedError

    def reset(self) -> None:
        """Discard compiled code because the model's modules have changed."""

    def kernels(self, length: int) -> StepKernels:
        """Describe the compiled functions of a step of `length` tokens of one sequence."""
        return self.described or unknown(type(self).__name__, str(self.model.backend))

    def time_functions(self, timed: Timed, tokens: int) -> None:
        """Time the program's own compiled functions in steps of `tokens` tokens, under their names in `kernels`. The
        program is not used afterwards.
        """
