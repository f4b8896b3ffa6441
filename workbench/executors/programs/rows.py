"""Compute any step as rows of one compiled function, with one token per row.

The setting `batch_invariant` requires this program, and on the backend mlir it is the fastest program for a step of few
tokens. A row is computed at the end of its own context. The order of its sums never depends on other rows: products
walk the hidden size in one order, attention walks the context in pages and splits that depend only on the row's
position, norms and gates see only the row. So a token has the same bits in any batch, in a chunk of any length, and
after a cached prefix.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from compiled_kernels.decode_step import DecodeStep, StepShape
from compiled_kernels.decode_step.text import step_inputs
from workbench.batch import TokenBatch
from workbench.executors.contention import StepThreads
from workbench.executors.packing import DECODE_BUCKETS
from workbench.executors.programs.decode_step import RotaryCaches, check_mlir_step, step_shape, step_tensors
from workbench.executors.programs.kernels import one_function
from workbench.executors.programs.program import Call, StepProgram
from workbench.kv_cache.store import KVStore
from workbench.model.transformer import Transformer
from workbench.scheduler.plan import Span, StepPlan

CONTEXT_SPLITS = 2  # splits of every context: the number must not depend on rows or threads


class RowsProgram(StepProgram):
    """A program that computes plans in calls of one bucket of rows each. Tokens of a sequence are in order; quantized
    layers quantize old tokens before each call.
    """

    kind = "rows"
    resets = is_timed = True
    described = one_function("mlir: its tokens are rows of one compiled function", "all blocks", "mlir")

    def __init__(
        self,
        model: Transformer,
        store: KVStore,
        buckets: tuple[int, ...] = DECODE_BUCKETS,
        threads: StepThreads | None = None,
        angles: RotaryCaches | None = None,
        max_tokens: float = math.inf,
    ):
        """Prepare the program.

        Args:
            model: the model.
            store: its KV cache.
            buckets: numbers of rows to compile for, ascending. The last is the maximum of a call: with 64 rows, reading
                the weights again for each call costs little compared with the products.
            threads: the runner of compiled steps.
            angles: the model's angles, shared with other programs.
            max_tokens: maximum tokens of a plan; longer plans, which need many small calls, are left to other programs.
        """
        super().__init__(model, store)
        self.buckets, self.max_tokens = buckets, max_tokens
        self._threads, self.angles = threads or StepThreads(), angles or RotaryCaches(model)
        # Maximum tokens of one sequence: no token may become old enough to quantize within its own call.
        self.max_tokens_per_call = buckets[-1] if store.residual_length is None else max(1, store.residual_length)
        self.reset()

    def reset(self) -> None:
        check_mlir_step(self.model, self.store)
        self.angles.reset()
        self._steps, self.artifacts = dict[tuple[str, int], DecodeStep](), {}

    def accept(self, plan: StepPlan) -> StepPlan | None:
        if self.max_tokens < math.inf:
            many_calls = max(span.length for span in plan.spans) > self.max_tokens_per_call < self.buckets[-1]
            if plan.layers or many_calls or plan.num_tokens > self.max_tokens:
                return None
        return plan

    def rows_of(self, plan: StepPlan) -> int | None:
        padding = min(plan.padding_rows, max(0, self.buckets[-1] - plan.num_tokens))
        return len(plan.spans) + padding if padding else None

    @torch.inference_mode()
    def __call__(self, batch: TokenBatch, layers: tuple[int, ...] = ()) -> Tensor:
        return self._logits(self._hidden(batch).index_select(0, batch.logits_indices))

    def compute_logits(self, x: Tensor) -> Tensor:
        """Compute the logits of the last block's output: [sample, hidden] -> [sample, vocab]."""
        sampled = x.split(self.buckets[-1])
        if len(sampled) == 1:
            return self._logits(sampled[0])
        return torch.cat([self._logits(rows).clone() for rows in sampled])

    def calls(self, plan: StepPlan) -> Iterator[Call]:
        waiting = list(enumerate(plan.spans))
        while waiting:
            room, places, spans, left = self.buckets[-1], [], [], []
            for place, span in waiting:
                length = min(span.length, room, self.max_tokens_per_call)
                room -= length
                if length:
                    places.append(place)
                    spans.append(_cut(span, span.start, length))
                if length < span.length:
                    left.append((place, _cut(span, span.start + length, span.length - length)))
            yield places, tuple(spans)
            waiting = left

    def _hidden(self, batch: TokenBatch) -> Tensor:
        """Return the last block's output for each token, float32, in a buffer: [token, hidden]."""
        rows = batch.num_tokens
        step = self._step("blocks", rows)
        self.store.quantize_pending(batch)
        step.x[:rows], step.x[rows:] = self.model.embed(batch.token_ids), 0
        of_row = torch.repeat_interleave(batch.span_starts.diff().long())
        last = batch.span_starts[1:].index_select(0, of_row) - 1
        later = last - torch.arange(rows)  # number of later tokens in each row's span
        step.lengths[:rows] = batch.context_lengths.index_select(0, of_row) - later
        step.lengths[rows:] = 1
        for mine, table in zip(step.tables, batch.page_tables, strict=True):
            mine[:rows, : table.shape[1]] = table.index_select(0, of_row)
            mine[rows:, 0] = 0
        self.angles.fill(step.angles, batch.positions)
        self._threads.run(f"blocks {step.shape.rows}", step)
        self.chosen = step.chosen
        return step.x[:rows]

    def _logits(self, x: Tensor) -> Tensor:
        """Compute [sample, hidden] -> [sample, vocab], in a buffer."""
        if not len(x):
            return x.new_empty(0, self.model.spec.vocab_size)
        step = self._step("head", len(x))
        step.x[: len(x)], step.x[len(x) :] = x, 0
        self._threads.run(f"head {step.shape.rows}", step)
        logits = step.logits[: len(x)]
        if not self.model.spec.final_logit_softcapping:
            return logits
        # torch's vectorized functions treat the end of their input differently, so rows are capped one by one.
        return torch.stack([self.model.cap_logits(row.clone()) for row in logits])

    def _step(self, part: str, rows: int) -> DecodeStep:
        key = part, next(size for size in self.buckets if size >= rows)
        if key not in self._steps:
            step = self._steps[key] = self._build(self.compile_shape(*key))
            self.artifacts = {**self.artifacts, f"{part} {key[1]}": step.kernel.digest}
            self.made += 1
        return self._steps[key]

    def _build(self, shape: StepShape) -> DecodeStep:
        """Compile a step and bind it to the model's weights and the store's pages."""
        tensors, names = step_tensors(self.model, self.store), [name for name, _ in step_inputs(shape)]
        return DecodeStep(shape, {name: tensors[name] for name in names})

    def compile_shape(self, part: str, rows: int) -> StepShape:
        """Return the shape that one `part` is compiled for: the `blocks`, or the `head` alone."""
        whole = replace(
            step_shape(self.model, self.store.page_size, rows, self.store.specs),
            chunks=CONTEXT_SPLITS,
            same_sequence=True,
        )
        return replace(whole, head=None) if part == "blocks" else replace(whole, layers=())


def _cut(span: Span, start: int, length: int) -> Span:
    """Return the part of a span from position `start`, with its share of the logits and drafts."""
    end, known = start + length, span.end - len(span.draft_token_ids)
    scored = max(0, end - max(start, span.end - span.num_logits))
    drafts = span.draft_token_ids[max(0, start - known) : max(0, end - known)]
    last = span.needs_sample and end == span.end
    return span._replace(start=start, length=length, needs_sample=last, requested_logits=scored, draft_token_ids=drafts)
