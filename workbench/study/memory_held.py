"""What a loaded model was predicted to take in memory, beside what its tensors do take."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from workbench.model.memory import TableBytes
from workbench.model.memory import weight_bytes as weights_by_formula
from workbench.study.capacity import stored_bytes_per_token
from workbench.study.memory import weight_bytes
from workbench.trace.events import Formed, Stepped

if TYPE_CHECKING:
    from workbench.engine.runner import Runner


@dataclass(frozen=True)
class Held:
    """Bytes of one thing, by the formula and counted; `note` says what the difference is, where there is one."""

    what: str
    predicted: float
    measured: float
    note: str = ""


def held(runner: Runner) -> tuple[Held, ...]:
    """Weights and cache of `runner` as it was loaded. The cache's pages are there from the start, in use or not, and
    each table's null page with them."""
    model, store = runner.model, runner.store
    weights = weights_by_formula(model.spec, model.dtype.itemsize, model.format)
    beside = sum(buffer.nbytes for buffer in model.buffers())
    note = f"buffers that are no weights take {beside:,}" if beside else ""
    pages = " + ".join(f"{count + 1:,}" for count in store.pages)
    return (
        Held("weights", weights, weight_bytes(runner), note),
        Held(f"cache: {pages} pages of {store.page_size}", store.formula_bytes, store.bytes),
        Held("cache, a token", store.bytes_per_token, stored_bytes_per_token(store)),
    )


def held_in_step(runner: Runner, formed: Formed, stepped: Stepped) -> Held:
    """The pages that a step was computed on. Those of requests that it did not serve, and of earlier ones whose prefix
    is kept, were not predicted."""
    spans = [(span.start, span.tokens) for span in formed.spans]
    predicted = step_bytes(parts_of_runner(runner), spans, runner.store.page_size)
    note = "pages of requests that this step did not serve" if stepped.kv_bytes > predicted else ""
    return Held(f"cache, in use in step {stepped.step}", predicted, stepped.kv_bytes, note)


def parts_of_runner(runner: Runner) -> tuple[TableBytes, ...]:
    """What each table keeps of a token, by the formula."""
    store = runner.store
    return tuple(
        TableBytes(table, sum(store.shapes[layer].table_bytes(number, store.dtype) for layer in table.layers))
        for number, table in enumerate(store.tables)
    )


def step_bytes(parts: Iterable[TableBytes], spans: Iterable[tuple[int, int]], page_size: int) -> float:
    """Of the pages that a step over `spans`, (start, tokens) pairs, reads or writes."""
    total, spans = 0.0, tuple(spans)
    for part in parts:
        for start, tokens in spans:
            first, others = part.table.held(start, start + tokens, page_size)
            total += (len(first) + len(others)) * page_size * part.bytes_per_token
    return total
