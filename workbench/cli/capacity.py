"""`workbench capacity`: the highest rate that a simulated fleet serves within an SLO, and a fleet for many users."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from workbench.cli.shared import AsJson, console, print_json
from workbench.cli.simulate import (
    TPOT,
    TTFT,
    DecodeInstances,
    Gpus,
    Hardware,
    Instances,
    Length,
    Microbatches,
    Model,
    Pipeline,
    Prefix,
    RouterName,
    Set,
    Trace,
    executor_settings,
    handed_over_text,
    parallel_lines,
    traffic_settings,
)


def capacity(
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
    length: Length = 1.0,
    ttft: TTFT = 1.0,
    tpot: TPOT = 0.1,
    share: Annotated[float, typer.Option(help="of all requests that are to be within the SLO")] = 0.9,
    seconds: Annotated[float, typer.Option(help="of traffic at each rate; more for 400 requests")] = 60.0,
    users: Annotated[int | None, typer.Option(help="how many such fleets serve so many users")] = None,
    requests_a_day: Annotated[float, typer.Option(help="that a user sends")] = 10.0,
    peak: Annotated[float, typer.Option(help="rate at the peak, times the average of the day")] = 2.0,
    per_hour: Annotated[float | None, typer.Option(help="what an accelerator costs an hour")] = None,
    set_: Set = None,
    as_json: AsJson = False,
) -> None:
    """Search the highest rate that a fleet serves within an SLO; with --users, how many such fleets they need.

    Requests come independently of each other (Poisson). Nothing is loaded.
    """
    from workbench.economics.fleet import Demand, fleets_for
    from workbench.errors import WorkbenchError
    from workbench.measure.capacity import highest_rate
    from workbench.measure.simulation import simulation_experiment

    if per_hour is not None and (users is None or per_hour < 0):
        raise WorkbenchError(f"--per-hour {per_hour:g}: give 0 or more, and --users, whose fleets it prices")
    demand = None if users is None else Demand(users, requests_a_day, peak)
    executor = executor_settings(hardware, gpus, pipeline, microbatches, instances, decode_instances, router)
    slo = {"ttft": ttft, "tpot": tpot}
    experiment = simulation_experiment(model, executor, traffic_settings(trace, length), slo, prefix, tuple(set_ or ()))
    found = highest_rate(experiment, share, seconds)
    if demand is not None:
        found["fleet"] = fleets_for(found, demand, experiment, per_hour)
    print_json(found) if as_json else show(found)


def show(found: dict[str, Any]) -> None:
    from rich.text import Text

    out, metrics = console(), found["at_rate"]
    about, good = metrics["about"], metrics["goodput"]

    def say(line: str, style: str = "") -> None:
        out.print(Text(line, style=style), soft_wrap=True)

    say(f"{about['model']}, instances: {about['instances']}, {about['step_times']}", "bold")
    for line in parallel_lines(about):
        say(line)
    slo = f"TTFT {good['ttft_s']:g} s, TPOT {good['tpot_s']:g} s"
    say(f"{slo} for {found['share']:.0%} of the requests: {found['rate']:.3g} requests/s")
    submitted, tokens = metrics["requests"]["submitted"], metrics["tokens"]
    lengths = f"{tokens['prompt'] / submitted:,.0f} tokens of prompt and {tokens['output'] / submitted:,.0f} of output"
    say(f"a request has {lengths}; {found['too_high']:.3g} requests/s are too many")
    counted = f"{metrics['counted']:,} of {submitted:,} requests count, the half in the middle"
    say(f"{counted}: {good['share']:.1%} of them are within the SLO")
    for name, label in (("ttft_s", "TTFT"), ("tpot_s", "TPOT")):
        say(f"{label} p50 {1e3 * metrics[name]['p50']:,.0f} ms, p99 {1e3 * metrics[name]['p99']:,.0f} ms")
    if hits := metrics["cache_hit_rate"]:
        say(f"{hits:.1%} of prompt tokens from the cache")
    if sent := metrics["handed_over"]:
        say(handed_over_text(sent))
    if "fleet" in found:
        for line in _fleet(found["fleet"]):
            say(line)


def _fleet(fleet: dict[str, Any]) -> list[str]:
    from workbench.memory.report import format_bytes

    rates = f"{fleet['mean_rate']:,.0f} requests/s, {fleet['peak_rate']:,.0f} at the peak"
    lines = [
        f"{fleet['users']:,} users, {fleet['requests_a_day']:g} requests a day each: {rates}",
        f"they take {fleet['fleets']:,} such fleets: {fleet['instances']:,} instances, "
        f"{fleet['accelerators']:,} accelerators",
        f"at the peak {fleet['prompt_tokens_per_s']:,.0f} prompt tokens/s, "
        f"{fleet['output_tokens_per_s']:,.0f} output tokens/s",
    ]
    if fleet["handed_over_bytes_per_s"] is not None:
        lines[-1] += f", {format_bytes(fleet['handed_over_bytes_per_s'])} of keys and values a second between the pools"
    if "per_hour" in fleet:
        lines.append(
            f"{fleet['per_hour']:,.2f} an hour, {fleet['per_day']:,.0f} a day; {fleet['per_user_a_month']:.3f} a user "
            f"in 30 days, {fleet['per_million_output_tokens']:.3f} a million output tokens"
        )
    return lines
