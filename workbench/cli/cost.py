"""`workbench cost`: price a workload with and without a prompt cache, or the tokens of a machine."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from workbench.cli.shared import AsJson, console, given_options, print_json
from workbench.display import Table
from workbench.errors import WorkbenchError

GENERATED_TRACES = ("azure", "mooncake")
DAY_OPTIONS = {"question", "output", "days"}


class Arrivals(StrEnum):
    EVEN = "even"
    POISSON = "poisson"
    TRACE = "trace"


def cost(
    context: typer.Context,
    price: Annotated[str, typer.Option(help="a table that ships, or a YAML file")] = "article-a",
    prompt: Annotated[
        int | None, typer.Option(min=0, help="tokens of a system prompt; 2000 unless given, none before a trace")
    ] = None,
    question: Annotated[int, typer.Option(min=0, help="tokens after it, each time others")] = 0,
    output: Annotated[int, typer.Option(min=0, help="tokens of each answer")] = 0,
    requests: Annotated[
        int | None, typer.Option(min=1, help="a day, 1000 unless given; of a trace the first so many")
    ] = None,
    days: Annotated[int, typer.Option(min=1, help="that are paid for")] = 1,
    arrivals: Annotated[Arrivals, typer.Option(help="when requests come")] = Arrivals.EVEN,
    trace: Annotated[
        str | None, typer.Option(help="azure, mooncake, or a trace file: an hour with its own lengths and prefixes")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="of random arrivals and of a generated trace")] = 0,
    per_hour: Annotated[float | None, typer.Option(help="what a machine costs an hour; with a rate below")] = None,
    tokens_per_s: Annotated[float | None, typer.Option(help="tokens a second that it makes")] = None,
    run: Annotated[Path | None, typer.Option(help="a run folder, for its output tokens a second")] = None,
    as_json: AsJson = False,
) -> None:
    """Price a workload: uncached, and with a prompt cache of 5 minutes or 1 hour whose hits renew it or not.

    With `--per-hour`, price the tokens of a machine of one's own instead.
    """
    from workbench.economics.prices import load_prices
    from workbench.economics.report import price_day, price_traffic

    prices, words = load_prices(price), given_options(context)
    if per_hour is not None or tokens_per_s is not None or run is not None:
        machine = _machine(per_hour, tokens_per_s, run)
        found = {"prices": {"name": prices.name, "currency": prices.currency, "output": float(prices.output)}} | machine
        print_json(found) if as_json else _show_machine(found)
        return
    if (arrivals is Arrivals.TRACE) != (trace is not None):
        raise WorkbenchError("--arrivals trace and --trace go together: name azure, mooncake, or a trace file")
    if trace is not None:
        if foreign := sorted(words & DAY_OPTIONS):
            raise WorkbenchError(f"--{foreign[0]}: a trace has its own; leave it out")
        found = price_traffic(prices, _traffic(trace, requests, seed), prompt or 0)
    else:
        prompt_tokens = 2000 if prompt is None else prompt
        found = price_day(prices, prompt_tokens, requests or 1000, str(arrivals), seed, days, question, output)
    print_json(found) if as_json else show(found)


def _traffic(trace: str, requests: int | None, seed: int) -> list[Any]:
    from workbench.simulate.source import source_of
    from workbench.simulate.traffic_settings import AzureLengths, MooncakeLengths, TrafficWorkload

    drawn = {"azure": AzureLengths(), "mooncake": MooncakeLengths()}
    source: dict[str, Any] = {"lengths": drawn[trace]} if trace in GENERATED_TRACES else {"trace": trace}
    return list(source_of(TrafficWorkload(**source, requests=requests, seed=seed)).initial_arrivals())


def _machine(per_hour: float | None, tokens_per_s: float | None, run: Path | None) -> dict[str, Any]:
    from workbench.economics.prices import cost_per_million

    if per_hour is None or (tokens_per_s is None) == (run is None):
        raise WorkbenchError("a machine's tokens: give --per-hour and one of --tokens-per-s and --run")
    if run is not None:
        from workbench.runs.record import Record

        summary = Record.open(run).summary
        tokens_per_s = summary.get("output_tokens_per_s")
        if not tokens_per_s:
            raise WorkbenchError(f"run {run}: has no output_tokens_per_s of its own; give --tokens-per-s")
    assert tokens_per_s is not None
    found = {"per_hour": per_hour, "output_tokens_per_s": tokens_per_s, "run": str(run) if run else None}
    return found | {"cost_per_million": float(cost_per_million(per_hour, tokens_per_s))}


def _show_machine(found: dict[str, Any]) -> None:
    prices = found["prices"]
    rate = f"{found['per_hour']:,.2f} {prices['currency']} an hour at {found['output_tokens_per_s']:,.1f} tokens/s"
    print(f"{rate}: {found['cost_per_million']:,.4f} a million tokens; {prices['name']} asks {prices['output']:g}")


def show(found: dict[str, Any]) -> None:
    from rich.text import Text

    out, prices = console(), found["prices"]

    def say(line: str, style: str = "") -> None:
        out.print(Text(line, style=style), soft_wrap=True)

    kinds = ("input", "output", "cache_write_5m", "cache_write_1h", "cache_read")
    amounts = ", ".join(f"{kind.replace('_', ' ')} {prices[kind]:g}" for kind in kinds if prices[kind] is not None)
    made = "an example, " if prices["example"] else ""
    say(f"{prices['name']}: {made}{prices['currency']} a million tokens: {amounts}", "bold")
    say(f"  {prices['source']}; read on {prices['date']}")
    say(_workload(found))
    cells = []
    for row in found["plans"]:
        formula = f"{row['by_formula']:,.4f}" if "by_formula" in row else ""
        share = "" if row["share"] is None else f"{row['share']:.2%}"
        first = row is found["plans"][0]
        saved = ("", "") if first else (f"{row['saved']:,.4f}", share)
        counts = ("", "") if first else (f"{row['requests_that_write']:,}", f"{row['requests_that_read']:,}")
        cells.append((row["plan"], f"{row['total']:,.4f}", formula, *saved, *counts))
    headings = ("plan", "cost", "by formula", "saved", "share", "requests that write", "that read")
    out.print(Table("", cells, headings, left=()))
    for line in _remarks(found):
        say(line)


def _workload(found: dict[str, Any]) -> str:
    workload = found["workload"]
    if workload["arrivals"] == "trace":
        known = "prefixes as recorded" if workload["blocks"] else "of its prompts only lengths are known"
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
        lines.append(f"at most {most:.1%} of what is cached can be saved: a request that hits pays for a read")
    for life, row in found.get("break_even", {}).items():
        pays = "never" if row["request"] is None else f"from request {row['request']} of a life on (read {row['read']})"
        lines.append(f"{life}: pays {pays}")
    if lives := found.get("requests_per_ttl"):
        rates = "; ".join(f"{life} has {count:,.2f} requests" for life, count in lives.items())
        best = ", ".join(f"{how}: {life or 'do not cache'}" for how, life in found["cheapest"].items())
        lines += [f"at this rate {rates}", f"cheapest by formula: {best}"]
    if cache := found.get("response_cache"):
        lines.append(
            f"a response cache, were all asked at temperature 0: {cache['hits']:,} hits ({cache['hit_rate']:.2%}), "
            f"saves {cache['saved']:,.4f} ({cache['share']:.2%})"
        )
    for source_figures in found.get("said", ()):
        lines += [
            f"the source says: {source_figures['uncached']:.2f} uncached, {source_figures['saved']:.2f} saved "
            f"({source_figures['share']:.0%}), {source_figures['requests_per_ttl']} requests in 5 minutes",
            f"  {source_figures['requests_per_ttl']} in 5 minutes are "
            f"{source_figures['requests_a_day_at_that']:,} a day, and save {source_figures['share_at_that']:.1%}; "
            f"{source_figures['hit_share_at_that']:.1%} of them hit, which is no saving",
        ]
    return lines
