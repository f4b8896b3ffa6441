"""Compute metrics of requests, steps and rounds, only from a record's raw timestamps, under vLLM's names.

TTFT: first token - arrival. E2EL: last token - arrival. ITL: time between consecutive tokens of one request, so that
TTFT + sum(ITL) = E2EL. TPOT = (E2EL - TTFT) / (n - 1), None for one token. Acceptance of draft tokens includes the
expected speed-up.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from workbench.units import Measure, duration, rate, ratio, share

StepRecords = Sequence[Mapping]
# Figures of requests and steps, common to all workloads.
MEASURES = (
    Measure("*_s_count", "count of {}"),
    Measure("step_wall_s_count", "steps"),
    duration("ttft_s_*", "TTFT {}"),
    duration("tpot_s_*", "TPOT {}"),
    duration("itl_s_*", "ITL {}"),
    duration("e2el_s_*", "E2EL {}"),
    duration("queue_s_*", "queue {}"),
    duration("service_s_*", "E2EL without queue {}"),
    duration("longest_gap_s_*", "longest gap {}"),
    duration("seconds", "time"),
    duration("wall_s", "wall time"),
    rate("tokens_per_s", "token rate", "tokens"),
    rate("output_tokens_per_s", "throughput", "tokens"),
    rate("prefill_tokens_per_s", "prefill throughput", "tokens"),
    rate("decode_tokens_per_s", "decode throughput", "tokens"),
    rate("bytes_per_s", "reading", "bytes"),
    rate("flops_per_s", "computing", "FLOP"),
    rate("goodput_requests_per_s", "goodput", "requests"),
    share("goodput_share", "SLO attainment", timed=True),
    share("slo_attainment", "SLO attainment", timed=True),
    ratio("goodput_requests", "requests within the SLO", "max"),
    Measure("goodput_*_s", "SLO of {}", "s"),
    share("cache_hit_rate", "cache hits"),
    share("cache_waste", "empty slots of pages", "min"),
    Measure("sequences_mean", "sequences at once"),
    Measure("kv_bytes_peak", "peak KV cache", "bytes", "min"),
    Measure("kv_bytes_*", "KV cache, {}", "bytes", "min"),
    Measure("kv_pages", "pages", "pages"),
    Measure("kv_pages_used_peak", "peak of pages in use", "pages", "min"),
    Measure("kv_page_size", "page size", "tokens"),
    Measure("pages_*_peak", "peak of {} pages", "pages", "min"),
    Measure("shared_pages", "shared pages", "pages"),
    Measure("peak_bytes", "peak memory", "bytes", "min"),
    Measure("model_weight_bytes", "weights", "bytes", "min"),
    Measure("model_parameters", "parameters"),
    Measure("num_preemptions", "preemptions", "", "min"),
    Measure("requests_num_preemptions", "preemptions", "", "min"),
    Measure("requests_count", "requests", "requests"),
    Measure("requests_by_finish_reason_*", "requests, {}", "requests"),
    Measure("submitted", "submitted", "requests"),
    Measure("finished", "finished", "requests"),
    Measure("failed", "failed", "requests", "min"),
    Measure("retries", "retries", "", "min"),
    Measure("offered_requests_per_s", "offered", "requests/s"),
    Measure("output_tokens", "output tokens", "tokens"),
    Measure("tokens_*", "tokens, {}", "tokens"),
    Measure("compiles", "compiled graphs", "", "min"),
    Measure("compiling_steps", "steps that compiled", "", "min"),
    duration("compiling_wall_s", "time of steps that compiled"),
    share("telemetry_share_of_decode", "telemetry, of decode", "min", True),
    share("others_cpu_share", "contention", None),
    Measure("simulated_s", "simulated time", "s"),
    Measure("steps"),
    Measure("prefill_tokens", "prefill tokens", "tokens"),
    Measure("decode_tokens", "decode tokens", "tokens"),
    Measure("flops", "FLOPs", "FLOPs"),
    Measure("bytes", "bytes", "bytes"),
    duration("forward_s", "forward pass"),
    duration("telemetry_s", "telemetry"),
    duration("step_wall_s_*", "step {}"),
    duration("s", "time"),
    share("share_of_*", "of {}", timed=True),
    rate("read_ceiling_bytes_per_s", "read ceiling", "bytes"),
    rate("gemm_ceiling_flops_per_s", "GEMM ceiling", "FLOP"),
    Measure("working_set_bytes", "working set", "bytes"),
)
SPREADS = ("ttft_s", "tpot_s", "e2el_s")
TABLES = ("requests", "steps", "tokens")  # tables of a round, as in a recorder
GROUP_METRICS = ("queue_s", "ttft_s", "tpot_s")
PHASES = ("prefill", "decode", "mixed")
COMPLETED = ("stop", "length")
Rows = Sequence[Mapping]


def acceptance_metrics(verifications: StepRecords, steps: StepRecords) -> dict:
    """Summarize the acceptance of draft tokens, in total and by position.

    Args:
        verifications: One row per verification of drafts: `drafted` and `accepted` tokens.
        steps: One row per step: `drafted_tokens`, `wall_seconds`, `draft_seconds`.

    Returns:
        `draft_acceptance_rate`: accepted over drafted tokens.
        `mean_acceptance_length`: mean tokens per verification, including the token after the accepted ones.
        `acceptance_by_position`: the fraction of all verifications that accept the first, second, ... draft token
        (vLLM: num_accepted_tokens_per_pos / num_drafts). A verification without such a token counts as not accepting
        it, so the fractions sum to `mean_acceptance_length` - 1.
        `acceptance_histogram`: verifications that accept 0, 1, 2, ... tokens.
        `chance`: the probability that a token is accepted if all tokens before it are.
        `draft_share`: the fraction of verifying steps' time spent in the proposer.
        A value is None if there were no draft tokens.
    """
    drafted, accepted = sum(row["drafted"] for row in verifications), sum(row["accepted"] for row in verifications)
    most = max((row["drafted"] for row in verifications), default=0)
    stood = [sum(row["accepted"] > place for row in verifications) for place in range(most)]
    counts = Counter(row["accepted"] for row in verifications)
    tried = accepted + sum(row["accepted"] < row["drafted"] for row in verifications)
    checking = [step for step in steps if step["drafted_tokens"]]
    wall, drafting = (math.fsum(step[name] for step in checking) for name in ("wall_seconds", "draft_seconds"))
    return {
        "verifications": len(verifications),
        "drafted_tokens": drafted,
        "accepted_tokens": accepted,
        "draft_acceptance_rate": accepted / drafted if drafted else None,
        "mean_acceptance_length": 1 + accepted / len(verifications) if verifications else None,
        "acceptance_by_position": [stands / len(verifications) for stands in stood],
        "acceptance_histogram": [counts[count] for count in range(most + 1)],
        "chance": accepted / tried if tried else None,
        "draft_share": drafting / wall if wall else None,
    }


def expected_tokens_per_verification(acceptance_probability: float, num_speculative_tokens: int) -> float:
    """Return the expected number of tokens that one verification of `num_speculative_tokens` draft tokens yields.

    This is (1 - a^(k + 1)) / (1 - a), if each token is accepted with probability a given that all before it are
    (Leviathan et al., 2023, equation 1).
    """
    return (
        num_speculative_tokens + 1
        if acceptance_probability == 1
        else (1 - acceptance_probability ** (num_speculative_tokens + 1)) / (1 - acceptance_probability)
    )


def expected_speedup(tokens_per_verification: float, verified_fraction: float, step_cost_ratio: float) -> float:
    """Return the expected speed-up of speculation.

    Args:
        tokens_per_verification: Mean tokens from a verifying step.
        verified_fraction: Fraction of steps that verify drafts; other steps yield one token.
        step_cost_ratio: Time of a step with speculation divided by its time without.
    """
    return (verified_fraction * tokens_per_verification + 1 - verified_fraction) / step_cost_ratio


def steady_decode_steps(steps: StepRecords, num_requests: int) -> list[Mapping]:
    """Return the steps that only decode, for exactly `num_requests` requests, without the first step of each
    uninterrupted series.

    The first step is left out because a draft model computes the prompts in it."""
    decodes = [step for step in steps if step["phase"] == "decode" and step["requests"] == num_requests]
    return [after for before, after in zip(decodes, decodes[1:], strict=False) if after["step"] == before["step"] + 1]


def metrics_by_group(
    figures: Iterable[Mapping[str, Any]], by: str, distribution: Callable[[Iterable[float | None]], dict]
) -> dict[str, dict]:
    """Summarize queue time, TTFT and TPOT for each value of one request field.

    Args:
        figures: Metrics of requests, one mapping per request.
        by: The field to group by: `tenant` or `priority`.
        distribution: Summarizes a sequence of seconds (`metrics.distribution`).

    Returns:
        By group name, the number of requests and a distribution of each of `GROUP_METRICS`; empty if there is only one
        group.
    """
    groups: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for each in figures:
        groups[each[by]].append(each)
    if len(groups) < 2:
        return {}
    return {
        str(name): {"requests": len(mine)} | {key: distribution(each[key] for each in mine) for key in GROUP_METRICS}
        for name, mine in sorted(groups.items())
    }


def percentile(values: Iterable[float], q: float) -> float | None:
    """Return the q-th percentile (0 to 100), linear between ranks as `numpy.percentile`; None without values."""
    ordered = sorted(values)
    if not ordered:
        return None
    rank = (len(ordered) - 1) * q / 100
    below = math.floor(rank)
    low, high, share = ordered[below], ordered[min(below + 1, len(ordered) - 1)], rank - below
    # Interpolate from the nearer end, so that rounding never exceeds either end. Written out because numpy's function
    # takes about a hundred times as long for a few values, rounds q / 100 first (the last digit differs in one of 16
    # cases), and would have to be imported here.
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
        "tenant": request.get("tenant") or "",  # missing in records of older versions
        "priority": request.get("priority") or 0,
        "deadline_s": request.get("deadline"),
        "queue_s": since_arrival(request["first_scheduled"]),
        "ttft_s": since_arrival(times[0]) if times else None,
        "e2el_s": since_arrival(times[-1]) if times else None,
        "tpot_s": (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None,
        "itl_s": [after - before for before, after in zip(times, times[1:], strict=False)],
    }


def per_request(requests: Rows, tokens: Rows) -> list[dict]:
    """Return `request_metrics` of every request that was not refused, in order."""
    outputs: dict[tuple[str, int], deque[list[float]]] = defaultdict(deque)
    for token in tokens:
        mine = outputs[_sample_key(token)]
        if token["index"] == 0 or not mine:  # an id may be reused after its request has ended
            mine.append([])
        mine[-1].append(token["time"])
    served = [row for row in requests if row["finish_reason"] != "refused"]
    return [request_metrics(row, _next_output(row, outputs)) for row in served]


def _next_output(request: Mapping, outputs: dict[tuple[str, int], deque[list[float]]]) -> list[float]:
    has_output = request["first_token"] is not None and outputs[_sample_key(request)]
    return outputs[_sample_key(request)].popleft() if has_output else []


def _sample_key(row: Mapping) -> tuple[str, int]:
    """Return the request's id and sample index; records of older versions have one sample per request."""
    return row["request_id"], row.get("sample", 0)


def summarize(requests: Rows, steps: Rows, tokens: Rows, verifications: Rows = ()) -> dict:
    """Summarize a whole run as nested JSON-ready values, with units in the names; None for values without data.

    E2EL counts completed requests only (stop or length): a cancelled request ended at an arbitrary moment.

    Args:
        requests: One row per request.
        steps: One row per step.
        tokens: One row per output token.
        verifications: One row per verification of draft tokens; none without speculation.

    Example: `workbench.summarize(recorder.requests(), recorder.steps(), recorder.tokens(), recorder.verifications())`
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
        "telemetry_share_of_decode": _rate(phases["decode"]["telemetry_s"], phases["decode"]["wall_s"]),
        "shared_pages": sum(row.get("shared_pages", 0) for row in served),
        "pages_idle_peak": max((step.get("pages_idle", 0) for step in steps), default=0),
        "pages_used_peak": max((step["pages_used"] for step in steps), default=0),
        "kv_bytes_peak": max((step["kv_bytes"] for step in steps), default=0),
        "compiles": max((step["compiles"] for step in steps), default=0),
        "compiling_steps": len(compiling),
        "compiling_wall_s": math.fsum(step["wall_seconds"] for step in compiling),
    }


def compiling_steps(steps: Rows) -> list[Mapping]:
    """Return the steps during which graphs were compiled: those with a higher count of compiled graphs than the step
    before. The first step is left out, since it has no earlier count.
    """
    return [after for before, after in zip(steps, steps[1:], strict=False) if after["compiles"] > before["compiles"]]


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
        "telemetry_s": total("telemetry_seconds"),
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


def round_metrics(requests: list[dict], steps: list[dict], tokens: list[dict]) -> dict[str, Any]:
    """Return the summary metrics of one round. Service time is E2EL minus queue time."""
    summary = summarize(requests, steps, tokens)
    each = per_request(requests, tokens)
    service = [one["e2el_s"] - one["queue_s"] for one in each if one["e2el_s"] is not None]
    return {
        **{f"{key}_{q}": summary[key][q] for key in SPREADS for q in ("p50", "p99")},
        "service_s_p50": percentile(service, 50),
        "longest_gap_s_p99": percentile([max(one["itl_s"]) for one in each if one["itl_s"]], 99),
        "output_tokens": summary["tokens"]["output"],
        "output_tokens_per_s": summary["output_tokens_per_s"],
        "kv_bytes_peak": summary["kv_bytes_peak"],
    }


def pareto_frontier(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the indices of the non-dominated points, in order of the first coordinate.

    A point is dominated if another point is no larger in both coordinates and smaller in one."""
    best: list[int] = []
    for index in sorted(range(len(points)), key=lambda i: points[i]):
        if not best or points[index][1] < points[best[-1]][1] or points[index] == points[best[-1]]:
            best.append(index)
    return best
