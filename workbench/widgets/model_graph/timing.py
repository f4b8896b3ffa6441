"""Time the operators of a step on eager modules, or its compiled functions, on a copy of the modules that shares the
weights."""

from __future__ import annotations

import copy
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from compiled_kernels import Backend
from workbench.executors.build import build_step_runner
from workbench.executors.contention import StepThreads
from workbench.executors.programs.eager import EagerProgram
from workbench.executors.reference import CacheLayout, single_decode_step
from workbench.executors.step_runner import StepRunner
from workbench.kv_cache.store import KVStore
from workbench.model.transformer import Transformer
from workbench.scheduler.plan import Span, StepPlan
from workbench.widgets.model_graph.data import GraphStep
from workbench.widgets.model_graph.kernels import step_kernels

if TYPE_CHECKING:
    from workbench.engine.runner import Runner

# Within a block: the module, its method, and the timer of the time that is not spent in timed calls below it.
BLOCK_CALLS = (
    ("", "forward", "block"),
    ("attention_norm", "forward", "attention_norm"),
    ("attention", "qkv_proj", "qkv_proj"),
    ("attention", "apply_rotary", "rotary"),
    ("attention", "attend", "attend"),
    ("attention", "o_proj", "o_proj"),
    ("attention", "project", "attention.project"),
    ("attention", "write_and_read", "attention.write_and_read"),
    ("attention.qkv", "forward", "qkv"),
    ("attention.down", "forward", "qkv"),
    ("attention.query_up", "forward", "query_up"),
    ("attention.query_norm", "forward", "head_norms"),
    ("attention.key_norm", "forward", "head_norms"),
    ("attention.value_norm", "forward", "head_norms"),
    ("attention.latent_norm", "forward", "head_norms"),
    ("attention.output", "forward", "attention.output"),
    ("recurrent", "project", "recurrent.project"),
    ("recurrent", "write_and_read", "recurrent.write_and_read"),
    ("recurrent.output", "forward", "recurrent.output"),
    ("attention_post_norm", "forward", "attention_post_norm"),
    ("feedforward_norm", "forward", "feedforward_norm"),
    ("feedforward_norm", "add_and_norm", "feedforward_norm"),
    ("feedforward_post_norm", "forward", "feedforward_post_norm"),
    ("feedforward", "forward", "feedforward"),
    ("feedforward.gate_up", "forward", "feedforward.first"),
    ("feedforward.up", "forward", "feedforward.first"),
    ("feedforward.down", "forward", "feedforward.down"),
    ("feedforward.router", "choose", "feedforward.router"),
    ("feedforward", "_products", "feedforward.experts"),
    ("feedforward", "_held_products", "feedforward.experts"),
    ("feedforward.shared", "forward", "feedforward.shared"),
    ("feedforward.shared_gate", "forward", "feedforward.shared"),
)
MAX_SECONDS = 2.0  # a step is repeated until then, but at least `MIN_ROUNDS` times
MIN_ROUNDS, MAX_ROUNDS = 3, 20


class CallTimers:
    """Sums of the seconds spent in timed calls, by timer; the time of a call excludes the timed calls within it."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self.seconds: dict[str, float] = defaultdict(float)
        self._clock = clock
        self._within: list[float] = []  # for each call under way: seconds of the timed calls below it

    def wrap(self, owner: Any, method: str, timer: str) -> None:
        """Time a method of one object from now on, if the object has it."""
        if (plain := getattr(owner, method, None)) is not None:
            setattr(owner, method, self.timed(plain, timer))

    def timed(self, function: Callable[..., Any], timer: str | Callable[..., str]) -> Callable[..., Any]:
        """Return `function` wrapped so that its calls are timed; `timer` is the timer's name, or a function that
        returns it for the call's arguments."""

        def call(*arguments: Any, **named: Any) -> Any:
            began = self._clock()
            self._within.append(0.0)
            try:
                return function(*arguments, **named)
            finally:
                whole, below = self._clock() - began, self._within.pop()
                self.seconds[timer if isinstance(timer, str) else timer(*arguments, **named)] += whole - below
                if self._within:
                    self._within[-1] += whole

        return call


def time_operators(runner: Runner, step: GraphStep) -> dict[str, float]:
    """Return the seconds of each timer: the median of several runs of the step on eager modules, with a separate cache
    of random contents. Call it in the thread that owns the runner."""
    model = _copy(runner.model)
    model.set_backend(Backend.EAGER)
    model.use_panels(False)  # eager reads matrices row by row
    store, plan = _step_of(runner, model, step)
    timers = CallTimers(_synchronized_clock if model.device.type == "cuda" else time.perf_counter)
    _attach(timers, model, store)
    return _repeated(StepRunner(EagerProgram(model, store)), plan, timers)


def functions_problem(runner: Runner) -> str:
    """Return why the functions of this runner's programs cannot be timed one by one, or ""."""
    executor = runner.core.executor
    if executor.observer is not None:
        return "an evictor looks on: its steps are timed as a whole only"
    return next((program.untimed for program in executor.programs.values() if program.untimed), "")


def time_functions(runner: Runner, step: GraphStep) -> tuple[dict[str, float], dict[str, float]]:
    """Return the seconds of each compiled function of a step, and of each timed call between two functions.

    Both are medians of several runs on an executor of the same kind, with the same weights and a separate cache. Call
    it in the thread that owns the runner. Both are empty if `functions_problem` gives a reason."""
    if functions_problem(runner):
        return {}, {}
    model, config = _copy(runner.model), runner.config
    timers = CallTimers(_synchronized_clock if model.device.type == "cuda" else time.perf_counter)
    timers.wrap(model, "embed", "embed")
    store, plan = _step_of(runner, model, step)
    kernels = step_kernels(runner, step)
    if "attend" not in kernels.functions:  # a compiled function calls no `write` or `attend`
        for layer, cache in enumerate(store.layers):
            for method in ("write", "attend"):
                timers.wrap(cache, method, f"blocks.{layer}.{method}")
    threads = StepThreads()
    time_threads(timers, threads)
    backends, invariant = runner.core.backends, config.batch_invariant
    executor = build_step_runner(model, store, backends, config.compile, invariant, threads=threads)
    for program in executor.programs.values():
        program.time_functions(timers.timed, step.length)
    found = _repeated(executor, plan, timers)
    layers = range(len(model.blocks))
    names = {function.format(layer=layer) for function in kernels.functions.values() for layer in layers}
    functions = {name: seconds for name, seconds in found.items() if name in names}
    return functions, {name: seconds for name, seconds in found.items() if name not in names}


def time_threads(timer: CallTimers, threads: StepThreads) -> None:
    """Time each run of a compiled function by `threads`: of the blocks, of the head, or of the whole step."""
    names = {"blocks": "all blocks", "head": "head"}
    threads.run = timer.timed(threads.run, lambda shape, *_: names.get(str(shape).partition(" ")[0], "whole step"))  # type: ignore[method-assign] (of one object, which is used for nothing else)


def _step_of(runner: Runner, model: Transformer, step: GraphStep) -> tuple[KVStore, StepPlan]:
    """Return a separate store with random contents, and the step as a plan."""
    layout = CacheLayout(runner.store.specs, runner.store.page_size, runner.store.dtype)
    store, plan = single_decode_step(model, layout, step.tokens - 1)
    if step.kind == "prefill":
        (span,) = plan.spans
        span.sequence.num_computed_tokens = 0
        plan = StepPlan(0, (Span.next_tokens(span.sequence, step.tokens),))
    return store, plan


def _repeated(executor: StepRunner, plan: StepPlan, timers: CallTimers) -> dict[str, float]:
    """Return the median seconds of each timer in several runs of a step."""
    rounds: list[dict[str, float]] = []
    executor.forward(plan)  # compilation and other work of a first call
    began = time.perf_counter()
    while len(rounds) < MIN_ROUNDS or (len(rounds) < MAX_ROUNDS and time.perf_counter() - began < MAX_SECONDS):
        timers.seconds.clear()
        executor.forward(plan)
        rounds.append(dict(timers.seconds))
    return _medians(rounds)


def _synchronized_clock() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def _medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    names: Mapping[str, None] = dict.fromkeys(name for each in rounds for name in each)
    return {name: median(each.get(name, 0.0) for each in rounds) for name in names}


def _copy(model: Transformer) -> Transformer:
    """Copy the modules; the copy shares the weights."""
    shared = {id(each): each for each in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


def _attach(timers: CallTimers, model: Transformer, store: KVStore) -> None:
    timers.wrap(model, "embed", "embed")
    timers.wrap(model.norm, "forward", "norm")
    timers.wrap(model, "compute_logits", "head")
    for table in model.rotary:
        timers.wrap(table, "forward", "angles")
    for index, (block, cache) in enumerate(zip(model.blocks, store.layers, strict=True)):
        for path, method, timer in BLOCK_CALLS:
            owner: Any = block
            for name in path.split(".") if path else ():
                owner = getattr(owner, name, None)
            timers.wrap(owner, method, f"blocks.{index}.{timer}")
        timers.wrap(cache, "write", f"blocks.{index}.write")
