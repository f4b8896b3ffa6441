"""Run an experiment and write its run folder."""

from __future__ import annotations

import shutil
import sys
from contextlib import ExitStack
from pathlib import Path

from compiled_kernels import Backend, backend_problems
from workbench.engine.replay import ReplayDiverged
from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError
from workbench.experiment.build import clients_of, requests_of, runner_for
from workbench.experiment.experiment import Experiment
from workbench.machine.ceilings import (
    MachineCeilings,
    bound_fault,
    ceilings_for,
    gemm_dtypes,
    intra_op_threads,
)
from workbench.machine.environment import environment
from workbench.machine.processor import cpu_times, others_cpu_share
from workbench.measure.goodput import recorded_goodput
from workbench.measure.rounds import run_requests
from workbench.progress import Progress, discard, to_stderr
from workbench.runs.folder import RunFolder, writing
from workbench.runs.metrics import summarize
from workbench.runs.record import Record
from workbench.simulate.executor_settings import SimulatedExecutor
from workbench.trace.perfetto import chrome_trace
from workbench.trace.recorder import Recorder
from workbench.trace.script import StepScript


def run(
    experiment: Experiment | Path | str,
    out: Path | str = "runs",
    name: str | None = None,
    progress: bool = True,
    script: StepScript | None = None,
) -> Record:
    """Run an experiment and write its folder below `out`.

        record = workbench.run("experiments/first_light.yaml")
        record.requests, record.steps, record.summary

    The folder is created before anything is computed. An interrupted run leaves a folder marked as incomplete.

    Args:
        experiment: An experiment, or the path of its YAML file.
        out: Parent folder.
        name: Prefix of the folder's name; None is the name of the YAML file, or `run`.
        progress: Show progress on stderr.
        script: Batches recorded by an earlier run, which are repeated whatever the clock says.

    Raises:
        WorkbenchError: If the experiment has a mistake; no folder is left.
        Diverged: If the batches of `script` cannot be repeated.
    """
    if not isinstance(experiment, Experiment):
        experiment, name = Experiment.from_file(experiment), name or Path(experiment).stem
    name = name or "run"
    if script is not None and (experiment.is_comparison or isinstance(experiment.executor, SimulatedExecutor)):
        raise WorkbenchError("replay: works for one real run of requests; a simulated run is always repeated exactly")
    if experiment.is_comparison:
        from workbench.measure.compare_variants import run_comparison  # it runs variants by functions of this module

        return run_comparison(experiment, out, name, progress)
    if experiment.measure.rounds > 1:
        raise WorkbenchError("measure.rounds: needs variants, which are measured in turn; add variants, or leave it 1")
    if isinstance(experiment.executor, SimulatedExecutor):
        from workbench.measure.simulation import run_simulated

        return run_simulated(experiment, out, name)
    with writing(out, name) as folder:
        return _measured(experiment, folder, progress, script)


def _measured(experiment: Experiment, folder: RunFolder, progress: bool, script: StepScript | None) -> Record:
    folder.write_text("experiment.yaml", experiment.to_yaml())
    with ExitStack() as closing, intra_op_threads(experiment.measure.threads):
        try:
            runner = runner_for(experiment, to_stderr if progress else discard)
            closing.callback(runner.close)
            requests = requests_of(experiment, runner.tokenizer, runner.model.spec.vocab_size)
            clients = clients_of(experiment)
        except WorkbenchError:
            shutil.rmtree(folder.path, ignore_errors=True)  # a mistake leaves no folder, because nothing was computed
            raise
        recorder = Recorder()
        backend, reason = str(runner.core.backends), runner.core.backends.reason
        machine_environment = environment()
        folder.write_json("environment.json", {**machine_environment, "backend": {"name": backend, "reason": reason}})
        for index in range(experiment.measure.warmup):
            title = f"warm-up {index + 1} (compiling)" if backend != "eager" else "warm-up"
            run_requests(runner, requests, title, progress, clients)
        runner.reset_prefix_cache()  # forget the prefixes of the warm-up's requests
        runner.set_listener(recorder.record)
        before = cpu_times()
        try:
            run_requests(runner, requests, "measured run", progress, clients, script)
        except ReplayDiverged:
            shutil.rmtree(folder.path, ignore_errors=True)
            raise
        busy = others_cpu_share(before)
        if runner.core.backends.reason != reason:  # compiled blocks may fail during the run
            backend, reason = str(runner.core.backends), runner.core.backends.reason
            folder.write_json(
                "environment.json", {**machine_environment, "backend": {"name": backend, "reason": reason}}
            )
        runner.set_listener(None)
        summary = summarize(recorder.requests(), recorder.steps(), recorder.tokens(), recorder.verifications())
        summary["goodput"] = recorded_goodput(recorder, experiment.measure.slo, summary["wall_s"])
        summary["backend"] = {"name": backend, "reason": reason}
        artifacts = summary["artifacts"] = dict(runner.core.executor.artifacts)
        summary["others_cpu_share"] = busy
        summary["replayed_steps"] = len(script.steps) if script is not None else None
        summary["model"] = _model_figures(runner)
        summary["kv"] = _cache_figures(runner, summary)
        if (parallel := experiment.parallel).tensor > 1:
            summary["ranks"] = {"tensor": parallel.tensor, "transport": parallel.transport}
        if experiment.measure.ceilings:
            summary["roofline"] = _roofline(runner, summary, progress)
    for table in ("requests", "steps", "tokens", "decisions", "spans", "inputs"):
        folder.write_table(f"{table}.parquet", getattr(recorder, table)())
    if verifications := recorder.verifications():
        folder.write_table("verifications.parquet", verifications)
    trace = {
        **chrome_trace(recorder),
        "otherData": {"backend": backend, "backend_reason": reason, "artifacts": artifacts},
    }
    folder.write_json("trace.json", trace, indent=None)
    folder.write_json("summary.json", summary)
    return Record.open(folder.finish())


def _model_figures(runner: Runner) -> dict:
    spec = runner.model.spec
    dtype = str(runner.model.dtype).removeprefix("torch.")
    return {
        "name": spec.name,
        "parameters": spec.num_parameters,
        "dtype": dtype,
        "weights": runner.model.format.blocks.codes,
        "activations": runner.model.format.activations,
        "weight_bytes": runner.model.weight_bytes,
    }


def _cache_figures(runner: Runner, summary: dict) -> dict:
    store = runner.store
    return {
        "page_size": store.page_size,
        "pages": sum(store.num_pages),
        "pages_used_peak": summary["pages_used_peak"],
        "bytes_per_token_formula": store.bytes_per_token,
        "bytes_used_peak": summary["kv_bytes_peak"],
        "bytes_allocated": store.bytes,
        "bytes_allocated_formula": store.expected_bytes,
    }


def _roofline(runner: Runner, summary: dict, progress: bool) -> dict:
    """Compare decode and prefill with this machine's ceilings, measured at the size of the working set."""
    ranks = runner.config.parallel.tensor  # each rank reads its share of both from the same memory
    working_set = ranks * (runner.model.weight_bytes + summary["kv"]["bytes_used_peak"])
    dtype = summary["model"]["dtype"]
    if progress:
        Progress.write("measuring this machine's ceilings: read bandwidth and matrix products", file=sys.stderr)
    compiled = backend_problems()[Backend.INDUCTOR] is None
    ceilings = ceilings_for(working_set, dtypes=gemm_dtypes(dtype), compiled=compiled)
    figures = _shares(summary, ceilings, dtype, working_set)
    if figures["faults"]:
        ceilings = ceilings_for(working_set, dtypes=gemm_dtypes(dtype), compiled=compiled, refresh=True)
        figures = _shares(summary, ceilings, dtype, working_set)
    return figures


def _shares(summary: dict, ceilings: MachineCeilings, dtype: str, working_set: int) -> dict:
    """Return the ceilings, the fraction of the roofline that each phase reaches, and under `faults` the bounds that a
    phase exceeds."""
    read, gemm = ceilings.read_ceiling(working_set), ceilings.gemm_ceiling(dtype)
    figures = {
        "working_set_bytes": working_set,
        "read_ceiling_bytes_per_s": read.value,
        "read_level": read.level,
        "gemm_ceiling_flops_per_s": gemm.value,
        "gemm_dtype": gemm.dtype,
    }
    for name in ("prefill", "decode"):
        phase = summary["phases"][name]
        if not phase["steps"]:
            continue
        predicted = ceilings.roofline_seconds(phase["predicted_flops"], phase["predicted_bytes"], dtype, working_set)
        figures[name] = {
            "predicted_s": predicted,
            "measured_s": phase["forward_s"],
            "share_of_roofline": predicted / phase["forward_s"],
            "share_of_read_ceiling": phase["bytes_per_s"] / read.value,
            "share_of_gemm_ceiling": phase["flops_per_s"] / gemm.value,
        }
    shares = [(name, figures[name]["share_of_roofline"]) for name in ("prefill", "decode") if name in figures]
    figures["faults"] = [fault for each in shares if (fault := bound_fault(*each))]
    return figures
