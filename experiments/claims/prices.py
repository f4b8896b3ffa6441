"""Figures of claims on the price of a prompt cache: break-even point, a day's bill, and the choice of TTL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workbench.display import Table
from workbench.economics import cache_figures
from workbench.economics.prices import DEFAULT_TABLE, load_prices

FIVE, HOUR = "5 minutes", "1 hour"


def pays_off() -> dict[str, float]:
    """Return the first read, and the first request, from which the cache is cheaper, for 5 minutes and for an hour, and
    the requests of one life where the curves cross."""
    found = cache_figures.cache_breakeven()
    five, hour = found[FIVE], found[HOUR]
    return {
        "first_read": five["read"],
        "first_request": five["request"],
        "first_read_1h": hour["read"],
        "first_request_1h": hour["request"],
        "requests_where_curves_cross": five["crossing"],
        "first_request_simulated": five["simulated_request"],
    }


def daily() -> dict[str, float]:
    """Return the bill of a day without a cache in $, the largest share that any plan saves, the share that the prices
    allow, and, for even arrivals with 5 minutes, $ saved and the requests in that time."""
    found = cache_figures.cache_daily()
    even = {row["renews"]: row for row in found["rows"] if row["arrivals"] == "even" and row["ttl"] == FIVE}
    return {
        "uncached": found["uncached"],
        "best_saved_share": max(row["share"] for row in found["rows"]),
        "possible_saved_share": found["most_saved"],
        "$ saved, hits renew": even[True]["saved"],
        "$ saved, no renewal": even[False]["saved"],
        "requests in 5 minutes": found["requests_a_window"],
    }


def days() -> Sequence[Table]:
    rows = [
        (row["arrivals"], row["plan"], f"${row['cost']:.2f}", f"${row['saved']:.2f}", f"{row['share']:.1%}",
         f"{row['writes']:,} and {row['reads']:,}")
        for row in cache_figures.cache_daily()["rows"]
    ]  # fmt: skip
    headings = ("arrivals", "plan", "a day", "saved", "share", "writes and reads")
    title = "2,000 tokens, 1,000 requests a day, $3 per million: 3.5 requests in 5 minutes; 70 were 20,160 a day"
    return [Table(title, rows, headings)]


def lives() -> dict[str, float]:
    """Return whether, by requests a day, the densest traffic is cheapest with 5 minutes, some sparser one with an hour
    and the sparsest without a cache: where hits renew the life, and where they do not; and whether each life pays from
    one hit a write (0.8 to 1.25)."""
    found = cache_figures.cache_ttl_choice(load_prices(DEFAULT_TABLE), requests=2000)
    to_pay = found["hits_a_write_to_pay"]
    return {
        "right_if_hits_renew": _choice([row for row in found["rows"] if row["renews"]]),
        "right_if_not": _choice([row for row in found["rows"] if not row["renews"]]),
        "pays_from_one_hit": all(0.8 <= hits <= 1.25 for hits in to_pay.values()),
        **{f"hits a write that pay, {name}": hits for name, hits in to_pay.items()},
    }


def _choice(rows: Sequence[Mapping[str, Any]]) -> bool:
    best = [row["best"] for row in sorted(rows, key=lambda row: row["requests_a_day"])]
    return best[0] is None and best[-1] == FIVE and HOUR in best
