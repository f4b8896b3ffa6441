"""`workbench simulate`: simulate traffic on a fleet of instances."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from workbench.cli.shared import AsJson, console, print_json
from workbench.display import Table

LATENCY_LABELS = {
    "ttft_s": "TTFT", "tpot_s": "TPOT", "longest_gap_s": "longest gap", "e2el_s": "E2EL", "queue_s": "queue",
}  # fmt: skip
SHIPPED_TRACES = ("azure", "mooncake")


Trace = Annotated[str, typer.Argument(help="a trace file (Azure's CSV, Mooncake's JSON lines), azure or mooncake")]
Model = Annotated[str, typer.Option(help="shape:NAME, demo, or a folder")]
Hardware = Annotated[str, typer.Option(help="h100, h200, a100, or here: this machine's ceilings")]
Gpus = Annotated[
    int, typer.Option("--gpus", "--tensor", min=1, help="accelerators of an instance that share each layer")
]
Pipeline = Annotated[int, typer.Option(min=1, help="stages of whole layers, of so many accelerators each")]
Microbatches = Annotated[
    int | None, typer.Option(min=1, help="parts of a step that follow each other through the stages")
]
Instances = Annotated[int, typer.Option(min=1, help="instances; those for prompts where some only decode")]
DecodeInstances = Annotated[int, typer.Option(min=0, help="further instances that only decode")]
RouterName = Annotated[str, typer.Option(help="round_robin, least_loaded, prefix_aware or session_sticky")]
Prefix = Annotated[bool, typer.Option("--prefix", help="keep shared prefixes in each instance's cache")]
Length = Annotated[float, typer.Option(help="texts are so many times as long")]
TTFT = Annotated[float, typer.Option(help="SLO: seconds to the first token")]
TPOT = Annotated[float, typer.Option(help="SLO: seconds a token after it")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="any setting of the experiment; may be repeated"),
]


def simulate(
    trace: Trace,
    model: Model = "shape:llama-3.1-8b",
    hardware: Hardware = "h100",
    gpus: Gpus = 1,
    pipeline: Pipeline = 1,
    microbatches: Microbatches = None,
    instances: Instances = 1,
    decode_instances: DecodeInstances = 0,
    router: RouterName = "least_loaded",
    prefix: Prefix = False,
    requests: Annotated[int | None, typer.Option(min=1, help="only so many requests")] = None,
    load: Annotated[float, typer.Option(help="requests come so many times as fast")] = 1.0,
    length: Length = 1.0,
    ttft: TTFT = 1.0,
    tpot: TPOT = 0.1,
    until: Annotated[float | None, typer.Option(help="stop at this second; what is not done is in flight")] = None,
    set_: Set = None,
    as_json: AsJson = False,
) -> None:
    """Simulate traffic on many instances: latencies, goodput, and the load of each instance. Nothing is loaded."""
    from workbench.errors import WorkbenchError
    from workbench.measure.simulation import simulate_experiment, simulation_experiment

    if not load > 0:
        raise WorkbenchError(f"--load {load}: must be above 0; 2 doubles the rate")
    executor = executor_settings(hardware, gpus, pipeline, microbatches, instances, decode_instances, router)
    workload = traffic_settings(trace, length) | {"requests": requests, "time": 1 / load}
    slo = {"ttft": ttft, "tpot": tpot}
    experiment = simulation_experiment(model, executor, workload, slo, prefix, tuple(set_ or ()))
    found = simulate_experiment(experiment, until)
    print_json(found) if as_json else show(found)


def executor_settings(
    hardware: str, gpus: int, pipeline: int, microbatches: int | None, instances: int, decode_instances: int,
    router: str,
) -> dict[str, Any]:  # fmt: skip
    """Return the settings of a simulated executor that command-line options describe."""
    executor: dict[str, Any] = {
        "kind": "simulated", "hardware": hardware, "gpus": gpus, "pipeline": pipeline, "microbatches": microbatches,
        "instances": instances, "router": router,
    }  # fmt: skip
    return executor | ({"decode": {"instances": decode_instances}} if decode_instances else {})


def traffic_settings(trace: str, length: float) -> dict[str, Any]:
    """Return the settings of a traffic: a shipped generator's, or a trace file's. Raises WorkbenchError for neither."""
    from workbench.errors import WorkbenchError, nearest

    if trace not in SHIPPED_TRACES and not Path(trace).exists():
        known = f"there is no such file; name one, or {' or '.join(SHIPPED_TRACES)}{nearest(trace, SHIPPED_TRACES)}"
        raise WorkbenchError(f"trace {trace!r}: {known}")
    lengths = {"lengths": {"kind": trace}} if trace in SHIPPED_TRACES else {"trace": trace}
    return {"kind": "traffic", "length": length, **lengths}


def show(found: dict[str, Any]) -> None:
    from rich.text import Text

    from workbench.reports.run_tables import format_ms, group_table

    out = console()
    about, requests = found["about"], found["requests"]
    heading = f"{about['model']}, {about['instances']} instances, {about['step_times']}"
    out.print(Text(heading, style="bold"), soft_wrap=True)
    for line in parallel_lines(about):
        out.print(Text(line), soft_wrap=True)
    counts = [
        f"{requests[name]:,} {name.replace('_', ' ')}" for name in requests if name != "errors" and requests[name]
    ]
    out.print(Text(f"requests: {', '.join(counts)}"), soft_wrap=True)
    for error, count in requests["errors"].items():
        out.print(Text(f"  {count} times: {error}", style="red"), soft_wrap=True)
    rows = [
        (label, *(format_ms(found[name][p]) for p in ("p50", "p90", "p99", "max")))
        for name, label in LATENCY_LABELS.items()
    ]
    out.print(Table("", rows, ("milliseconds", "p50", "p90", "p99", "most"), left=()))
    for kind in ("tenant", "priority"):
        if found[f"by_{kind}"]:
            out.print(group_table(kind, found[f"by_{kind}"]))
    good = found["goodput"]
    if good["requests_per_s"] is not None:
        slo = f"TTFT {good['ttft_s']:g} s, TPOT {good['tpot_s']:g} s"
        out.print(Text(f"goodput ({slo}): {good['requests_per_s']:.2f} requests/s, {good['share']:.1%} of all"))
    rate = found["output_tokens_per_s"]
    tokens = f"{found['tokens']['output']:,} output tokens" + (f", {rate:,.0f} a second" if rate else "")
    hits, waste = found["cache_hit_rate"], found["cache_waste"]
    tokens += f"; {hits:.1%} of prompt tokens from the cache" if hits else ""
    tokens += f"; {waste:.1%} of pages in use empty" if waste is not None else ""
    out.print(Text(tokens), soft_wrap=True)
    if sent := found["handed_over"]:
        out.print(Text(handed_over_text(sent)), soft_wrap=True)
    busy = ", ".join(f"{each['utilization']:.0%}" for each in found["instances"] if each["utilization"] is not None)
    out.print(Text(f"utilization: {busy}; sequences at once: {max(i['sequences_max'] for i in found['instances'])}"))
    words = f"{found['simulated_s']:,.0f} simulated seconds in {found['wall_s']:.1f} s"
    out.print(Text(words), soft_wrap=True)


def parallel_lines(about: dict[str, Any]) -> list[str]:
    """Return what ranks send each other, and how long the stages of a pipeline wait."""
    lines = []
    if "all_reduce_bytes_per_token" in about:
        sent = f"{about['all_reduce_bytes_per_token']:,.0f} bytes of all-reduce a token"
        lines.append(f"{about['tensor']} ranks a layer: {sent}")
    if "pipeline" in about:
        stages = f"{about['pipeline']} stages, up to {about['microbatches']} microbatches a step"
        lines.append(f"{stages}: with so many {about['bubble_share']:.0%} bubbles")
    return lines


def handed_over_text(sent: dict[str, Any]) -> str:
    from workbench.memory.report import format_bytes

    size, rate = format_bytes(sent["bytes"]), format_bytes(sent["bytes_per_s"] or 0)
    each = format_bytes(sent["transfer_bytes_per_s"])
    return f"handed over: {sent['sequences']:,} sequences, {size} of keys and values, {rate} a second; each at {each}/s"
