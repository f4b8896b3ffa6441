"""`workbench cost`: price a workload with and without a prompt cache, or price the tokens of a machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from workbench.cli.shared import AsJson, changed_settings, print_json, say, settings_option
from workbench.display import Table
from workbench.errors import WorkbenchError, explain
from workbench.units import format_percent


def cost(
    prices: Annotated[str, typer.Argument(help="name of a shipped table of prices, or a YAML file")] = "article-a",
    set_: Annotated[
        list[str] | None,
        settings_option(
            "prompt, question, output (tokens of each request), requests (per day), days, arrivals (even, poisson), "
            "trace (azure, mooncake, FILE: an hour with its own lengths and prefixes), seed",
            where="",
        ),
    ] = None,
    per_hour: Annotated[
        float | None, typer.Option(help="price of a machine per hour; needs --tokens-per-s or --run")
    ] = None,
    tokens_per_s: Annotated[float | None, typer.Option(help="output rate of the machine, tokens/s")] = None,
    run: Annotated[Path | None, typer.Option(help="run folder with the output rate")] = None,
    as_json: AsJson = False,
) -> None:
    """Price a workload with and without a prompt cache.

    The cache lives 5 minutes or 1 hour, with and without renewal by hits. With `--per-hour`, price the tokens of your
    own machine instead.
    """
    from pydantic import ValidationError

    from workbench.economics.prices import load_prices
    from workbench.economics.report import PricedWorkload, price_workload

    table = load_prices(prices)
    if per_hour is not None or tokens_per_s is not None or run is not None:
        if set_:
            raise WorkbenchError(f"--set {set_[0]}: applies to a workload, not to a machine's tokens; remove it")
        machine = _machine(per_hour, tokens_per_s, run)
        found = {"prices": {"name": table.name, "currency": table.currency, "output": float(table.output)}} | machine
        print_json(found) if as_json else _show_machine(found)
        return
    try:
        workload = PricedWorkload.model_validate(changed_settings({}, set_))
    except ValidationError as error:
        raise explain(error, "cost", PricedWorkload) from None
    found = price_workload(table, workload)
    print_json(found) if as_json else show(found)


def _machine(per_hour: float | None, tokens_per_s: float | None, run: Path | None) -> dict[str, Any]:
    from workbench.economics.prices import cost_per_million

    if per_hour is None or (tokens_per_s is None) == (run is None):
        raise WorkbenchError("price of a machine's tokens: give --per-hour, and --tokens-per-s or --run")
    if run is not None:
        from workbench.runs.record import Record

        summary = Record.open(run).summary
        tokens_per_s = summary.get("output_tokens_per_s")
        if not tokens_per_s:
            raise WorkbenchError(f"run {run}: has no output_tokens_per_s; give --tokens-per-s")
    assert tokens_per_s is not None
    found = {"per_hour": per_hour, "output_tokens_per_s": tokens_per_s, "run": str(run) if run else None}
    return found | {"cost_per_million": float(cost_per_million(per_hour, tokens_per_s))}


def _show_machine(found: dict[str, Any]) -> None:
    prices = found["prices"]
    rate = f"{found['per_hour']:,.2f} {prices['currency']} an hour at {found['output_tokens_per_s']:,.1f} tokens/s"
    print(f"{rate}: {found['cost_per_million']:,.4f} a million tokens; {prices['name']} asks {prices['output']:g}")


def show(found: dict[str, Any]) -> None:
    prices = found["prices"]
    kinds = ("input", "output", "cache_write_5m", "cache_write_1h", "cache_read")
    amounts = ", ".join(f"{kind.replace('_', ' ')} {prices[kind]:g}" for kind in kinds if prices[kind] is not None)
    made = "an example, " if prices["example"] else ""
    say(f"{prices['name']}: {made}{prices['currency']} a million tokens: {amounts}", style="bold")
    say(f"  {prices['source']}; read on {prices['date']}")
    say(_workload(found))
    cells = []
    for row in found["plans"]:
        formula = f"{row['by_formula']:,.4f}" if "by_formula" in row else ""
        share = "" if row["share"] is None else format_percent(row["share"])
        first = row is found["plans"][0]
        saved = ("", "") if first else (f"{row['saved']:,.4f}", share)
        counts = ("", "") if first else (f"{row['requests_that_write']:,}", f"{row['requests_that_read']:,}")
        cells.append((row["plan"], f"{row['total']:,.4f}", formula, *saved, *counts))
    headings = ("plan", "cost", "by formula", "saved", "share", "requests that write", "that read")
    say(Table("", cells, headings, left=()))
    say(*_remarks(found))


def _workload(found: dict[str, Any]) -> str:
    workload = found["workload"]
    if workload["arrivals"] == "trace":
        known = "prefixes as recorded" if workload["blocks"] else "only the lengths of its prompts are known"
        before = f"; before each {workload['prompt']:,} tokens of system prompt" if workload["prompt"] else ""
        return f"{workload['requests']:,} requests of a trace, {known}{before}"
    how = {"even": "evenly", "poisson": f"at random (seed {workload['seed']})"}[workload["arrivals"]]
    besides = "".join(f", {workload[name]:,} tokens of {name}" for name in ("question", "output") if workload[name])
    days = f" for {workload['days']:,} days" if workload["days"] > 1 else ""
    rate = f"{workload['requests_a_day']:,} requests a day{days}, {how}"
    return f"{workload['prompt']:,} tokens of system prompt{besides}, {rate}"


def _remarks(found: dict[str, Any]) -> list[str]:
    lines = []
    if (most := found.get("most_saved")) is not None:
        lines.append(f"at most {format_percent(most)} of the cached tokens' price can be saved: a hit pays for a read")
    for life, row in found.get("break_even", {}).items():
        pays = "never" if row["request"] is None else f"from request {row['request']} of a life on (read {row['read']})"
        lines.append(f"{life}: pays {pays}")
    if lives := found.get("requests_per_ttl"):
        rates = "; ".join(f"{life} has {count:,.2f} requests" for life, count in lives.items())
        best = ", ".join(f"{how}: {life or 'do not cache'}" for how, life in found["cheapest"].items())
        lines += [f"at this rate {rates}", f"cheapest by formula: {best}"]
    if cache := found.get("response_cache"):
        lines.append(
            f"a response cache, if all had temperature 0: {cache['hits']:,} hits "
            f"({format_percent(cache['hit_rate'])}), saves {cache['saved']:,.4f} ({format_percent(cache['share'])})"
        )
    for source_figures in found.get("said", ()):
        lines += [
            f"the source states: {source_figures['uncached']:.2f} uncached, {source_figures['saved']:.2f} saved "
            f"({format_percent(source_figures['share'])}), {source_figures['requests_per_ttl']} requests in 5 minutes",
            f"  {source_figures['requests_per_ttl']} in 5 minutes are "
            f"{source_figures['requests_a_day_at_that']:,} a day, and save "
            f"{format_percent(source_figures['share_at_that'])}; "
            f"{format_percent(source_figures['hit_share_at_that'])} of them hit, which is no saving",
        ]
    return lines
