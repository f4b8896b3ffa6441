"""Define the face of a program: it packs a plan into its bucket and computes the logits of what it packed."""

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

Timed = Callable[[Callable[..., Any], str], Callable[..., Any]]  # a function as it is timed under a name
Call = tuple[list[int], tuple[Span, ...]]  # indices of spans in a plan, and the parts of these spans


class StepProgram:
    """Compute batches of one kind of bucket; unless overridden: any plan, in one call, without anything compiled."""

    kind = "blocks"  # its key in the table of a `StepRunner`
    made = 0  # functions compiled or captured so far
    resets = False  # `reset` has something to forget
    every_row = False  # logits are of every row of the bucket, not of the sampled ones alone
    is_timed = False  # all of its work is done by functions that `StepThreads` times
    gathers_logits = False  # logits come from several ranks: fewer travel where only the largest of each row counts
    untimed = ""  # why its functions cannot be timed one by one
    described: StepKernels | None = None  # the functions of any step
    artifacts: Mapping[str, str] = MappingProxyType({})  # digests of what is compiled, by name
    chosen: Mapping[int, Tensor] | None = None  # experts by layer in the last call; None: as the modules kept them

    def __init__(self, model: Transformer, store: KVStore):
        self.model, self.store = model, store

    def accept(self, plan: StepPlan) -> StepPlan | None:
        """Return the plan in the rows that this program computes; None where it cannot."""
        return plan

    def calls(self, plan: StepPlan) -> Iterator[Call] | None:
        """Return the calls that compute a plan one after another; None where one call computes it."""
        return None

    def pack(self, plan: StepPlan) -> Any:
        """Pack a plan into the argument of a call: a `TokenBatch`, or the buffers of a bucket."""
        return pack_batch(plan, self.store.page_size, self.model.device, self.rows_of(plan))

    def rows_of(self, plan: StepPlan) -> int | None:
        """Return the number of rows that a plan of decodes is padded to; None: no padding."""
        return len(plan.spans) + plan.padding_rows if plan.padding_rows else None

    def __call__(self, batch: Any, layers: tuple[int, ...] = ()) -> Tensor:
        """Return logits [sample, vocab], and the states after `layers` as further columns (see early_layers.py); or
        [row, vocab] of `every_row`, which the next call overwrites."""
        raise NotImplementedError

    def reset(self) -> None:
        """Forget what was compiled: the model's modules have changed."""

    def kernels(self, length: int) -> StepKernels:
        """Describe which compiled functions carry out a step of `length` tokens of one sequence."""
        return self.described or unknown(type(self).__name__, str(self.model.backend))

    def time_functions(self, timed: Timed, tokens: int) -> None:
        """Time the compiled functions that the program calls itself in steps of `tokens` tokens, under their names in
        `kernels`; it is used for nothing else."""
