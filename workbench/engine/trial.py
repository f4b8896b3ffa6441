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
from workbench.engine.exact import Held, decode_of_one, expected
from workbench.engine.executors import Unit, executor_for
from workbench.engine.lanes import Lanes
from workbench.engine.plan import StepPlan
from workbench.errors import WorkbenchError
from workbench.model.transformer import Transformer

FILE = "decode_lanes.json"
CONTEXT = 256  # tokens before the one that is decoded
PREFILL = 512  # tokens of the prefill whose attention is compared
ROUNDS = 15
MOST_LETTERS = 300  # of a reason
BUSY = 1.5  # a median this much above the quickest round was disturbed: chosen by, not remembered


def measured(
    lanes: Lanes,
    model: Transformer,
    page_size: int,
    unit: Unit = "block",
    kept: Remembered | None = None,
    cache: CacheFormat | None = None,
    cache_dtype: torch.dtype | None = None,
) -> Lanes:
    """`lanes` of `auto` with the decode lane that is quickest for `model` on this machine, and why.

    The candidates decode one token in turn; `unit` is what Inductor compiles. One that fails, or whose logits are
    further from exact ones than arithmetic in this precision is, is not chosen. What was measured is remembered by
    machine, versions, model and threads. Raises WorkbenchError where no candidate is left.
    """
    if lanes.decode is lanes.blocks:
        return lanes  # there is nothing to choose between
    kept = kept or Remembered(directory() / FILE)
    held = Held(model.cache_shapes(cache), page_size, cache_dtype or model.dtype)
    key = _key(model, lanes, held, unit)
    found = _sound(kept.load().get(key))
    if found is None:
        found = _tried(lanes, model, held, unit)
        if found.pop("quiet"):
            kept.add(key, found)
    seconds = {Lane(name): value for name, value in found["seconds"].items()}
    told = [f"{lane} {1000 * value:.2f} ms" for lane, value in sorted(seconds.items(), key=lambda item: item[1])]
    told += [f"{lane} not chosen: {reason}" for lane, reason in found["refused"].items()]
    decode = min(seconds, key=seconds.__getitem__)
    if lanes.blocks in found["refused"]:  # what cannot decode is not trusted with a prefill either
        lanes = replace(lanes, blocks=Lane.EAGER, reads=Lane.EAGER)
        told.append("prefill on eager")
    reads, why = _reads(lanes, model, held)
    return replace(lanes, decode=decode, reads=reads, reason=f"auto: a decode step takes {', '.join(told)}; {why}")


def _reads(lanes: Lanes, model: Transformer, held: Held) -> tuple[Lane, str]:
    """The lane of a prefill's attention, by the first layer's shape."""
    attention, format = model.spec.layers[0].attention, held.shapes[0].format
    arguments = {
        "contexts": (PREFILL,), "spans": (PREFILL,), "groups": attention.groups, "share": attention.share,
        "dim": attention.dim, "size": held.page_size, "dtype": model.dtype,
    }  # fmt: skip
    if format.packed:
        arguments |= {"formats": format.kinds, "run": format.group, "columns": format.columns, "lag": format.residual}
    try:
        choice = best_lane(
            "quantized_attention" if format.packed else "paged_attention", arguments, (lanes.reads, lanes.blocks)
        )
    except LaneError as error:
        return lanes.blocks, str(error)
    return choice.lane, f"attention of {PREFILL} tokens {choice.reason}"


def _tried(lanes: Lanes, model: Transformer, held: Held, unit: Unit) -> dict[str, Any]:
    candidates = (lanes.decode, lanes.blocks)
    # A store each: what one candidate writes, another must not find there.
    (store, plan), *stores = (decode_of_one(model, held, CONTEXT) for _ in range(1 + len(candidates)))
    seconds: dict[Lane, list[float]] = {}
    refused: dict[str, str] = {}
    with torch.inference_mode():
        steps: dict[Lane, Callable[[StepPlan], Tensor]] = {}
        exact, bound = expected(model, store, plan)
        for lane, (own, _) in zip(candidates, stores, strict=True):
            try:
                executor = executor_for(model, own, replace(lanes, decode=lane), unit)
                rows = executor.forward(plan).double()
            except Exception as error:  # whatever a compiler throws is a reason not to choose its lane
                ours = isinstance(error, (LaneError, WorkbenchError))
                words = str(error) if ours else f"{type(error).__name__}: {error}"
                refused[str(lane)] = " ".join(words.split())[:MOST_LETTERS]
                continue
            away = (rows - exact).abs().max().item()
            if not away <= bound:
                refused[str(lane)] = f"its logits are {away:.2g} away from exact ones, {bound:.2g} is allowed"
                continue
            steps[lane], seconds[lane] = executor.forward, []
        for _ in range(ROUNDS):
            for lane, step in steps.items():
                began = time.perf_counter()
                step(plan)
                seconds[lane].append(time.perf_counter() - began)
    if not seconds:
        told = "; ".join(f"{lane}: {reason}" for lane, reason in refused.items())
        raise WorkbenchError(f"lane auto: no lane decodes {model.spec.name} rightly here ({told}); lane eager may")
    medians = {str(lane): statistics.median(values) for lane, values in seconds.items()}
    quiet = all(statistics.median(values) < BUSY * min(values) for values in seconds.values())
    return {"seconds": medians, "refused": refused, "quiet": quiet, "model": model.spec.name}


def _key(model: Transformer, lanes: Lanes, held: Held, unit: Unit) -> str:
    what: Mapping[str, Any] = {
        "machine": machine(),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "model": model.spec.model_dump(mode="json"),
        "weights": [model.format.blocks, model.format.head, model.format.group, str(model.dtype)],
        "lanes": [lanes.decode, lanes.blocks],
        "cache": [held.page_size, str(held.dtype), [repr(shape) for shape in held.shapes]],
        "unit": unit,
    }
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def _sound(found: Any) -> dict[str, Any] | None:
    """A remembered entry that can be used; a damaged one is as if it had never been."""
    try:
        values = [float(value) for lane, value in found["seconds"].items() if Lane(lane)]
        sound = all(0 < value < float("inf") for value in values) and isinstance(found["refused"], dict) and values
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    return found if sound else None
