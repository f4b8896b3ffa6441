"""Judge the effect of batch size by the rules of `batch_size.yaml`; one was changed after a first run (`CHANGED`).

A closed loop of n clients, each with one request at a time, makes a batch of size n.
"""

from __future__ import annotations

from itertools import pairwise

from workbench.experiment.verdict import Outcome, RuleChange, VariantRows, Verdict, variant_row

SIZES = ("1", "2", "4", "8", "16", "32", "64")
CROWD, LIMITED = "64", "64, at most 16"  # the same clients, of whom few are served at once
SEVERAL, SOME = 2.0, 1.1  # times the tokens a second, as in batching.yaml
LAST = 1.5  # times the tokens a second of half the batch, for the last doubling reported
LESS, LONGER = 0.8, 1.25  # share of the best throughput, and multiple of the best TTFT, that a setting gives up
RATE, TTFT, TPOT = "output_tokens_per_s", "ttft_s_p50", "tpot_s_p50"
_WORK = RuleChange(
    what="requests of 32 tokens in and 48 out instead of 64 in and 32 out",
    when="2026-11-21",
    after="a first run on a shared machine, which was not kept",
    why="the batch should mostly decode",
)
_BAR = RuleChange(
    what=(
        "holds from 2 times the tokens a second (4 before), with limits from 1.1 (1.5 before); the record of "
        "170059, at 8.4 times, holds by either"
    ),
    when="2026-11-21",
    after="the same first run",
    why="batching.yaml asks for 2 times for the same claim",
)
CHANGED = {"batch-amortises": (_WORK, _BAR), "ttft-vs-throughput": (_WORK,)}


def judge(rows: VariantRows) -> list[Verdict]:
    return [amortised(rows), trade(rows)]


def amortised(rows: VariantRows) -> Verdict:
    found = [variant_row(rows, size) for size in SIZES]
    rates, tokens = [row[RATE] for row in found], [row[TPOT] for row in found]
    times, slower = max(rates) / rates[0], tokens[-1] / tokens[0]
    grows = all(after > before for before, after in pairwise(rates))
    holds = times >= SEVERAL and grows and slower > 1
    last = next((SIZES[i + 1] for i in reversed(range(6)) if rates[i + 1] / rates[i] >= LAST), "none")
    return Verdict(
        claim="batch-amortises",
        says="Each weight is read once for all in the batch: throughput grows with it, each request's latency too",
        rule=(
            f"batches of {', '.join(SIZES)}: tokens a second grow with every doubling and {SEVERAL:g} times in all, "
            f"and the time per output token is longer in the largest batch than alone: holds; {SOME:g} times: with "
            "limits; less: refuted"
        ),
        outcome="holds" if holds else "holds-with-limits" if times >= SOME else "refuted",
        reason=(
            f"{listed(rates, ',.0f')} tokens/s, {times:.1f} times, predicted at best "
            f"{_predicted(rows, RATE, '64') / _predicted(rows, RATE, '1'):.1f}; the last doubling that gives {LAST:g} "
            f"times or more leads to {last}; TPOT p50 {listed([t * 1e3 for t in tokens], '.1f')} ms, {slower:.1f} times"
        ),
        limits=f"{times:.1f} times in all, {'growing' if grows else 'not growing'} with every doubling",
        figures={"times the tokens a second, 64 at once": times, "times a token's latency": slower},
        changed=CHANGED["batch-amortises"],
    )


def trade(rows: VariantRows) -> Verdict:
    """Judge the trade of TTFT against throughput in two ways: with more clients, and with a higher batch limit for the
    same clients."""
    load = [variant_row(rows, size) for size in SIZES]
    limit = [variant_row(rows, name) for name in (CROWD, LIMITED)]
    parted = [_parted(load), _parted(limit)]
    outcome: Outcome = "holds" if all(parted) else "holds-with-limits" if any(parted) else "refuted"
    best = max(load, key=lambda row: row[RATE])
    return Verdict(
        claim="ttft-vs-throughput",
        says="What helps TTFT hurts throughput, and the other way round",
        rule=(
            f"the setting of best TTFT has at most {LESS:.0%} of the best throughput, and that of best throughput at "
            f"least {LONGER} times the best TTFT: so over the number of clients and over the limit of the batch for 64 "
            "clients: holds; over one of them: with limits; over neither: refuted"
        ),
        outcome=outcome,
        reason=(
            f"over clients {'so' if parted[0] else 'not so'}: TTFT p50 "
            f"{listed([row[TTFT] * 1e3 for row in load], '.0f')} ms, most tokens/s with {best['variant']}; over the "
            f"limit {'so' if parted[1] else 'not so'}: at most 64 and 16 at once give "
            f"{listed([row[RATE] for row in limit], ',.0f')} tokens/s and TTFT "
            f"{listed([row[TTFT] * 1e3 for row in limit], ',.0f')} ms"
        ),
        limits=f"over {'the number of clients' if parted[0] else 'the limit of the batch'}, not over "
        f"{'the limit of the batch' if parted[0] else 'the number of clients'}",
        changed=CHANGED["ttft-vs-throughput"],
    )


def _parted(rows: VariantRows) -> bool:
    soonest, most = min(rows, key=lambda row: row[TTFT]), max(rows, key=lambda row: row[RATE])
    return soonest[RATE] <= LESS * most[RATE] and most[TTFT] >= LONGER * soonest[TTFT]


def _predicted(rows: VariantRows, key: str, name: str) -> float:
    return variant_row(rows, name)["predicted"][key]


def listed(values: list[float], form: str) -> str:
    return ", ".join(format(value, form) for value in values)
