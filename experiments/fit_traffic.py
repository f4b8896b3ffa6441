"""Fit the traffic generators to the public traces, and print their parameters as Python.

    python -m experiments.fit_traffic azure azure_llm_inference_2023_conv.csv > workbench/simulate/azure_table.py
    python -m experiments.fit_traffic mooncake mooncake_conversation.jsonl > workbench/simulate/mooncake_table.py

Lengths become tables of quantiles, outputs one table for each quarter of the prompts. Times become a Poisson process
with a rate for every five minutes. Mooncake's shared prefixes become a tree: a request is new, continues the latest
request with its longest shared prefix, or shares a part of one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from statistics import mean, quantiles

from workbench.simulate.arrival import Arrival
from workbench.simulate.trace_files import read_trace

WIDTH = 300.0  # seconds that share a rate
QUARTERS = 4
FINE, COARSE = 100, 40  # steps of a table
SOURCES = {
    "azure": "Azure LLM inference trace 2023, conversations (CC-BY 4.0; Patel et al., Splitwise, ISCA 2024)",
    "mooncake": "Mooncake's conversation trace (Apache-2.0; kvcache-ai/Mooncake, FAST 2025)",
}


def table(values: Iterable[float], steps: int) -> list[int]:
    """Return quantiles at equal distances.

    The ends are chosen so that the first and the last part keep their means: a few long texts carry much of a trace's
    tokens.
    """
    ordered = sorted(values)
    inner = quantiles(ordered, n=steps, method="inclusive")
    part = max(1, len(ordered) // steps)
    low, high = 2 * mean(ordered[:part]) - inner[0], 2 * mean(ordered[-part:]) - inner[-1]
    return [round(value) for value in (min(low, inner[0]), *inner, max(high, inner[-1]))]


def rates(arrivals: Sequence[Arrival]) -> list[int]:
    """Count arrivals in each period; the last period, which is cut short, is scaled to full length."""
    end = arrivals[-1].time
    counts = [0] * (int(end // WIDTH) + 1)
    for arrival in arrivals:
        counts[int(arrival.time // WIDTH)] += 1
    counts[-1] = round(counts[-1] * WIDTH / (end - WIDTH * (len(counts) - 1)))
    return counts


def by_quarter(arrivals: Sequence[Arrival]) -> list[list[int]]:
    """Return output lengths of each quarter of the prompts, the shortest prompts first."""
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
    """Fit Mooncake's conversations.

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


def as_python(name: str, parameters: dict[str, object]) -> str:
    made = f"Made by `python -m experiments.fit_traffic {name} TRACE`; see there."
    head = f'"""Fitted to {SOURCES[name]}.\n\n{made}\n"""\n'
    lines = [head, "from __future__ import annotations\n"]
    for key, value in parameters.items():
        lines.append(f"{key} = {_wrapped(value)}")
    return "\n".join(lines)


def _wrapped(value: object) -> str:
    if not isinstance(value, list):
        return repr(value)
    if value and isinstance(value[0], list):
        return "[\n" + "".join(f"    {_row(row, 8)},\n" for row in value) + "]"
    return _row(value, 4)


def _row(values: list, indent: int, width: int = 116) -> str:
    lines, line = [], ""
    for value in values:
        word = f"{value}, "
        if len(line) + len(word) > width - indent:
            lines.append(line.rstrip())
            line = ""
        line += word
    inner = "\n".join(" " * indent + text for text in (*lines, line.rstrip()))
    return f"[\n{inner}\n{' ' * (indent - 4)}]"


if __name__ == "__main__":
    fits = {"azure": azure, "mooncake": mooncake}
    print(as_python(sys.argv[1], fits[sys.argv[1]](list(read_trace(sys.argv[2])))))
