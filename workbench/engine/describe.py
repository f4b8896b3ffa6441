"""Describe a runner as text: its model, backends, cache and queues."""

from __future__ import annotations

from compiled_kernels.linear.matrix_format import DENSE_MATRIX
from workbench.display import Table, format_cell
from workbench.executors.select import Backends
from workbench.kv_cache.store import KVStore
from workbench.model.transformer import Transformer
from workbench.prompt.tokenization.tokenizer import Tokenizer
from workbench.scheduler.scheduler import Scheduler
from workbench.scheduler.validate import policy_name
from workbench.units import format_bytes


def runner_headline(model: Transformer, backends: Backends, scheduler: Scheduler) -> str:
    """Return one line of text about a runner: model, backends, requests, pages."""
    used, there = (sum(getattr(pool, name) for pool in scheduler.pools) for name in ("num_used", "num_pages"))
    return (
        f"{model.spec.name}: {model.spec.num_parameters:,} parameters, backend {backends}; "
        f"requests: {len(scheduler.running)} running, {len(scheduler.waiting)} waiting; {used} of {there} pages used"
    )


def runner_table(
    model: Transformer, tokenizer: Tokenizer | None, backends: Backends, store: KVStore, scheduler: Scheduler
) -> Table:
    """Return a table with a row for each part of a runner."""
    limits = scheduler.limits
    weights = str(model.dtype).removeprefix("torch.")
    if model.format.of_blocks != (DENSE_MATRIX,):
        weights += f", {model.format} in its products"
    if model.spec.has_experts and model.format.of_experts.codes != model.format.blocks.codes:
        weights += f", {model.format.of_experts.codes} in its experts"
    if model.format.activations != "float":
        weights += f", with activations in {model.format.activations}"
    pages = [f"{pool.num_used} of {pool.num_pages}" for pool in scheduler.pools]
    formats = " / ".join(dict.fromkeys(str(shape.format) for shape in store.specs if shape.cache_groups))
    rows = [
        ("model", f"{model.spec.name}, {model.spec.num_parameters:,} parameters"),
        ("weights", f"{weights}, {format_bytes(model.weight_bytes)} on {model.device}"),
        ("backend", f"{backends}: {backends.reason}"),
        ("cache", f"{formats}, {format_bytes(store.bytes)}, {format_cell(store.bytes_per_token)} bytes a token"),
        ("pages used", f"{'; '.join(pages)}, of {store.page_size} tokens each"),
        ("a step", f"at most {limits.max_num_seqs} requests and {limits.max_num_batched_tokens} tokens"),
        ("policy", policy_name(scheduler.policy)),
        ("tokenizer", "none" if tokenizer is None else repr(tokenizer)),
        ("running", ", ".join(each.request_id for each in scheduler.running) or "none"),
        ("waiting", ", ".join(each.request_id for each in scheduler.waiting) or "none"),
    ]
    return Table(f"runner of {model.spec.name}", rows)
