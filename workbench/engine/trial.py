"""The lane `auto`: which lane decodes one model fastest here. Tried once with the model itself, then remembered."""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from compiled_kernels import Lane, LaneError
from compiled_kernels.choice import best_lane
from compiled_kernels.remembered import Remembered, directory, machine
from workbench.cache.format import CacheFormat
from workbench.cache.pages import pages_for
from workbench.cache.store import KVStore
from workbench.cache.tables import tables_of
from workbench.engine.executors import EagerExecutor, executor_for
from workbench.engine.lanes import Lanes
from workbench.engine.plan import Span, StepPlan
from workbench.errors import WorkbenchError
from workbench.model.transformer import Transformer
from workbench.request import Request, Sequence

FILE = "decode_lanes.json"
CONTEXT = 256  # tokens before the one that is decoded
PREFILL = 512  # tokens of the prefill whose attention is compared
ROUNDS = 15
WRONG = 0.2  # of the logits' size: rounding makes a few hundredths in bfloat16, a wrong kernel about 1
BUSY = 1.5  # a median this much above the quickest round was disturbed: chosen by, not remembered


def measured(
    lanes: Lanes,
    model: Transformer,
    page_size: int,
    cache: CacheFormat | None = None,
    cache_dtype: torch.dtype | None = None,
    kept: Remembered | None = None,
) -> Lanes:
    """`lanes` of `auto` with the decode lane that is quickest for `model` on this machine, and why.

    The candidates decode one token in turn. One that fails, or whose logits are not those of the modules as written,
    is not chosen. What was measured is remembered by machine, versions, model and threads.
    """
    if lanes.decode is lanes.blocks:
        return lanes  # there is nothing to choose between
    kept = kept or Remembered(directory() / FILE)
    store, plan = _decode_of_one(model, page_size, cache, cache_dtype)
    key = _key(model, lanes, store)
    found = _sound(kept.load().get(key))
    if found is None:
        found = _tried(lanes, model, store, plan)
        if found.pop("quiet"):
            kept.add(key, found)
    seconds = {Lane(name): value for name, value in found["seconds"].items()}
    told = [f"{lane} {1000 * value:.2f} ms" for lane, value in sorted(seconds.items(), key=lambda item: item[1])]
    told += [f"{lane} not chosen: {reason}" for lane, reason in found["refused"].items()]
    decode = min(seconds, key=seconds.__getitem__, default=lanes.blocks)
    reads, why = _reads(lanes, model, store)
    return replace(lanes, decode=decode, reads=reads, reason=f"auto: a decode step takes {', '.join(told)}; {why}")


def _reads(lanes: Lanes, model: Transformer, store: KVStore) -> tuple[Lane, str]:
    """The lane of a prefill's attention, by the first layer's shape."""
    attention, format = model.spec.layers[0].attention, store.shapes[0].format
    arguments = {
        "contexts": (PREFILL,), "spans": (PREFILL,), "groups": attention.groups, "share": attention.share,
        "dim": attention.dim, "size": store.page_size, "dtype": model.dtype,
    }  # fmt: skip
    if format.packed:
        arguments |= {"formats": format.kinds, "run": format.group, "columns": format.columns, "lag": format.residual}
    operator = "quantized_attention" if format.packed else "paged_attention"
    choice = best_lane(operator, arguments, (lanes.reads, lanes.blocks))
    return choice.lane, f"attention of {PREFILL} tokens {choice.reason}"


def _tried(lanes: Lanes, model: Transformer, store: KVStore, plan: StepPlan) -> dict[str, Any]:
    seconds: dict[Lane, list[float]] = {}
    refused: dict[str, str] = {}
    with torch.inference_mode():
        steps: dict[Lane, Callable[[StepPlan], Tensor]] = {}
        plain = EagerExecutor(model, store).forward(plan).clone()
        for lane in (lanes.decode, lanes.blocks):
            try:
                executor = executor_for(model, store, replace(lanes, decode=lane))
                rows = executor.forward(plan).clone()
            except (LaneError, WorkbenchError) as error:
                refused[str(lane)] = str(error)
                continue
            away = float((rows - plain).norm() / plain.norm())
            if not away <= WRONG:
                refused[str(lane)] = f"its logits are {away:.2g} of their size away from the modules' own"
                continue
            steps[lane], seconds[lane] = executor.forward, []
        for _ in range(ROUNDS):
            for lane, step in steps.items():
                began = time.perf_counter()
                step(plan)
                seconds[lane].append(time.perf_counter() - began)
    medians = {str(lane): statistics.median(values) for lane, values in seconds.items()}
    quiet = all(statistics.median(values) < BUSY * min(values) for values in seconds.values())
    return {"seconds": medians, "refused": refused, "quiet": quiet, "model": model.spec.name}


def _decode_of_one(
    model: Transformer, page_size: int, cache: CacheFormat | None = None, dtype: torch.dtype | None = None
) -> tuple[KVStore, StepPlan]:
    """One sequence whose last token is to be computed, over an empty cache of its own."""
    length = min(CONTEXT + 1, model.spec.context)
    shapes, pages = model.cache_shapes(cache), pages_for(length, page_size)
    tables = len(tables_of(shape.tables for shape in shapes))
    store = KVStore(shapes, (pages,) * tables, page_size, dtype or model.dtype, str(model.device))
    sequence = Sequence.of(Request("trial", (0,) * (length - 1)), 0)
    sequence.token_ids.append(0)
    sequence.computed, sequence.pages = length - 1, (list(range(1, pages + 1)),) * tables
    return store, StepPlan(0, (Span.of(sequence, 1),))


def _key(model: Transformer, lanes: Lanes, store: KVStore) -> str:
    what: Mapping[str, Any] = {
        "machine": machine(),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "model": model.spec.model_dump(mode="json"),
        "weights": [model.format.blocks, model.format.head, model.format.group, str(model.dtype)],
        "lanes": [lanes.decode, lanes.blocks],
        "cache": [store.page_size, str(store.dtype), [repr(shape) for shape in store.shapes]],
    }
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def _sound(found: Any) -> dict[str, Any] | None:
    """A remembered entry that can be used; a damaged one is as if it had never been."""
    try:
        values = [float(value) for lane, value in found["seconds"].items() if Lane(lane)]
        sound = isinstance(found["refused"], dict) and all(0 < value < float("inf") for value in values)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    return found if sound else None
