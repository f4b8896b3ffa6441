"""Build the table of programs for a model, its cache and its backends."""

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
# The most tokens of a step that go through the compiled step as rows. A call takes TOKEN_PARALLEL_BUCKETS[-1] of them
# and reads the weights anew. One call was quicker than blocks in panels in every case measured (0.5 to 0.9 of their
# time at 64 tokens), two about even (0.9 to 1.1 at 128), three or more slower (1.0 to 1.3 at 192). Measured with demo
# and shape:smollm2-135m, float32 and bfloat16, v3, v4 and v4+bf16 alike (experiments/LOG.md, 2026-11-22).
MAX_TOKEN_PARALLEL_TOKENS = 128
MAX_TOKEN_PARALLEL_TOKENS_WITHOUT_PANELS = 256  # up to here rows of the step were quicker than Inductor's blocks
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
    """Build the programs of `model`, whose modules are on `backends.blocks`, as `backends` were selected.

    Args:
        on_fallback: as in `StepRunner`.
        threads: runs compiled steps.
        evictor: sees the queries of the steps whose attention counts for it. Those steps are computed by the model's
            modules, which are compiled separately, and fall back separately unless the backends were checked.
        custom: a program of the user's own, which is asked before the others.

    Raises:
        WorkbenchError: where `backends` have a compiled step, and the model or its cache cannot; where the backends
            cannot do what the evictor needs.
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
    codecs = any(spec.codec for spec in store.specs)  # any Python, which no graph holds
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
    """Return the model's modules: compiled by Inductor where they are on it."""
    if model.backend is Backend.INDUCTOR:
        return InductorProgram(model, store, backends.attention, unit)
    return EagerProgram(model, store)
