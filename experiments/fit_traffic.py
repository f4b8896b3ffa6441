"""Fit the traffic generators to the public traces, and print their parameters as JSON.

    python -m experiments.fit_traffic azure azure_llm_inference_2023_conv.csv > workbench/simulate/azure.json
    python -m experiments.fit_traffic mooncake mooncake_conversation.jsonl > workbench/simulate/mooncake.json

Lengths become tables of quantiles, outputs one table for each quarter of the prompts. Times become a Poisson process
with a rate for every five minutes. Mooncake's shared prefixes become a tree: a request is new, continues the latest
request with its longest shared prefix, or shares a part of one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from statistics import mean, quantiles

from workbench.simulate.arrival import Arrival
from workbench.simulate.trace_files import read_trace

WIDTH = 300.0  # seconds that share a rate
QUARTERS = 4
FINE, COARSE = 100, 40  # steps of a table


def table(values: Iterable[float], steps: int) -> list[int]:
    """Return the values at equally spaced quantiles.

    The two end values are chosen so that the first and the last part keep their means, since a few long texts carry
    many of a trace's tokens.
    """
    ordered = sorted(values)
    inner = quantiles(ordered, n=steps, method="inclusive")
    part = max(1, len(ordered) // steps)
    low, high = 2 * mean(ordered[:part]) - inner[0], 2 * mean(ordered[-part:]) - inner[-1]
    return [round(value) for value in (min(low, inner[0]), *inner, max(high, inner[-1]))]


def rates(arrivals: Sequence[Arrival]) -> list[int]:
    """Return the number of arrivals in each period; the count of the last, shorter period is scaled to full length."""
    end = arrivals[-1].time
    counts = [0] * (int(end // WIDTH) + 1)
    for arrival in arrivals:
        counts[int(arrival.time // WIDTH)] += 1
    counts[-1] = round(counts[-1] * WIDTH / (end - WIDTH * (len(counts) - 1)))
    return counts


def by_quarter(arrivals: Sequence[Arrival]) -> list[list[int]]:
    """Return a table of output lengths for each quarter of the requests, ordered by prompt length, shortest first."""
    ordered = sorted(arrivals, key=lambda arrival: arrival.prompt_tokens)
    size = len(ordered) / QUARTERS
    parts = [ordered[round(i * size) : round((i + 1) * size)] for i in range(QUARTERS)]
    return [table((arrival.output_tokens for arrival in part), COARSE) for part in parts]


def azure(arrivals: Sequence[Arrival]) -> dict[str, object]:
    return {
        "SECONDS": round(arrivals[-1].time),
        "WIDTH": WIDTH,
        "COUNTS": rates(arrivals),
        "PROMPT": table((arrival.prompt_tokens for arrival in arrivals), FINE),
        "OUTPUT": by_quarter(arrivals),
    }


def mooncake(arrivals: Sequence[Arrival]) -> dict[str, object]:
    """Fit the parameters of Mooncake's conversations.

    `GROWTH`: tokens that a turn adds to its conversation beyond the last turn's prompt and output. Shared parts are
    given in thousandths of the earlier prompt's blocks; all of them is the same prompt once more.
    """
    latest: dict[int, Arrival] = {}
    new: list[Arrival] = []
    ages, growth, part_ages, parts, part_more = [], [], [], [], []
    for arrival in arrivals:
        shared = sum(block in latest for block in arrival.blocks)  # a block's name identifies its whole prefix
        parent = latest[arrival.blocks[shared - 1]] if shared > 1 else None
        if parent is None:
            new.append(arrival)
        elif shared == parent.prompt_tokens // parent.block_tokens:
            ages.append(arrival.time - parent.time)
            growth.append(arrival.prompt_tokens - parent.prompt_tokens - parent.output_tokens)
        else:
            part_ages.append(arrival.time - parent.time)
            parts.append(1000 * shared / len(parent.blocks))
            if shared < len(parent.blocks):
                part_more.append(max(0, arrival.prompt_tokens - shared * arrival.block_tokens))
        latest.update((block, arrival) for block in arrival.blocks)
    times = sorted({arrival.time for arrival in arrivals})
    return {
        "SECONDS": round(arrivals[-1].time),
        "WIDTH": WIDTH,
        "COUNTS": rates(arrivals),
        "TICK": round(quantiles([b - a for a, b in zip(times, times[1:], strict=False)], n=2)[0]),
        "CONTINUED": round(len(ages) / len(arrivals), 4),
        "PARTLY": round(len(parts) / len(arrivals), 4),
        "AGE": table(ages, COARSE),
        "GROWTH": table(growth, FINE),
        "PART_AGE": table(part_ages, COARSE),
        "PART_PER_MILLE": table(parts, COARSE),
        "PART_MORE": table(part_more, FINE),
        "NEW": table((arrival.prompt_tokens for arrival in new), FINE),
        "LONGEST": max(arrival.prompt_tokens for arrival in arrivals),
        "OUTPUT": table((arrival.output_tokens for arrival in arrivals), FINE),
    }


def as_json(parameters: dict[str, object]) -> str:
    """Return JSON with one parameter per line."""
    lines = [f'"{name.lower()}": {json.dumps(value)}' for name, value in parameters.items()]
    return "{\n" + ",\n".join(lines) + "\n}"


if __name__ == "__main__":
    fits = {"azure": azure, "mooncake": mooncake}
    print(as_json(fits[sys.argv[1]](list(read_trace(sys.argv[2])))))
