"""Report a priced workload: the cost of each caching plan, its break-even, and the figures that the prices' source
publishes."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Literal, Self

from pydantic import model_validator

from workbench.economics.bill import (
    DAY,
    CachingPlan,
    even_times,
    max_saving,
    price_plans,
    system_prompt_calls,
    system_prompt_day,
    traffic_calls,
)
from workbench.economics.prices import KINDS, Prices, Usage
from workbench.economics.prompt_cache import (
    CACHE_TTLS,
    FIVE_MINUTES,
    break_even,
    cheapest_ttl,
    even_writes,
    poisson_writes,
    prefix_cost,
)
from workbench.economics.response_cache import replay_response_cache
from workbench.settings import Count, NonNegative, Seed, Settings
from workbench.simulate.arrival import Arrival
from workbench.simulate.source import source_of
from workbench.simulate.traffic_settings import AzureLengths, Lengths, MooncakeLengths, TrafficSettings

GENERATED_TRACES: dict[str, Lengths] = {"azure": AzureLengths(), "mooncake": MooncakeLengths()}


class PricedWorkload(Settings):
    """Requests with a common system prompt, given as a number per day or as a trace."""

    prompt: NonNegative | None = None  # tokens of the system prompt; None: 2,000, or with a trace none
    question: NonNegative = 0  # tokens of the question after it, new in each request
    output: NonNegative = 0  # tokens of each answer
    requests: Count | None = None  # requests a day, None: 1,000; with a trace its first ones, None: all
    days: Count = 1
    arrivals: Literal["even", "poisson"] = "even"
    trace: str | None = None  # azure, mooncake, or a trace file: an hour with its own lengths and prefixes
    seed: Seed = 0  # random seed of arrivals and of a generated trace

    @model_validator(mode="after")
    def _a_trace_has_its_own(self) -> Self:
        own = {"question", "output", "days", "arrivals"} & self.model_fields_set
        if self.trace is not None and own:
            raise ValueError(f"{min(own)}: is given by the trace; remove it")
        return self


def price_workload(prices: Prices, asked: PricedWorkload) -> dict[str, Any]:
    """Price a workload with and without a prompt cache."""
    if asked.trace is not None:
        lengths = GENERATED_TRACES.get(asked.trace)
        source: dict[str, Any] = {"trace": asked.trace} if lengths is None else {"lengths": lengths}
        traffic = TrafficSettings(**source, requests=asked.requests, seed=asked.seed)
        return price_traffic(prices, list(source_of(traffic).initial_arrivals()), asked.prompt or 0)
    return price_day(prices, asked)


def price_day(prices: Prices, workload: PricedWorkload) -> dict[str, Any]:
    """Price `requests` requests per day with a system prompt, at even or random times."""
    prompt = 2000 if workload.prompt is None else workload.prompt
    asked: dict[str, Any] = workload.model_dump(exclude={"trace"})
    asked |= {"prompt": prompt, "requests": workload.requests or 1000}
    found = system_prompt_day(prices, **asked)
    requests, arrivals = asked.pop("requests"), asked["arrivals"]
    asked["requests_a_day"] = requests
    days, question, output = asked["days"], asked["question"], asked["output"]
    besides = requests * days * float(prices.cost(Usage(input=question, output=output)))
    rows = [row | {"by_formula": _formula(prices, plan, asked) + besides} for row, plan in _rows(found)]
    answer = {"workload": asked, **_about(prices), "plans": rows}
    if prices.cache_read is not None:
        rate = Fraction(requests, DAY)
        answer["requests_per_ttl"] = {life.name: float(rate * life.seconds) for life in CACHE_TTLS}
        answer["cheapest"] = _cheapest(prices, rate, requests * days, arrivals)
        if (days, question, output) == (1, 0, 0):
            answer["said"] = _said(prices, prompt, requests)
    return answer


def price_traffic(prices: Prices, arrivals: Sequence[Arrival], system: int = 0) -> dict[str, Any]:
    """Price a traffic after a common system prompt, with its named prompt blocks cached."""
    found = price_plans(prices, list(traffic_calls(arrivals, system)))
    blocks = any(arrival.blocks for arrival in arrivals)
    asked = {"prompt": system, "requests": len(arrivals), "arrivals": "trace", "blocks": blocks}
    answer = {"workload": asked, **_about(prices), "plans": [row for row, _ in _rows(found)]}
    if blocks:
        kept = replay_response_cache(arrivals, prices)
        answer["response_cache"] = {
            "hits": kept.hits, "hit_rate": kept.hit_rate, "saved": float(kept.saved), "share": kept.saved_fraction,
        }  # fmt: skip
    return answer


def _about(prices: Prices) -> dict[str, Any]:
    about: dict[str, Any] = {"prices": prices.model_dump(mode="json", exclude={"says"})}
    for kind in KINDS:
        amount = getattr(prices, kind)
        about["prices"][kind] = None if amount is None else float(amount)
    if prices.cache_read is not None:
        about["most_saved"] = float(max_saving(prices)) if prices.input else None
        bought = [life for life in CACHE_TTLS if getattr(prices, life.kind) is not None]
        break_even_points = {life.name: break_even(prices, life) for life in bought}
        about["break_even"] = {
            name: {
                "crossing": None if found.break_even_requests is None else float(found.break_even_requests),
                "request": found.first_cheaper_request, "read": found.first_cheaper_read,
            }
            for name, found in break_even_points.items()
        }  # fmt: skip
    return about


def _rows(found: Sequence[CachingPlan]) -> list[tuple[dict[str, Any], CachingPlan]]:
    plain = found[0].bill
    rows = []
    for plan in found:
        saved = plan.bill.saving_against(plain)
        share = float(saved / plain.total) if plain.total else None
        rows.append(({"plan": plan.name, **plan.bill.as_dict(), "saved": float(saved), "share": share}, plan))
    return rows


def _formula(prices: Prices, plan: CachingPlan, asked: dict[str, Any]) -> float:
    requests, life = asked["requests_a_day"] * asked["days"], plan.ttl
    rate, writes = Fraction(asked["requests_a_day"], DAY), 0.0
    if life is not None and asked["arrivals"] == "even":
        writes = even_writes(requests, 1 / rate, life, plan.renews)
    elif life is not None:
        writes = poisson_writes(requests, float(rate), life, plan.renews)
    return prefix_cost(prices, life, requests, writes, asked["prompt"])


def _cheapest(prices: Prices, rate: Fraction, requests: int, arrivals: str) -> dict[str, str | None]:
    found = {}
    for renews, name in ((True, "renewed by hits"), (False, "from the write on")):
        best = cheapest_ttl(prices, rate, requests, renews, arrivals)
        found[name] = None if best is None else best.name
    return found


def _said(prices: Prices, prompt: int, requests: int) -> list[dict[str, Any]]:
    """Compare the source's figures for this workload with the figures at its own number of requests per TTL."""
    rows = []
    for said in prices.says:
        if (said.prompt, said.requests) != (prompt, requests):
            continue
        calls = list(system_prompt_calls(even_times(said.requests_per_ttl, FIVE_MINUTES.seconds), prompt))
        plain, busy = price_plans(prices, calls, (FIVE_MINUTES,))[:2]
        rows.append({
            "uncached": float(said.uncached), "saved": float(said.saved), "share": float(said.share),
            "requests_per_ttl": said.requests_per_ttl,
            "requests_a_day_at_that": said.requests_per_ttl * DAY // FIVE_MINUTES.seconds,
            "share_at_that": float(busy.bill.saving_against(plain.bill) / plain.bill.total),
            "hit_share_at_that": (said.requests_per_ttl - 1) / said.requests_per_ttl,
        })  # fmt: skip
    return rows
