"""Claims on the price of a prompt cache: break-even point, a day's bill, and the choice of TTL."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.claims.claim import (
    CalculationEvidence,
    Claim,
    ClaimSource,
    ClaimTrial,
    EvidenceNumbers,
    MissingEvidence,
    Ruling,
)
from workbench.display import Table
from workbench.economics import cache_figures
from workbench.economics.prices import DEFAULT_TABLE, Prices, load_prices

TABLE = "the sources' prices (calculated)"
FIVE, HOUR = "5 minutes", "1 hour"


def multiples(found: EvidenceNumbers) -> Ruling:
    """A write for 5 minutes costs 1.25 and for 1 hour 2 times the input price, a read 0.1: holds; two of them: with
    limits; else refuted."""
    stated = {"cache_write_5m": 1.25, "cache_write_1h": 2.0, "cache_read": 0.1}
    right = [name for name, times in stated.items() if abs(found[name] / times - 1) < 0.01]
    return Ruling(
        "holds" if len(right) == 3 else "holds-with-limits" if len(right) == 2 else "refuted",
        ", ".join(f"{name} {found[name]:g}" for name in stated),
        f"right: {', '.join(right)}",
    )


def pays_off(found: EvidenceNumbers) -> Ruling:
    """The cache for 5 minutes is cheaper from the second read on, not before: holds; from the second request, which is
    the first read: with limits; else refuted."""
    five, hour = found[FIVE], found[HOUR]
    right, off_by_one = five["read"] == 2, five["request"] == 2
    return Ruling(
        "holds" if right else "holds-with-limits" if off_by_one else "refuted",
        f"the curves cross at {five['crossing']:.2f} requests of one life: cheaper from request "
        f"{five['request']}, read "
        f"{five['read']} (for 1 hour from request {hour['request']}, read {hour['read']}); simulated: request "
        f"{five['simulated_request']}",
        "the second request, which is the first read: the first request writes",
        {"requests where the curves cross": five["crossing"], "first read that pays": five["read"]},
    )


def daily(found: EvidenceNumbers) -> Ruling:
    """$6.00 uncached, and a plan that saves 97% at least: holds; prices that allow such a saving, for arrivals of
    another kind: with limits; where even hits alone cost too much for it: refuted."""
    best = max(row["share"] for row in found["rows"])
    even = {row["renews"]: row for row in found["rows"] if row["arrivals"] == "even" and row["ttl"] == FIVE}
    right = abs(found["uncached"] / 6.0 - 1) < 0.01
    outcome = "refuted" if not right or found["most_saved"] < 0.97 else "holds" if best >= 0.97 else "holds-with-limits"
    return Ruling(
        outcome,
        f"${found['uncached']:.2f} uncached; no saving can pass {found['most_saved']:.0%}: with even arrivals "
        f"${even[True]['saved']:.2f} ({even[True]['share']:.1%}) where a hit renews the life and "
        f"${even[False]['saved']:.2f} "
        f"({even[False]['share']:.1%}) where none does; {found['requests_a_window']:.1f} requests a window, not "
        "70, with "
        f"which it were {found['share_at_window']:.1%} ({found['hit_share_at_window']:.1%} is the share of hits)",
        "with other arrivals",
        {"$ uncached": found["uncached"], "$ saved, hits renew": even[True]["saved"], "$ saved, no renewal":
         even[False]["saved"], "requests in 5 minutes": found["requests_a_window"]},
    )  # fmt: skip


def days(records: object) -> Sequence[Table]:
    rows = [
        (row["arrivals"], row["plan"], f"${row['cost']:.2f}", f"${row['saved']:.2f}", f"{row['share']:.1%}",
         f"{row['writes']:,} and {row['reads']:,}")
        for row in cache_figures.cache_daily()["rows"]
    ]  # fmt: skip
    headings = ("arrivals", "plan", "a day", "saved", "share", "writes and reads")
    title = "2,000 tokens, 1,000 requests a day, $3 per million: 3.5 requests in 5 minutes; 70 were 20,160 a day"
    return [Table(title, rows, headings)]


def life(found: EvidenceNumbers) -> Ruling:
    """By requests a day: the densest traffic is cheapest with 5 minutes, some sparser one with an hour, the sparsest
    without a cache, whether or not hits renew, and each life pays from one hit a write (0.8 to 1.25): holds; the choice
    where hits renew, or where they do not: with limits; else refuted."""
    so = {renews: _choice([row for row in found["rows"] if row["renews"] is renews]) for renews in (True, False)}
    once = [0.8 <= hits <= 1.25 for hits in found["hits_a_write_to_pay"].values()]
    hits = ", ".join(f"{name} {count:.2f}" for name, count in found["hits_a_write_to_pay"].items())
    return Ruling(
        "holds" if all(so.values()) and all(once) else "holds-with-limits" if any(so.values()) else "refuted",
        "cheapest by requests a day, hits renew: "
        + ", ".join(f"{row['requests_a_day']:,} {row['best'] or 'none'}" for row in found["rows"] if row["renews"])
        + "; they do not: "
        + ", ".join(f"{row['requests_a_day']:,} {row['best'] or 'none'}" for row in found["rows"] if not row["renews"])
        + f"; pays from so many hits a write: {hits}",
        f"{_where(so)}; pays from so many hits a write: {hits}",
        {f"hits a write that pay, {name}": count for name, count in found["hits_a_write_to_pay"].items()},
    )


def _where(so: dict[bool, bool]) -> str:
    """Describe the renewal under which the choice is right, and its failure under the other."""
    if all(so.values()):
        return "the choice is as claimed"
    return "where hits renew the life, not where they do not" if so[True] else "where hits do not renew the life"


def lives(**changed: str) -> EvidenceNumbers:
    return cache_figures.cache_ttl_choice(_priced(**changed), requests=2000)


def _priced(**changed: str) -> Prices:
    """Return the source's table with some prices changed."""
    table = load_prices(DEFAULT_TABLE).model_dump(exclude={"says"}) | changed
    return Prices.from_values(table | {"name": "changed", "example": bool(changed)})


def _choice(rows: Sequence[EvidenceNumbers]) -> bool:
    best = [row["best"] for row in sorted(rows, key=lambda row: row["requests_a_day"])]
    return best[0] is None and best[-1] == FIVE and HOUR in best


def _lives(*best: str | None) -> EvidenceNumbers:
    rows = [{"requests_a_day": 10**i, "renews": r, "best": b} for r in (True, False) for i, b in enumerate(best)]
    return {"rows": rows, "hits_a_write_to_pay": {FIVE: 1.0, HOUR: 1.0}}


CLAIMS = (
    Claim(
        id="cache-prices",
        says="A cache write costs 1.25 (5 minutes) or 2 times (1 hour) the input price, a read 0.1 times",
        sources=(ClaimSource("A", "1.25, 2 and 0.1 times"),),
        trials=(
            ClaimTrial(
                MissingEvidence(
                    "a vendor's own price list: the table here is the source's, and cannot vouch for itself"
                ),
                multiples,
                examples={
                    "holds": {"cache_write_5m": 1.25, "cache_write_1h": 2.0, "cache_read": 0.1},
                    "holds-with-limits": {"cache_write_5m": 1.25, "cache_write_1h": 1.5, "cache_read": 0.1},
                    "refuted": {"cache_write_5m": 1.0, "cache_write_1h": 1.0, "cache_read": 0.5},
                },
            ),
        ),
    ),
    Claim(
        id="cache-breakeven",
        says="The 5-minute cache pays for itself at the second read",
        sources=(ClaimSource("A", "second read: 1.25 + 0.1 against 2, which counts requests"),),
        trials=(
            ClaimTrial(
                CalculationEvidence(cache_figures.cache_breakeven, TABLE),
                pays_off,
                examples={
                    "holds": lambda: cache_figures.cache_breakeven(_priced(cache_write_5m="6")),
                    "holds-with-limits": cache_figures.cache_breakeven,
                    "refuted": lambda: cache_figures.cache_breakeven(_priced(cache_write_5m="20")),
                },
            ),
        ),
    ),
    Claim(
        id="cache-daily",
        says="2,000 tokens 1,000 times a day cost $6.00; caching saves $5.90 (98%) at about 70 requests in 5 minutes",
        sources=(ClaimSource("A", "$6.00, $5.90, 98%, about 70 requests in 5 minutes"),),
        trials=(
            ClaimTrial(
                CalculationEvidence(cache_figures.cache_daily, TABLE),
                daily,
                examples={
                    "holds": lambda: cache_figures.cache_daily(_priced(cache_read="0.03")),
                    "holds-with-limits": lambda: cache_figures.cache_daily(_priced(cache_read="0.09")),
                    "refuted": cache_figures.cache_daily,
                },
            ),
        ),
        condition_tables=days,
    ),
    Claim(
        id="cache-ttl-choice",
        says="5 minutes for steady traffic, 1 hour for sparse, none when it would be hit less than once a life",
        sources=(ClaimSource("A", "without figures"),),
        trials=(
            ClaimTrial(
                CalculationEvidence(lives, TABLE),
                life,
                examples={
                    "holds": _lives(None, HOUR, FIVE),
                    "holds-with-limits": lives,
                    "refuted": lambda: lives(cache_write_5m="20"),
                },
            ),
        ),
    ),
)
