"""Compare the predicted memory of a loaded model with the bytes of its tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from workbench.machine.processor import allocated_weight_bytes
from workbench.memory.capacity import lasting_bytes_per_token
from workbench.model.memory import KVGroupBytes
from workbench.model.memory import weight_bytes as weights_by_formula
from workbench.trace.events import Stepped, StepPlanned

if TYPE_CHECKING:
    from workbench.engine.runner import Runner


@dataclass(frozen=True)
class MemoryComparison:
    """Predicted and measured bytes of one item. `note` explains a difference."""

    name: str
    predicted: float
    measured: float
    note: str = ""


def compare_memory(runner: Runner) -> tuple[MemoryComparison, ...]:
    """Compare predicted and measured bytes of the weights and cache of `runner` as loaded.

    All pages of the cache are allocated from the start, and so is each table's null page.

    Example: `workbench.compare_memory(workbench.load("demo"))`
    """
    model, store = runner.model, runner.store
    spec = getattr(model, "rank_spec", model.spec)  # with several ranks, this rank's share
    weights = weights_by_formula(spec, model.dtype.itemsize, model.format)
    beside = sum(buffer.nbytes for buffer in model.buffers())
    note = f"buffers that are no weights take {beside:,}" if beside else ""
    pages = " + ".join(f"{count + 1:,}" for count in store.num_pages)
    return (
        MemoryComparison("weights", weights, allocated_weight_bytes(runner), note),
        MemoryComparison(f"cache: {pages} pages of {store.page_size}", store.expected_bytes, store.bytes),
        MemoryComparison("cache, a token", store.bytes_per_token, lasting_bytes_per_token(store)),
    )


def compare_step_memory(runner: Runner, formed: StepPlanned, stepped: Stepped) -> MemoryComparison:
    """Compare the predicted bytes of one step's pages with the pages in use.

    Pages of requests outside the step, and of cached prefixes, are not part of the prediction."""
    spans = [(span.start, span.tokens) for span in formed.spans]
    predicted = step_bytes(runner_bytes_by_table(runner), spans, runner.store.page_size)
    note = "pages of requests that this step did not serve" if stepped.kv_bytes > predicted else ""
    return MemoryComparison(f"cache, in use in step {stepped.step}", predicted, stepped.kv_bytes, note)


def runner_bytes_by_table(runner: Runner) -> tuple[KVGroupBytes, ...]:
    """Return for each page table of the runner's cache the predicted bytes stored per token."""
    store = runner.store
    return tuple(
        KVGroupBytes(table, 0.0, store.page_bytes(number))
        if table.is_recurrent
        else KVGroupBytes(
            table, sum(store.specs[layer].group_bytes_per_token(number, store.dtype) for layer in table.layers)
        )
        for number, table in enumerate(store.groups)
    )


def step_bytes(tables: Iterable[KVGroupBytes], spans: Iterable[tuple[int, int]], page_size: int) -> float:
    """Return the bytes of the pages that a step reads or writes. `spans` are the step's (start, number of tokens) for
    each sequence."""
    total, spans = 0.0, tuple(spans)
    for part in tables:
        for start, tokens in spans:
            if part.table.is_recurrent:
                total += (2 if start else 1) * part.state_bytes
                continue
            first, others = part.table.pages_needed(start, start + tokens, page_size)
            total += (len(first) + len(others)) * page_size * part.bytes_per_token
    return total
