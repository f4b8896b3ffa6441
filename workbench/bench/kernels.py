"""Benchmark operators on every backend against this machine's ceilings, and summarize the compilation stages of a case
or of a decode step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import torch

from compiled_kernels import BackendError, backend_problems
from compiled_kernels.backends import Backend
from compiled_kernels.cases import Case, Suite, suite_of, suites
from compiled_kernels.check import device_of
from compiled_kernels.measure import COLD_WORKING_SET_BYTES, KernelMeasurement, KernelTiming, measure
from compiled_kernels.stage import CompilerStage, CompilerStages
from workbench.engine.config import ModelConfig, parse_dtype
from workbench.engine.loaded_model import describe_model, weight_format
from workbench.executors.packing import bucket_for
from workbench.machine.ceilings import MachineCeilings, bound_fault, ceilings_for, gemm_dtypes, intra_op_threads
from workbench.machine.environment import environment
from workbench.machine.processor import cpu_times, last_level_cache, others_cpu_share
from workbench.model.transformer import Transformer

MIN_READ_BYTES = 2**20  # a smaller read test times its call, not the memory


def timed_cases(operator: str | None = None) -> list[tuple[Suite, Case]]:
    """Return the benchmark cases of all operators, or of one. Raises BackendError for an unknown operator."""
    chosen = suites() if operator is None else (suite_of(operator),)
    return [(suite, case) for suite in chosen for case in suite.cases if case.timed]


def kernel_bench(
    cases: Sequence[tuple[Suite, Case]],
    backends: Iterable[Backend] = tuple(Backend),
    threads: int | None = None,
    budget_seconds: float = 0.4,
    on_progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Time `backends` on each case, with eager as the baseline, and return the record.

    Args:
        cases: Pairs of a suite and a case.
        backends: Backends to time.
        threads: Intra-operator threads; None keeps the current number.
        budget_seconds: Time for each backend of a case.
        on_progress: Called with one line of text before each case.
    """
    asked = tuple(backends)
    before, machine_environment, rows = cpu_times(), environment(), []
    with intra_op_threads(threads) as used:
        for suite, case in cases:
            on_progress(f"{suite.operator} {case.name}")
            torch._dynamo.reset()  # drop the compiled code of earlier cases
            started = cpu_times()
            found = _measured(suite, case, asked, budget_seconds)
            busy = others_cpu_share(started)
            ceilings = _ceilings(found, case, used)
            rows += [{**row, "others_cpu_share": busy} for row in kernel_rows(suite, case, found, asked, ceilings)]
    return {
        "question": "How close to this machine's limits is each operator on each backend?",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "threads": used,
        "others_cpu_share": others_cpu_share(before),
        "rows": rows,
        "environment": machine_environment,
    }


def kernel_rows(
    suite: Suite, case: Case, measurement: KernelMeasurement, backends: Sequence[Backend], ceilings: MachineCeilings
) -> Iterator[dict[str, Any]]:
    """Yield one row per backend: its time, the fraction of the binding roofline that it reaches, and the ratio to
    eager; or the reason why it was not timed."""
    eager = measurement.timings.get(Backend.EAGER)
    for backend in backends:
        row: dict[str, Any] = {"operator": suite.operator, "backend": str(backend), "case": case.name}
        timing = measurement.timings.get(backend)
        if timing and device_of(backend) == "cuda":  # no comparison: ceilings and eager baseline are the CPU's
            yield {**row, "status": "ok", "reason": "on the GPU", **timing_figures(case, measurement, timing)}
        elif timing:
            figures = _figures(case, measurement, timing, eager, ceilings)
            fault = bound_fault(case.name, figures["share_of_ceiling"])
            yield {**row, "status": "ok", "reason": fault, **figures}
        else:
            yield {**row, "status": "not timed", "reason": measurement.refused.get(backend, "")}


def _measured(suite: Suite, case: Case, backends: tuple[Backend, ...], budget_seconds: float) -> KernelMeasurement:
    every = dict.fromkeys((Backend.EAGER, *backends))
    past_caches = max(COLD_WORKING_SET_BYTES, 4 * (last_level_cache() or 0))
    return measure(suite, case, every, budget_seconds, past_caches)


def _ceilings(found: KernelMeasurement, case: Case, threads: int) -> MachineCeilings:
    size = found.working_set_bytes * found.copies if found.data == "memory" else found.working_set_bytes
    return ceilings_for(max(size, MIN_READ_BYTES), threads=threads, dtypes=gemm_dtypes(_dtype(case)), compiled=True)


def _dtype(case: Case) -> str:
    return str(case.arguments["dtype"]).removeprefix("torch.")


def _figures(
    case: Case, found: KernelMeasurement, timing: KernelTiming, eager: KernelTiming | None, ceilings: MachineCeilings
) -> dict:
    read, gemm = ceilings.read_ceilings[0], ceilings.gemm_ceiling(_dtype(case))
    moving, computing = case.cost.bytes / read.value, case.cost.flops / gemm.value
    return {
        **timing_figures(case, found, timing),
        "bound": "read" if moving >= computing else "gemm",
        "ceiling_bytes_per_s": read.value,
        "ceiling_flops_per_s": gemm.value,
        "predicted_seconds": max(moving, computing),
        "share_of_ceiling": max(moving, computing) / timing.seconds,
        "speedup_over_eager": eager.seconds / timing.seconds if eager else None,
    }


def timing_figures(case: Case, measurement: KernelMeasurement, timing: KernelTiming) -> dict[str, Any]:
    """Return a backend's time, the memory level of the data, and rates computed from the case's minimum bytes and
    FLOPs."""
    return {
        "seconds": timing.seconds,
        "p10_seconds": timing.p10,
        "p90_seconds": timing.p90,
        "rounds": timing.rounds,
        "data": measurement.data,
        "copies": measurement.copies,
        "working_set_bytes": measurement.working_set_bytes,
        "bytes": case.cost.bytes,
        "flops": case.cost.flops,
        "bytes_per_s": case.cost.bytes / timing.seconds,
        "flops_per_s": case.cost.flops / timing.seconds,
    }


def stages_overview(
    suite: Suite, case: Case, backend: Backend, stages: CompilerStages, budget_seconds: float = 0.2
) -> dict[str, Any]:
    """Return a summary of the compilation of a case on one backend.

    Returns:
        `stages`: lines and characters of each stage. `predicted`: minimum bytes and FLOPs. `generated`: the bytes that
        the generated code moves, if the compiler reports them. `measured`: time and rates, or the reason why they are
        missing.
    """
    measured = measure(suite, case, (backend,), budget_seconds)
    timing = measured.timings.get(backend)
    fusion = stages.stages.get("fusion")
    return {
        "stages": stage_sizes(stages),
        "predicted": {"bytes": case.cost.bytes, "flops": case.cost.flops},
        "generated": {"bytes": sum(each["bytes"] for each in fusion.data["kernels"])} if fusion else None,
        "measured": timing_figures(case, measured, timing) if timing else None,
        "not_measured": "" if timing else measured.refused[backend],
    }


def stage_sizes(stages: CompilerStages) -> list[dict[str, Any]]:
    """Return the lines and characters of each stage, in order."""
    return [
        {"stage": name, "lines": stage.text.count("\n") + 1, "characters": len(stage.text)}
        for name, stage in stages.stages.items()
    ]


def decode_step_stages(model: ModelConfig, rows: int = 1, page_size: int = 64) -> CompilerStages:
    """Return the compilation stages of the step that decodes `rows` sequences, with torch's current threads.

    `rows` is rounded up to its bucket (1, 2, 4, ...). The step is compiled, unless cached, without any weights.
    Raises BackendError if the mlir backend does not work here."""
    if problem := backend_problems()[Backend.MLIR]:
        raise BackendError(f"backend mlir does not work here: {problem}")
    from compiled_kernels.decode_step.text import step_text
    from compiled_kernels.mlir import compile_shape
    from workbench.executors.layout import panels_refusal
    from workbench.executors.programs.decode_step import step_shape

    spec, stored = describe_model(model.name, context=model.context)
    format = weight_format(model, backend=str(Backend.MLIR))
    format.check(spec)
    with torch.device("meta"):
        shapes = Transformer(spec, format=format).to(parse_dtype(stored if model.dtype == "auto" else model.dtype))
    shapes.use_code_panels()
    if panels_refusal(shapes) is None:
        # As the mlir backend does; `auto` keeps weights in rows if torch's product is faster.
        shapes.use_panels()
    shape = step_shape(shapes, page_size, bucket_for(rows))
    kernel = compile_shape(step_text, shape, entry="decode_step", level=shape.target.level)
    texts = {name: CompilerStage(text) for name, text in kernel.stages.items()}
    return CompilerStages(kernel.digest, "the entry in the cache of artifacts that runs", texts)
