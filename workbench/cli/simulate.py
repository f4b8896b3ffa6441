"""`workbench simulate`: simulate traffic on a fleet of instances."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workbench.cli.shared import AsJson, print_json, say, settings_option
from workbench.display import Table
from workbench.units import format_bytes, format_percent, format_seconds

if TYPE_CHECKING:
    from workbench.experiment.experiment import Experiment

LATENCY_LABELS = {
    "ttft_s": "TTFT", "tpot_s": "TPOT", "longest_gap_s": "longest gap", "e2el_s": "E2EL", "queue_s": "queue",
}  # fmt: skip
SHIPPED_TRACES = ("azure", "mooncake")


Trace = Annotated[str, typer.Argument(help="a trace file (Azure's CSV, Mooncake's JSON lines), azure or mooncake")]
Model = Annotated[str, typer.Option(help="shape:NAME, demo, or a folder")]
KEYS = (
    "executor.instances, executor.hardware=h200, executor.gpus, executor.decode.instances, "
    "executor.router, cache.prefix=radix, measure.slo.ttft"
)


def simulate(
    trace: Trace,
    model: Model = "shape:llama-3.1-8b",
    load: Annotated[float, typer.Option(help="factor on the rate of arrivals; 2 doubles it")] = 1.0,
    until: Annotated[
        float | None, typer.Option(help="simulated second at which to stop; unfinished requests count as in flight")
    ] = None,
    set_: Annotated[list[str] | None, settings_option(KEYS)] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate traffic on many instances.

    Print latencies, goodput, and the load of each instance. No model is loaded."""
    from workbench.errors import WorkbenchError
    from workbench.measure.simulation import simulate_experiment

    if not load > 0:
        raise WorkbenchError(f"--load {load}: must be above 0 (2 doubles the request rate)")
    found = simulate_experiment(traffic_experiment(trace, model, set_, 1 / load), until)
    print_json(found) if as_json else show(found)


def traffic_experiment(trace: str, model: str, changes: list[str] | None, time: float = 1.0) -> Experiment:
    """Return an experiment that simulates a trace, given as a built-in generator's name or as a file. Raises
    WorkbenchError if it is neither."""
    from workbench.errors import WorkbenchError, nearest
    from workbench.measure.simulation import simulation_experiment

    if trace not in SHIPPED_TRACES and not Path(trace).exists():
        known = f"there is no such file; give a file, or {' or '.join(SHIPPED_TRACES)}{nearest(trace, SHIPPED_TRACES)}"
        raise WorkbenchError(f"trace {trace!r}: {known}")
    lengths = {"lengths": {"kind": trace}} if trace in SHIPPED_TRACES else {"trace": trace}
    workload = {"kind": "traffic", "time": time, **lengths}
    return simulation_experiment(model, {"kind": "simulated"}, workload, {}, changes=tuple(changes or ()))


def show(found: dict[str, Any]) -> None:
    from workbench.reports.run_tables import group_table

    about, requests = found["about"], found["requests"]
    heading = f"{about['model']}, {about['instances']} instances, {about['step_times']}"
    say(heading, style="bold")
    say(*parallel_lines(about))
    counts = [
        f"{requests[name]:,} {name.replace('_', ' ')}" for name in requests if name != "errors" and requests[name]
    ]
    say(f"requests: {', '.join(counts)}")
    for error, count in requests["errors"].items():
        say(f"  {count} times: {error}", style="red")
    rows = [
        (label, *(format_seconds(found[name][p]) for p in ("p50", "p90", "p99", "max")))
        for name, label in LATENCY_LABELS.items()
    ]
    say(Table("", rows, ("latency", "p50", "p90", "p99", "most"), left=()))
    for kind in ("tenant", "priority"):
        if found[f"by_{kind}"]:
            say(group_table(kind, found[f"by_{kind}"]))
    good = found["goodput"]
    if good["requests_per_s"] is not None:
        slo = f"TTFT {good['ttft_s']:g} s, TPOT {good['tpot_s']:g} s"
        say(f"goodput ({slo}): {good['requests_per_s']:.2f} requests/s, {format_percent(good['share'])} of all")
    rate = found["output_tokens_per_s"]
    tokens = f"{found['tokens']['output']:,} output tokens" + (f", {rate:,.0f} a second" if rate else "")
    hits, waste = found["cache_hit_rate"], found["cache_waste"]
    tokens += f"; {format_percent(hits)} of prompt tokens from the cache" if hits else ""
    tokens += f"; {format_percent(waste)} of pages in use empty" if waste is not None else ""
    say(tokens)
    if sent := found["handed_over"]:
        say(handed_over_text(sent))
    busy = ", ".join(
        format_percent(each["utilization"]) for each in found["instances"] if each["utilization"] is not None
    )
    say(f"utilization: {busy}; sequences at once: {max(i['sequences_max'] for i in found['instances'])}")
    words = f"{found['simulated_s']:,.0f} simulated seconds in {found['wall_s']:.1f} s"
    say(words)


def parallel_lines(about: dict[str, Any]) -> list[str]:
    """Return lines of text about the communication of ranks and the idle time of a pipeline's stages, for the printed
    result."""
    lines = []
    if "all_reduce_bytes_per_token" in about:
        sent = f"{about['all_reduce_bytes_per_token']:,.0f} bytes of all-reduce per token"
        lines.append(f"{about['tensor']} ranks a layer: {sent}")
    if "pipeline" in about:
        stages = f"{about['pipeline']} stages, up to {about['microbatches']} microbatches a step"
        lines.append(f"{stages}: {format_percent(about['bubble_share'])} of the time in bubbles")
    return lines


def handed_over_text(sent: dict[str, Any]) -> str:
    size, rate = format_bytes(sent["bytes"]), format_bytes(sent["bytes_per_s"])
    each = format_bytes(sent["transfer_bytes_per_s"])
    return f"handed over: {sent['sequences']:,} sequences, {size} of keys and values, {rate}/s; each at {each}/s"
