"""`workbench capacity`: find the highest request rate that a simulated fleet serves within an SLO, and the fleets
needed for many users.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from workbench.cli.shared import AsJson, print_json, say, settings_option
from workbench.cli.simulate import KEYS, Model, Trace, handed_over_text, parallel_lines, traffic_experiment
from workbench.units import format_bytes, format_percent, format_seconds


def capacity(
    trace: Trace,
    model: Model = "shape:llama-3.1-8b",
    share: Annotated[float, typer.Option(help="fraction of requests within the SLO")] = 0.9,
    seconds: Annotated[float, typer.Option(help="simulated seconds at each rate")] = 60.0,
    users: Annotated[int | None, typer.Option(help="number of users to plan fleets for")] = None,
    requests_a_day: Annotated[float, typer.Option(help="requests a user sends a day")] = 10.0,
    peak: Annotated[float, typer.Option(help="peak rate over the daily average rate")] = 2.0,
    per_hour: Annotated[float | None, typer.Option(help="price of an accelerator an hour")] = None,
    set_: Annotated[list[str] | None, settings_option(KEYS)] = None,
    as_json: AsJson = False,
) -> None:
    """Find the highest rate that a fleet serves within an SLO.

    With --users, print how many such fleets they need. At least 400 requests arrive independently (Poisson); no model
    is loaded.
    """
    from workbench.economics.fleet import Demand, fleets_for
    from workbench.errors import WorkbenchError
    from workbench.measure.capacity import highest_rate

    if per_hour is not None and (users is None or per_hour < 0):
        raise WorkbenchError(f"--per-hour {per_hour:g}: must be 0 or more, and needs --users")
    demand = None if users is None else Demand(users, requests_a_day, peak)
    experiment = traffic_experiment(trace, model, set_)
    found = highest_rate(experiment, share, seconds)
    if demand is not None:
        found["fleet"] = fleets_for(found, demand, experiment, per_hour)
    print_json(found) if as_json else show(found)


def show(found: dict[str, Any]) -> None:
    metrics = found["at_rate"]
    about, good = metrics["about"], metrics["goodput"]
    say(f"{about['model']}, instances: {about['instances']}, {about['step_times']}", style="bold")
    say(*parallel_lines(about))
    slo = f"TTFT {good['ttft_s']:g} s, TPOT {good['tpot_s']:g} s"
    say(f"{slo} for {format_percent(found['share'])} of the requests: {found['rate']:.3g} requests/s")
    submitted, tokens = metrics["requests"]["submitted"], metrics["tokens"]
    lengths = f"{tokens['prompt'] / submitted:,.0f} prompt tokens and {tokens['output'] / submitted:,.0f} output tokens"
    say(f"a request has {lengths}; {found['too_high']:.3g} requests/s are too many")
    counted = f"{metrics['counted']:,} of {submitted:,} requests are counted, the middle half"
    say(f"{counted}: {format_percent(good['share'])} of them are within the SLO")
    for name, label in (("ttft_s", "TTFT"), ("tpot_s", "TPOT")):
        say(f"{label} p50 {format_seconds(metrics[name]['p50'])}, p99 {format_seconds(metrics[name]['p99'])}")
    if hits := metrics["cache_hit_rate"]:
        say(f"{format_percent(hits)} of prompt tokens from the cache")
    if sent := metrics["handed_over"]:
        say(handed_over_text(sent))
    if "fleet" in found:
        say(*_fleet(found["fleet"]))


def _fleet(fleet: dict[str, Any]) -> list[str]:
    rates = f"{fleet['mean_rate']:,.0f} requests/s, {fleet['peak_rate']:,.0f} at the peak"
    lines = [
        f"{fleet['users']:,} users, {fleet['requests_a_day']:g} requests a day each: {rates}",
        f"they need {fleet['fleets']:,} such fleets: {fleet['instances']:,} instances, "
        f"{fleet['accelerators']:,} accelerators",
        f"at the peak {fleet['prompt_tokens_per_s']:,.0f} prompt tokens/s, "
        f"{fleet['output_tokens_per_s']:,.0f} output tokens/s",
    ]
    if fleet["handed_over_bytes_per_s"] is not None:
        lines[-1] += f", {format_bytes(fleet['handed_over_bytes_per_s'])}/s of keys and values between the pools"
    if "per_hour" in fleet:
        lines.append(
            f"{fleet['per_hour']:,.2f} an hour, {fleet['per_day']:,.0f} a day; {fleet['per_user_a_month']:.3f} a user "
            f"in 30 days, {fleet['per_million_output_tokens']:.3f} a million output tokens"
        )
    return lines
