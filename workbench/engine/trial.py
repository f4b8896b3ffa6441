"""Autotune the decode backend of one model on this machine (`auto`); results are remembered.

Compiled backends are tried in order of preference. The first with right results is taken, unless eager is clearly
faster in several stable trials. Later ones are not compiled: that takes Inductor half a minute, and where both were
timed the first was always faster (experiments/LOG.md).
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor

from compiled_kernels import Lane, LaneError
from compiled_kernels.remembered import Remembered, cpu_model, directory, machine
from compiled_kernels.right import PASSING, right_lane
from workbench.cache.format import CacheFormat
from workbench.engine.exact import Held, decode_of_one, expected
from workbench.engine.executors import EagerExecutor, Unit, executor_for
from workbench.engine.lanes import Lanes
from workbench.engine.plan import StepPlan
from workbench.engine.rounds import CLEARLY, Times, timed
from workbench.errors import WorkbenchError
from workbench.model.transformer import Transformer

FILE = "decode_lanes.json"
RULE = 2  # raised when what follows from a trial changes: older entries are tried again
CONTEXT = 256  # tokens before the one that is decoded
PREFILL = 128  # tokens of the prefill whose attention is checked
TRIALS = 3  # the modules as written are taken only if all of them say so
MOST_LETTERS = 300  # of a reason


@dataclass(frozen=True)
class Trial:
    """The result for one model: seconds of a decode step by backend, and reasons for refused and untried ones.

    A result is remembered if its figures are stable and no backend failed for a temporary reason.
    """

    chosen: Lane
    seconds: Mapping[Lane, float]
    refused: Mapping[Lane, str] = field(default_factory=dict)
    untried: Mapping[Lane, str] = field(default_factory=dict)
    quiet: bool = True

    def __str__(self) -> str:
        order = sorted(self.seconds.items(), key=lambda item: item[1])
        told = [f"{lane} {1000 * seconds:.2f} ms" for lane, seconds in order]
        told += [f"{lane} not chosen: {reason}" for lane, reason in self.refused.items()]
        told += [f"{lane} not tried: {reason}" for lane, reason in self.untried.items()]
        return ", ".join(told)


def measured(
    lanes: Lanes,
    model: Transformer,
    page_size: int,
    unit: Unit = "block",
    kept: Remembered | None = None,
    cache: CacheFormat | None = None,
    cache_dtype: torch.dtype | None = None,
) -> Lanes:
    """Return `backends` of `auto` with the decode backend that is fastest for `model` on this machine, and why.

    The candidates decode one token in turns with the eager modules. One that fails, or whose logits are further from
    exact ones than arithmetic in this precision is, is not chosen. Results are remembered by machine, versions, model
    and threads.

    Args:
        backends: the backends to start from.
        model: the model, with its weights.
        page_size: tokens per page.
        compile_unit: what Inductor compiles at once.
        remembered: where results are remembered.
        cache: format of keys and values.
        cache_dtype: type of what is not quantized; the model's unless given.
    """
    if lanes.decode is lanes.blocks:
        return lanes  # there is only one candidate
    kept = kept or Remembered(directory() / FILE)
    held = Held(model.cache_shapes(cache), page_size, cache_dtype or model.dtype)
    key = _key(model, lanes, held, unit)
    found = _trial(kept.load().get(key))
    if found is None:
        found = _tried(lanes, model, held, unit)
        if found.quiet:
            kept.add(key, _entry(found, model, held, unit))
    told = [str(found)]
    if lanes.blocks in found.refused:  # a backend that cannot decode is not used for prefill either
        lanes = replace(lanes, blocks=Lane.EAGER, reads=Lane.EAGER)
        told.append("prefill on eager")
    lanes = replace(lanes, vetted=lanes.blocks not in found.untried)
    reads, why = _reads(lanes, model, held)
    reason = f"auto: a decode step takes {', '.join(told)}; {why}"
    return replace(lanes, decode=found.chosen, reads=reads, reason=reason)


def _reads(lanes: Lanes, model: Transformer, held: Held) -> tuple[Lane, str]:
    """Choose the backend of a prefill's attention, by the first layer's shape."""
    if lanes.reads is lanes.blocks:
        return lanes.blocks, f"attention of a prefill on {lanes.blocks}"
    attention, format = model.spec.layers[0].attention, held.shapes[0].format
    arguments = {
        "contexts": (PREFILL,), "spans": (PREFILL,), "groups": attention.groups, "share": attention.share,
        "dim": attention.dim, "size": held.page_size, "dtype": model.dtype,
    }  # fmt: skip
    if format.packed:
        arguments |= {"formats": format.kinds, "run": format.group, "columns": format.columns, "lag": format.residual}
    try:
        operator = "quantized_attention" if format.packed else "paged_attention"
        choice = right_lane(operator, arguments, (lanes.reads, lanes.blocks))
    except LaneError as error:
        return lanes.blocks, str(error)
    return choice.lane, f"attention of a prefill {choice.reason}"


def _tried(lanes: Lanes, model: Transformer, held: Held, unit: Unit) -> Trial:
    """Try the candidates in order, each beside the eager modules, until one is taken."""
    (store, plan), (plain_store, _) = (decode_of_one(model, held, CONTEXT) for _ in range(2))
    plain = EagerExecutor(_as_written(model), plain_store)
    refused: dict[Lane, str] = {}
    seconds: dict[Lane, float] = {}
    quiet = True
    candidates = [lane for lane in dict.fromkeys((lanes.decode, lanes.blocks)) if lane is not Lane.EAGER]
    with torch.inference_mode():
        exact, bound = expected(model, store, plan)
        for number, lane in enumerate(candidates):
            try:
                # A store of its own: what one candidate writes, another must not find there.
                own, _ = decode_of_one(model, held, CONTEXT)
                step = executor_for(model, own, replace(lanes, decode=lane), unit).forward
                away = (step(plan).double() - exact).abs().max().item()
            except Exception as error:  # whatever a compiler throws is a reason not to choose its lane
                ours = isinstance(error, (LaneError, WorkbenchError))
                words = str(error) if ours else f"{type(error).__name__}: {error}"
                refused[lane] = " ".join(words.split())[:MOST_LETTERS]
                quiet = quiet and not isinstance(error, PASSING)
                continue
            if not away <= bound:
                refused[lane] = f"its logits are {away:.2g} away from exact ones, {bound:.2g} is allowed"
                continue
            trials = list(_trials(lane, step, plain.forward, plan))
            for each in trials:
                seconds |= {one: min(found, seconds.get(one, math.inf)) for one, found in each.seconds.items()}
            quiet = quiet and trials[-1].quiet
            if not _slower(lane, trials[-1]):
                why = f"{lane} is right, no slower than eager, and compiled already"
                return Trial(lane, seconds, refused, dict.fromkeys(candidates[number + 1 :], why), quiet)
        if not seconds:
            seconds = dict(timed({Lane.EAGER: lambda: plain.forward(plan)}).seconds)
    return Trial(Lane.EAGER, seconds, refused, {}, quiet)


def _trials(
    lane: Lane, step: Callable[[StepPlan], Tensor], plain: Callable[[StepPlan], Tensor], plan: StepPlan
) -> Iterator[Times]:
    """Yield trials of `lane` beside the eager modules: one, and more as long as they say that it is clearly slower."""
    for _ in range(TRIALS):
        found = timed({lane: lambda: step(plan), Lane.EAGER: lambda: plain(plan)})
        yield found
        if not _slower(lane, found):
            return


def _slower(lane: Lane, found: Times) -> bool:
    """Return whether a stable trial says that `lane` is clearly slower than the eager modules."""
    return found.quiet and found.seconds[Lane.EAGER] < CLEARLY * found.seconds[lane]


def _as_written(model: Transformer) -> Transformer:
    """Copy the modules to the eager backend, over the same weights."""
    shared = {id(each): each for each in (*model.parameters(), *model.buffers())}
    plain = copy.deepcopy(model, shared)
    plain.run_on(Lane.EAGER)
    return plain


def _key(model: Transformer, lanes: Lanes, held: Held, unit: Unit) -> str:
    what: Mapping[str, Any] = {
        "rule": RULE,
        "machine": machine(),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "model": model.spec.model_dump(mode="json"),
        "weights": [*model.format.named, str(model.dtype)],
        "lanes": [lanes.decode, lanes.blocks],
        "cache": [held.page_size, str(held.dtype), [repr(shape) for shape in held.shapes]],
        "unit": unit,
    }
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def _entry(found: Trial, model: Transformer, held: Held, unit: Unit) -> dict[str, Any]:
    """What is remembered: the trial, and what a reader of `workbench doctor` is told it was of."""
    return {
        "chosen": str(found.chosen),
        "seconds": {str(lane): value for lane, value in found.seconds.items()},
        "refused": {str(lane): why for lane, why in found.refused.items()},
        "untried": {str(lane): why for lane, why in found.untried.items()},
        "unit": unit,
        "rule": RULE,
        **tried_of(model, held),
    }


def tried_of(model: Transformer, held: Held) -> dict[str, Any]:
    """Return what a trial was of, where and when, as `workbench doctor` tells it."""
    kinds = dict.fromkeys(str(shape.format) for shape in held.shapes)
    return {
        "model": model.spec.name,
        "weights": f"{model.format.blocks} {str(model.dtype).removeprefix('torch.')}{_activations(model)}",
        "cache": f"{', '.join(kinds)} {str(held.dtype).removeprefix('torch.')}",
        "threads": torch.get_num_threads(),
        "cpu": cpu_model(),
        "here": machine(),
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M}",
    }


def _trial(found: Any) -> Trial | None:
    """Parse a remembered entry; None if it is damaged."""
    try:
        seconds = {Lane(lane): float(value) for lane, value in found["seconds"].items()}
        refused, untried = (
            {Lane(lane): str(why) for lane, why in found[name].items()} for name in ("refused", "untried")
        )
        chosen = Lane(found["chosen"])
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    sound = chosen in seconds and all(0 < value < math.inf for value in seconds.values())
    return Trial(chosen, seconds, refused, untried) if sound else None


def _activations(model: Transformer) -> str:
    kind = model.format.activations
    return "" if kind == "float" else f", activations {kind}"


def remembered_trials(kept: Remembered | None = None) -> list[dict[str, Any]]:
    """Return every remembered result, newest last, without damaged entries.

    `valid` says whether machine, versions, code and rule are still those it was made with.
    """
    entries = (kept or Remembered(directory() / FILE)).load().values()
    named = ("model", "weights", "cache", "unit", "threads", "cpu", "here", "date")
    sound = [entry for entry in entries if _trial(entry) is not None and all(name in entry for name in named)]
    return [{**entry, "valid": entry["here"] == machine() and entry.get("rule") == RULE} for entry in sound]
