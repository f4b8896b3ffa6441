"""Figures of `batch_size.yaml`: the effect of batch size.

A closed loop of n clients, each with one request at a time, makes a batch of size n.
"""

from __future__ import annotations

from itertools import pairwise

from workbench.experiment.verdict import VariantRows, variant_row

SIZES = ("1", "2", "4", "8", "16", "32", "64")
CROWD, LIMITED = "64", "64, at most 16"  # the same clients, of whom few are served at once
LAST = 1.5  # times the tokens a second of half the batch, for the last doubling reported
LESS, LONGER = 0.8, 1.25  # share of the best throughput, and multiple of the best TTFT, that a setting gives up
RATE, TTFT, TPOT = "output_tokens_per_s", "ttft_s_p50", "tpot_s_p50"


def amortised(rows: VariantRows) -> dict[str, float]:
    """Return the growth of tokens a second from 1 to 64 at once, whether they grow with every doubling, and the growth
    of the time per output token."""
    found = [variant_row(rows, size) for size in SIZES]
    rates = [row[RATE] for row in found]
    predicted = [row["predicted"][RATE] for row in found]
    last = next((SIZES[i + 1] for i in reversed(range(6)) if rates[i + 1] / rates[i] >= LAST), "0")
    return {
        "throughput_times": max(rates) / rates[0],
        "grows_each_time": all(after > before for before, after in pairwise(rates)),
        "tpot_times": found[-1][TPOT] / found[0][TPOT],
        "predicted_throughput_times": predicted[-1] / predicted[0],
        "last_doubling_that_gives_half": float(last),
    }


def trade(rows: VariantRows) -> dict[str, float]:
    """Return whether the setting of best TTFT has at most 80% of the best throughput, and that of best throughput at
    least 1.25 times the best TTFT: over the number of clients, and over the limit of the batch for 64 clients."""
    return {
        "over_clients": _parted([variant_row(rows, size) for size in SIZES]),
        "over_limits": _parted([variant_row(rows, name) for name in (CROWD, LIMITED)]),
    }


def _parted(rows: VariantRows) -> bool:
    soonest, most = min(rows, key=lambda row: row[TTFT]), max(rows, key=lambda row: row[RATE])
    return soonest[RATE] <= LESS * most[RATE] and most[TTFT] >= LONGER * soonest[TTFT]
