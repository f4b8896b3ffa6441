"""Build the table of programs for a model, from its cache and its backends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from compiled_kernels import Backend
from workbench.errors import WorkbenchError
from workbench.executors.capabilities import unsupported
from workbench.executors.contention import StepThreads
from workbench.executors.evicting import EvictionObserver, Evictor
from workbench.executors.programs.cuda_graph import CudaGraphProgram
from workbench.executors.programs.custom import CustomProgram
from workbench.executors.programs.decode_step import DecodeProgram, RotaryCaches
from workbench.executors.programs.eager import EagerProgram
from workbench.executors.programs.inductor import InductorProgram
from workbench.executors.programs.prefill import PrefillProgram, weights_in_panels
from workbench.executors.programs.program import StepProgram
from workbench.executors.programs.rows import RowsProgram
from workbench.executors.requirements import Requirements
from workbench.executors.select import Backends
from workbench.executors.step_runner import OBSERVED, StepRunner
from workbench.kv_cache.store import KVStore
from workbench.model.transformer import Transformer
from workbench.request import CustomPart

CompileUnit = Literal["block", "step"]
# Maximum tokens of a step that are computed as rows of the compiled step. Each call takes up to
# TOKEN_PARALLEL_BUCKETS[-1] tokens and reads all weights. One call was faster than blocks in panels in every measured
# case (0.5 to 0.9 of their time at 64 tokens), two calls about equal (0.9 to 1.1 at 128), three or more slower (1.0 to
# 1.3 at 192). Measured with demo and shape:smollm2-135m, float32 and bfloat16, v3, v4 and v4+bf16 alike
# (experiments/LOG.md, 2026-11-22).
MAX_TOKEN_PARALLEL_TOKENS = 128
MAX_TOKEN_PARALLEL_TOKENS_WITHOUT_PANELS = 256  # up to this number, rows of the step were faster than Inductor's blocks
TOKEN_PARALLEL_BUCKETS = (8, 16, 32, 64)


def build_step_runner(
    model: Transformer,
    store: KVStore,
    backends: Backends,
    compile_unit: CompileUnit = "block",
    batch_invariant: bool = False,
    on_fallback: Callable[[str], None] = lambda why: None,
    threads: StepThreads | None = None,
    evictor: Evictor | None = None,
    custom: CustomPart | None = None,
) -> StepRunner:
    """Build a step runner with the programs of `model` for the selected `backends`; the model's modules are on
    `backends.blocks`.

    Args:
        on_fallback: as in `StepRunner`.
        threads: the runner of compiled steps.
        evictor: observes the queries of steps with attention that counts for eviction. The model's modules compute
            these steps; they are compiled separately, and fall back separately unless the backends were checked.
        custom: a user-defined program, which is asked before the others.

    Raises:
        WorkbenchError: if the backends have a compiled step that does not support the model or its cache, or if they do
            not support the evictor.
    """
    threads = threads or StepThreads()
    programs = _programs(model, store, backends, compile_unit, batch_invariant, threads)
    if custom is not None:
        programs = CustomProgram(model, store, custom), *programs
    unchecked = () if backends.checked else ("blocks", OBSERVED)
    runner = StepRunner(*programs, threads=threads, unchecked=unchecked, on_fallback=on_fallback)
    if evictor is not None:
        wanted = Requirements(uneven_heads=evictor.uneven)
        for backend in {backends.decode, backends.blocks, backends.attention} if evictor.uneven else ():
            if refusal := unsupported(backend, wanted):
                raise WorkbenchError(f"cache.evict: backend {str(backend)!r} {refusal}")
        observer = EvictionObserver(store, evictor)
        runner.observe(observer, _modules(model, observer.store, backends))
    return runner


def _programs(
    model: Transformer, store: KVStore, backends: Backends, unit: CompileUnit, batch_invariant: bool,
    threads: StepThreads,
) -> tuple[StepProgram, ...]:  # fmt: skip
    """Return the programs in the order in which they are asked."""
    if batch_invariant:
        return (RowsProgram(model, store, threads=threads),)
    codecs = any(spec.codec for spec in store.specs)  # arbitrary Python, which cannot be part of a graph
    if model.device.type == "cuda" and model.backend is Backend.TRITON and not codecs:
        return CudaGraphProgram(model, store), EagerProgram(model, store)
    if not backends.has_step:
        return (_modules(model, store, backends, unit),)
    angles, in_panels = RotaryCaches(model), weights_in_panels(model)
    most = MAX_TOKEN_PARALLEL_TOKENS if in_panels else MAX_TOKEN_PARALLEL_TOKENS_WITHOUT_PANELS
    rows = RowsProgram(model, store, TOKEN_PARALLEL_BUCKETS, threads, angles, most)
    return (
        DecodeProgram(model, store, angles, threads),
        DecodeProgram(model, store, angles, threads, verifies=True),
        rows,
        PrefillProgram(model, store, rows, backends.attention) if in_panels else _modules(model, store, backends, unit),
    )


def _modules(model: Transformer, store: KVStore, backends: Backends, unit: CompileUnit = "block") -> StepProgram:
    """Return the program of the model's modules: compiled if they are on Inductor."""
    if model.backend is Backend.INDUCTOR:
        return InductorProgram(model, store, backends.attention, unit)
    return EagerProgram(model, store)
