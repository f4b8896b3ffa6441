"""Autotune the decode backend of one model on this machine (the setting `auto`); results are remembered.

Compiled backends are tried in order of preference. The first with correct results is chosen, unless eager is clearly
faster in several stable trials. Later ones are not compiled: compiling takes Inductor half a minute, and whenever both
were timed the first was faster (experiments/LOG.md).
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compiled_kernels import Backend, BackendError
from compiled_kernels.correct_backend import COMPILER_ERRORS, TRANSIENT_ERRORS, first_correct_backend
from compiled_kernels.result_cache import ResultCache, cpu_model, machine_key
from compiled_kernels.rounds import RoundTimes, time_in_rounds
from compiled_kernels.threads import in_threads
from workbench.errors import WorkbenchError
from workbench.executors.build import CompileUnit, build_step_runner
from workbench.executors.programs.eager import EagerProgram
from workbench.executors.reference import (
    CLEARLY_FASTER_RATIO,
    CacheLayout,
    reference_logits,
    single_decode_step,
)
from workbench.executors.select import Backends
from workbench.executors.step_runner import StepRunner
from workbench.files import cache_directory
from workbench.kv_cache.format import CacheFormat
from workbench.model.transformer import Transformer
from workbench.scheduler.plan import StepPlan
from workbench.units import format_seconds

AUTOTUNE_FILE = "decode_backends.json"
TOOK = "trial_seconds"  # key of an entry's seconds for the whole trial
FIRST_TRIAL_SECONDS = 60.0  # default estimate: a small model takes less on two cores, a large one more
AUTOTUNE_VERSION = 2  # increased when the conclusions from a trial change: older entries are tried again
CONTEXT_TOKENS = 256  # context tokens of the timed decode
PREFILL_TOKENS = 128  # tokens of the prefill that checks attention
MAX_TRIALS = 3  # eager modules are chosen only if all trials agree
BEYOND_CONTENTION = 4.0  # a ratio of times that contention cannot explain
HOPELESS_RATIO = 25.0  # eager modules this many times slower are timed once
MAX_REASON_CHARACTERS = 300  # characters of a reason


@dataclass(frozen=True)
class AutotuneResult:
    """The result of autotuning for one model: seconds of a decode step by backend, and the reasons for refused and
    untried backends.

    A result is remembered if no backend failed for a temporary reason, and if its times are stable or differ by more
    than contention can explain.
    """

    chosen: Backend
    seconds: Mapping[Backend, float]
    refused: Mapping[Backend, str] = field(default_factory=dict)
    untried: Mapping[Backend, str] = field(default_factory=dict)
    is_stable: bool = True

    def __str__(self) -> str:
        order = sorted(self.seconds.items(), key=lambda item: item[1])
        parts = [f"{backend} {format_seconds(seconds)}" for backend, seconds in order]
        parts += [f"{backend} not chosen: {reason}" for backend, reason in self.refused.items()]
        parts += [f"{backend} not tried: {reason}" for backend, reason in self.untried.items()]
        return ", ".join(parts)


def autotune_backend(
    backends: Backends,
    model: Transformer,
    page_size: int,
    compile_unit: CompileUnit = "block",
    remembered: ResultCache | None = None,
    cache: CacheFormat | None = None,
    cache_dtype: torch.dtype | None = None,
) -> Backends:
    """Return `backends`, which `auto` has selected, with the decode backend that is fastest for `model` on this
    machine, and the reason.

    Each candidate decodes one token, alternating with the eager modules. A candidate is refused if it fails, or if the
    error of its logits exceeds the bound for arithmetic in this precision. Results are remembered by machine, versions,
    model and threads.

    Args:
        backends: the backends to start from.
        model: the model, with its weights.
        page_size: tokens per page.
        compile_unit: the unit that Inductor compiles, `block` or `step`.
        remembered: the store of remembered results.
        cache: format of keys and values.
        cache_dtype: dtype of unquantized keys and values; default: the model's.
    """
    if backends.decode is backends.blocks:
        return backends  # there is only one candidate
    remembered = remembered or ResultCache(cache_directory() / AUTOTUNE_FILE)
    held = CacheLayout(model.cache_shapes(cache), page_size, cache_dtype or model.dtype)
    key = _key(model, backends, held, compile_unit)
    found = _trial(remembered.load().get(key))
    if found is None:
        if backends.decode is Backend.MLIR:
            model.use_code_panels()  # a step reads panels; a remembered choice lays them out later
        began = time.perf_counter()
        found = _tried(backends, model, held, compile_unit)
        if found.is_stable:
            took = time.perf_counter() - began
            remembered.add(key, {**_entry(found, model, held, compile_unit), TOOK: took})
    if found.chosen is not Backend.MLIR:
        model.use_code_panels(False)
    parts = [str(found)]
    if backends.blocks in found.refused:  # a backend that cannot decode is not used for prefill either
        backends = replace(backends, blocks=Backend.EAGER, attention=Backend.EAGER)
        parts.append("prefill on eager")
    backends = replace(backends, checked=backends.blocks not in found.untried)
    reads, why = _reads(backends, model, held)
    reason = f"auto: a decode step takes {', '.join(parts)}; {why}"
    return replace(backends, decode=found.chosen, attention=reads, reason=reason)


def _reads(backends: Backends, model: Transformer, held: CacheLayout) -> tuple[Backend, str]:
    """Choose the backend for attention in prefill, by the first layer's shape."""
    if backends.attention is backends.blocks:
        return backends.blocks, f"attention of a prefill on {backends.blocks}"
    attention, format = model.spec.layers[0].attention, held.specs[0].format
    arguments = {
        "contexts": (PREFILL_TOKENS,), "spans": (PREFILL_TOKENS,),
        "num_kv_heads": attention.num_kv_heads, "queries_per_kv": attention.queries_per_kv,
        "dim": attention.head_dim, "size": held.page_size, "dtype": model.dtype,
    }  # fmt: skip
    if format.quantized:
        arguments |= {
            "formats": format.key_value_formats,
            "run": format.quant_group,
            "columns": format.columns,
            "lag": format.residual_length,
        }
    try:
        operator = "quantized_attention" if format.quantized else "paged_attention"
        choice = first_correct_backend(operator, arguments, (backends.attention, backends.blocks))
    except BackendError as error:
        return backends.blocks, str(error)
    return choice.backend, f"attention of a prefill {choice.reason}"


def _tried(backends: Backends, model: Transformer, held: CacheLayout, unit: CompileUnit) -> AutotuneResult:
    """Try the candidates in order, each against the eager modules, until one is chosen."""
    fresh_step = partial(single_decode_step, model, held, CONTEXT_TOKENS)
    (store, plan), (plain_store, _) = in_threads(fresh_step, (0, 0))  # random seed
    plain = StepRunner(EagerProgram(_as_written(model), plain_store))
    refused: dict[Backend, str] = {}
    seconds: dict[Backend, float] = {}
    quiet = True
    candidates = [
        backend for backend in dict.fromkeys((backends.decode, backends.blocks)) if backend is not Backend.EAGER
    ]
    with torch.inference_mode():
        ((exact, bound),) = in_threads(partial(reference_logits, model, store), (plan,))
        for number, backend in enumerate(candidates):
            try:
                # A separate store: a candidate must not read what another has written.
                ((own, _),) = in_threads(fresh_step, (0,))
                step = build_step_runner(model, own, replace(backends, decode=backend), unit).forward
                away = (step(plan).double() - exact).abs().max().item()
            except (BackendError, WorkbenchError, *COMPILER_ERRORS) as error:
                ours = isinstance(error, (BackendError, WorkbenchError))
                words = str(error) if ours else f"{type(error).__name__}: {error}"
                refused[backend] = " ".join(words.split())[:MAX_REASON_CHARACTERS]
                quiet = quiet and not isinstance(error, TRANSIENT_ERRORS)
                continue
            if not away <= bound:
                refused[backend] = f"its logits are {away:.2g} away from exact ones, {bound:.2g} is allowed"
                continue
            trials = list(_trials(backend, step, plain.forward, plan))
            for each in trials:
                seconds |= {one: min(found, seconds.get(one, math.inf)) for one, found in each.seconds.items()}
            quiet = quiet and (trials[-1].is_stable or _far_faster(backend, trials[-1]))
            if not _slower(backend, trials[-1]):
                why = f"{backend} is right, no slower than eager, and compiled already"
                return AutotuneResult(backend, seconds, refused, dict.fromkeys(candidates[number + 1 :], why), quiet)
        if not seconds:
            seconds = dict(time_in_rounds({Backend.EAGER: lambda: plain.forward(plan)}).seconds)
    return AutotuneResult(Backend.EAGER, seconds, refused, {}, quiet)


def _trials(
    backend: Backend, step: Callable[[StepPlan], Tensor], plain: Callable[[StepPlan], Tensor], plan: StepPlan
) -> Iterator[RoundTimes]:
    """Yield trials of `backend` against the eager modules: one, and more as long as `backend` is clearly slower."""
    for _ in range(MAX_TRIALS):
        steps = {backend: lambda: step(plan), Backend.EAGER: lambda: plain(plan)}
        found = time_in_rounds(steps, hopeless=HOPELESS_RATIO)
        yield found
        if not _slower(backend, found):
            return


def _slower(backend: Backend, found: RoundTimes) -> bool:
    """Return whether a trial is stable and `backend` is clearly slower than the eager modules."""
    return found.is_stable and found.seconds[Backend.EAGER] < CLEARLY_FASTER_RATIO * found.seconds[backend]


def _far_faster(backend: Backend, found: RoundTimes) -> bool:
    """Return whether `backend` is so much faster than the eager modules that no contention explains it."""
    return BEYOND_CONTENTION * found.seconds[backend] < found.seconds[Backend.EAGER]


def _as_written(model: Transformer) -> Transformer:
    """Copy the modules to the eager backend, with shared weights."""
    shared = {id(each): each for each in (*model.parameters(), *model.buffers())}
    plain = copy.deepcopy(model, shared)
    plain.set_backend(Backend.EAGER)
    return plain


def usual_seconds() -> float:
    """Return the expected seconds of autotuning, compiling included: the longest remembered time."""
    known = [
        each.get(TOOK)
        for each in ResultCache(cache_directory() / AUTOTUNE_FILE).load().values()
        if isinstance(each, dict) and each.get("here") == machine_key()
    ]
    return max((each for each in known if isinstance(each, float)), default=FIRST_TRIAL_SECONDS)


def _key(model: Transformer, backends: Backends, held: CacheLayout, unit: CompileUnit) -> str:
    tried = [backends.decode, backends.blocks]
    return trial_key(model, held, rule=AUTOTUNE_VERSION, cores=os.cpu_count(), backends=tried, unit=unit)


def trial_key(model: Transformer, held: CacheLayout, **settings: Any) -> str:
    """Return the key of a remembered result: it is equal for the same machine, model, cache and other settings."""
    what: Mapping[str, Any] = {
        "machine": machine_key(),
        "threads": torch.get_num_threads(),
        "model": model.spec.model_dump(mode="json"),
        "weights": [*model.format.named, str(model.dtype)],
        "cache": [held.page_size, str(held.dtype), [repr(shape) for shape in held.specs]],
        **settings,
    }
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def _entry(found: AutotuneResult, model: Transformer, held: CacheLayout, unit: CompileUnit) -> dict[str, Any]:
    """Return the stored entry: the trial, and the description that `workbench doctor` prints."""
    return {
        "chosen": str(found.chosen),
        "seconds": {str(backend): value for backend, value in found.seconds.items()},
        "refused": {str(backend): why for backend, why in found.refused.items()},
        "untried": {str(backend): why for backend, why in found.untried.items()},
        "unit": unit,
        "rule": AUTOTUNE_VERSION,
        **tried_of(model, held),
    }


def tried_of(model: Transformer, held: CacheLayout) -> dict[str, Any]:
    """Return what a remembered result is about: the model, the cache, the machine and the date, as `workbench doctor`
    prints them.
    """
    kinds = dict.fromkeys(str(shape.format) for shape in held.specs)
    return {
        "model": model.spec.name,
        "weights": f"{model.format} {str(model.dtype).removeprefix('torch.')}{_activations(model)}",
        "cache": f"{', '.join(kinds)} {str(held.dtype).removeprefix('torch.')}",
        "threads": torch.get_num_threads(),
        "cpu": cpu_model(),
        "here": machine_key(),
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M}",
    }


def _trial(found: Any) -> AutotuneResult | None:
    """Parse a remembered entry; None if it is damaged."""
    try:
        seconds = {Backend(backend): float(value) for backend, value in found["seconds"].items()}
        refused, untried = (
            {Backend(backend): str(why) for backend, why in found[name].items()} for name in ("refused", "untried")
        )
        chosen = Backend(found["chosen"])
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    sound = chosen in seconds and all(0 < value < math.inf for value in seconds.values())
    return AutotuneResult(chosen, seconds, refused, untried) if sound else None


def _activations(model: Transformer) -> str:
    kind = model.format.activations
    return "" if kind == "float" else f", activations {kind}"


def remembered_autotune_results(remembered: ResultCache | None = None) -> list[dict[str, Any]]:
    """Return every remembered result, newest last, without damaged entries.

    `valid` tells whether machine, versions, code and rule are unchanged since then.
    """
    entries = (remembered or ResultCache(cache_directory() / AUTOTUNE_FILE)).load().values()
    named = ("model", "weights", "cache", "unit", "threads", "cpu", "here", "date")
    sound = [entry for entry in entries if _trial(entry) is not None and all(name in entry for name in named)]
    return [
        {**entry, "valid": entry["here"] == machine_key() and entry.get("rule") == AUTOTUNE_VERSION} for entry in sound
    ]
