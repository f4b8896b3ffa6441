"""Metrics of a run, derived from raw timestamps alone, under the names that vLLM uses.

TTFT: first token - arrival. E2EL: last token - arrival. ITL: between neighbouring tokens of one request, so that TTFT +
sum(ITL) = E2EL. TPOT = (E2EL - TTFT) / (n - 1), None for one token."""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence

from workbench.study.acceptance import acceptance_metrics
from workbench.study.apart import metrics_by_group

PHASES = ("prefill", "decode", "mixed")
COMPLETED = ("stop", "length")
Rows = Sequence[Mapping]


def percentile(values: Iterable[float], q: float) -> float | None:
    """Return the q-th percentile (0 to 100), linear between ranks as `numpy.percentile`; None without values."""
    ordered = sorted(values)
    if not ordered:
        return None
    rank = (len(ordered) - 1) * q / 100
    below = math.floor(rank)
    low, high, share = ordered[below], ordered[min(below + 1, len(ordered) - 1)], rank - below
    # Reckoned from the nearer end, so that rounding never carries it past either.
    return low + (high - low) * share if share < 0.5 else high - (high - low) * (1 - share)


def distribution(values: Iterable[float | None]) -> dict:
    """Return count, mean, p50, p90, p99, min and max of the values that are not None."""
    known = [value for value in values if value is not None]
    out: dict = {f"p{q}": percentile(known, q) for q in (50, 90, 99)}
    out["mean"] = math.fsum(known) / len(known) if known else None
    return out | {"min": min(known, default=None), "max": max(known, default=None), "count": len(known)}


def request_metrics(request: Mapping, times: Sequence[float]) -> dict:
    """Return TTFT, E2EL, TPOT, ITL (a list) and queue time of one request, in seconds.

    `times` are the timestamps of its tokens, in order."""
    arrival: float | None = request["arrival"]

    def since_arrival(time: float | None) -> float | None:
        return None if arrival is None or time is None else time - arrival

    return {
        "request_id": request["request_id"],
        "sample": request.get("sample", 0),
        "tenant": request.get("tenant") or "",  # records of older versions have none
        "priority": request.get("priority") or 0,
        "queue_s": since_arrival(request["first_scheduled"]),
        "ttft_s": since_arrival(times[0]) if times else None,
        "e2el_s": since_arrival(times[-1]) if times else None,
        "tpot_s": (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None,
        "itl_s": [after - before for before, after in zip(times, times[1:], strict=False)],
    }


def per_request(requests: Rows, tokens: Rows) -> list[dict]:
    """Return `request_metrics` of every request that was not refused, in the order given."""
    outputs: dict[tuple[str, int], deque[list[float]]] = defaultdict(deque)
    for token in tokens:
        mine = outputs[_sample_key(token)]
        if token["index"] == 0 or not mine:  # an id may be used again once its request has ended
            mine.append([])
        mine[-1].append(token["time"])
    served = [row for row in requests if row["finish_reason"] != "refused"]
    return [request_metrics(row, _next_output(row, outputs)) for row in served]


def _next_output(request: Mapping, outputs: dict[tuple[str, int], deque[list[float]]]) -> list[float]:
    has_output = request["first_token"] is not None and outputs[_sample_key(request)]
    return outputs[_sample_key(request)].popleft() if has_output else []


def _sample_key(row: Mapping) -> tuple[str, int]:
    """Return the request and the index of its sample; records of older versions have one sample each."""
    return row["request_id"], row.get("sample", 0)


def summarize(requests: Rows, steps: Rows, tokens: Rows, verifications: Rows = ()) -> dict:
    """Summarize a whole run, nested and JSON-ready, with units in the names; None where nothing was measured.

    E2EL counts completed requests only (stop or length): a cancelled request ended at an arbitrary moment.

    Args:
        requests: One row a request.
        steps: One row a step.
        tokens: One row an output token.
        verifications: One row a verification of drafted tokens; none without speculation.
    """
    figures = per_request(requests, tokens)
    served = [row for row in requests if row["finish_reason"] != "refused"]
    completed = [f for f, row in zip(figures, served, strict=True) if row["finish_reason"] in COMPLETED]
    phases = {name: phase_metrics(steps, name) for name in PHASES}
    wall = wall_seconds(requests, steps, tokens)
    compiling = compiling_steps(steps)
    return {
        "requests": {
            "count": len(requests),
            "by_finish_reason": dict(Counter(row["finish_reason"] or "unfinished" for row in requests)),
            "num_preemptions": sum(row["num_preemptions"] for row in requests),
        },
        "tokens": {
            "prompt": sum(row["prompt_tokens"] for row in served),
            "cut": sum(row["cut_tokens"] for row in served),
            "output": len(tokens),
            "cached": sum(row.get("cached_tokens", 0) for row in served),
            "written": sum(row.get("written_tokens") or 0 for row in served),
            "computed": sum(row.get("computed_tokens", 0) for row in served),
            "restored": sum(row.get("restored_tokens", 0) for row in served),
        },
        "wall_s": wall,
        "output_tokens_per_s": _rate(len(tokens), wall),
        "prefill_tokens_per_s": phases["prefill"]["tokens_per_s"],
        "decode_tokens_per_s": phases["decode"]["tokens_per_s"],
        "ttft_s": distribution(f["ttft_s"] for f in figures),
        "tpot_s": distribution(f["tpot_s"] for f in figures),
        "itl_s": distribution(gap for f in figures for gap in f["itl_s"]),
        "e2el_s": distribution(f["e2el_s"] for f in completed),
        "queue_s": distribution(f["queue_s"] for f in figures),
        "by_tenant": metrics_by_group(figures, "tenant", distribution),
        "by_priority": metrics_by_group(figures, "priority", distribution),
        "phases": phases,
        "speculation": acceptance_metrics(verifications, steps) if verifications else None,
        "instruments_share_of_decode": _rate(phases["decode"]["note_s"], phases["decode"]["wall_s"]),
        "shared_pages": sum(row.get("shared_pages", 0) for row in served),
        "pages_idle_peak": max((step.get("pages_idle", 0) for step in steps), default=0),
        "pages_used_peak": max((step["pages_used"] for step in steps), default=0),
        "kv_bytes_peak": max((step["kv_bytes"] for step in steps), default=0),
        "compiles": max((step["compiles"] for step in steps), default=0),
        "compiling_steps": len(compiling),
        "compiling_wall_s": math.fsum(step["wall_seconds"] for step in compiling),
    }


def compiling_steps(steps: Rows) -> list[Mapping]:
    """Return the steps in which the count of compiled graphs rose. The first step is unknown and left out."""
    return [
        after
        for before, after in zip(steps, steps[1:], strict=False)
        if after["compiles"] > before["compiles"]
    ]


def phase_metrics(steps: Rows, name: str) -> dict:
    """Summarize the steps of one phase: tokens per wall second, FLOPs and bytes per forward second."""
    mine = [step for step in steps if step["phase"] == name]

    def total(field: str) -> float:
        return math.fsum(step[field] for step in mine)

    wall, forward = total("wall_seconds"), total("forward_seconds")
    prefill, decode = sum(s["prefill_tokens"] for s in mine), sum(s["decode_tokens"] for s in mine)
    flops, nbytes = total("predicted_flops"), total("predicted_bytes")
    return {
        "steps": len(mine),
        "prefill_tokens": prefill,
        "decode_tokens": decode,
        "wall_s": wall,
        "forward_s": forward,
        "note_s": total("telemetry_seconds"),
        "step_wall_s": distribution(step["wall_seconds"] for step in mine),
        "tokens_per_s": _rate(prefill + decode, wall),
        "predicted_flops": flops,
        "predicted_bytes": nbytes,
        "flops_per_s": _rate(flops, forward),
        "bytes_per_s": _rate(nbytes, forward),
    }


def wall_seconds(requests: Rows, steps: Rows, tokens: Rows) -> float | None:
    """Return the seconds from the first arrival or step to the last token, step or end; None for an empty run."""
    starts = [row["arrival"] for row in requests] + [step["time"] - step["wall_seconds"] for step in steps]
    ends = [row["finished"] for row in requests] + [row["time"] for row in (*steps, *tokens)]
    known = [time for time in starts if time is not None], [time for time in ends if time is not None]
    return max(known[1]) - min(known[0]) if known[0] and known[1] else None


def _rate(amount: float, seconds: float | None) -> float | None:
    return amount / seconds if seconds else None
