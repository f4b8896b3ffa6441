"""Describe a runner as text: its model, cache and queues. Nothing of it is changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.engine.lawful import name_of
from workbench.shown import Table, short

if TYPE_CHECKING:
    from workbench.engine.runner import Runner


def headline(runner: Runner) -> str:
    spec, queues = runner.model.spec, runner.scheduler
    used, there = sum(pool.used for pool in queues.pools), sum(pool.pages for pool in queues.pools)
    return (
        f"{spec.name}: {spec.parameters:,} parameters, lane {runner.lanes}; {len(queues.running)} requests run, "
        f"{len(queues.waiting)} wait, {used} of {there} pages used"
    )


def table(runner: Runner) -> Table:
    model, store, queues = runner.model, runner.store, runner.scheduler
    limits = queues.limits
    weights = str(model.dtype).removeprefix("torch.")
    if model.format.blocks != "dense":
        weights += f", {model.format.blocks} in its products"
    if model.format.activations != "float":
        weights += f", with activations in {model.format.activations}"
    pages = [f"{pool.used} of {pool.pages}" for pool in queues.pools]
    formats = dict.fromkeys(str(shape.format) for shape in store.shapes)
    rows = [
        ("model", f"{model.spec.name}, {model.spec.parameters:,} parameters"),
        ("weights", f"{weights}, {_bytes(model.weight_bytes)} on {model.device}"),
        ("lane", f"{runner.lanes}: {runner.lanes.reason}"),
        ("cache", f"{' / '.join(formats)}, {_bytes(store.bytes)}, {short(store.bytes_per_token)} bytes a token"),
        ("pages used", f"{'; '.join(pages)}, of {store.page_size} tokens each"),
        ("a step", f"at most {limits.max_num_seqs} requests and {limits.max_num_batched_tokens} tokens"),
        ("policy", name_of(queues.policy)),
        ("tokenizer", "none" if runner.tokenizer is None else repr(runner.tokenizer)),
        ("running", ", ".join(each.request_id for each in queues.running) or "nobody"),
        ("waiting", ", ".join(each.request_id for each in queues.waiting) or "nobody"),
    ]
    return Table(f"runner of {model.spec.name}", rows)


def _bytes(size: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:,.4g} {unit}"
        size /= 1024
    return f"{size:,.4g} GiB"
