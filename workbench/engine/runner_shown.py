"""Describe a runner as text: its model, cache and queues. Nothing of it is changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.engine.lawful import policy_name
from workbench.shown import Table, format_cell

if TYPE_CHECKING:
    from workbench.engine.runner import Runner


def runner_headline(runner: Runner) -> str:
    spec, queues = runner.model.spec, runner.scheduler
    used, there = sum(pool.num_used for pool in queues.pools), sum(pool.num_pages for pool in queues.pools)
    return (
        f"{spec.name}: {spec.num_parameters:,} parameters, backend {runner.backends}; {len(queues.running)} requests run, "
        f"{len(queues.waiting)} wait, {used} of {there} pages used"
    )


def runner_table(runner: Runner) -> Table:
    model, store, queues = runner.model, runner.store, runner.scheduler
    limits = queues.limits
    weights = str(model.dtype).removeprefix("torch.")
    if model.format.blocks != "dense":
        weights += f", {model.format.blocks} in its products"
    if model.format.activations != "float":
        weights += f", with activations in {model.format.activations}"
    pages = [f"{pool.num_used} of {pool.num_pages}" for pool in queues.pools]
    formats = dict.fromkeys(str(shape.format) for shape in store.specs)
    rows = [
        ("model", f"{model.spec.name}, {model.spec.num_parameters:,} parameters"),
        ("weights", f"{weights}, {_size_text(model.weight_bytes)} on {model.device}"),
        ("backend", f"{runner.backends}: {runner.backends.reason}"),
        ("cache", f"{' / '.join(formats)}, {_size_text(store.bytes)}, {format_cell(store.bytes_per_token)} bytes a token"),
        ("pages used", f"{'; '.join(pages)}, of {store.page_size} tokens each"),
        ("a step", f"at most {limits.max_num_seqs} requests and {limits.max_num_batched_tokens} tokens"),
        ("policy", policy_name(queues.policy)),
        ("tokenizer", "none" if runner.tokenizer is None else repr(runner.tokenizer)),
        ("running", ", ".join(each.request_id for each in queues.running) or "none"),
        ("waiting", ", ".join(each.request_id for each in queues.waiting) or "none"),
    ]
    return Table(f"runner of {model.spec.name}", rows)


def _size_text(size: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:,.4g} {unit}"
        size /= 1024
    return f"{size:,.4g} GiB"
