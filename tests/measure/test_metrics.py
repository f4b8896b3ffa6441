from __future__ import annotations

import json
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from pytest import approx

from tests.trace.histories import recorders
from workbench.experiment.experiment import SLO
from workbench.measure.goodput import goodput, recorded_goodput
from workbench.runs.metrics import distribution, per_request, percentile, request_metrics, summarize

numbers = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40)
times = st.lists(st.floats(0, 1e3), min_size=1, max_size=30).map(sorted)


def request(arrival: float = 0.0, **more) -> dict:
    return {
        "request_id": "a", "arrival": arrival, "first_scheduled": arrival, "first_token": arrival,
        "finished": None, "finish_reason": "stop", "prompt_tokens": 3, "cut_tokens": 0, "num_preemptions": 0,
    } | more  # fmt: skip


def step(**more) -> dict:
    zeros = dict.fromkeys(("prefill_tokens", "decode_tokens", "pages_used", "kv_bytes", "compiles"), 0)
    seconds = dict.fromkeys(("wall_seconds", "forward_seconds", "telemetry_seconds"), 0.0)
    return zeros | seconds | {"time": 0.0, "phase": "decode", "predicted_flops": 0.0, "predicted_bytes": 0.0} | more


@given(numbers, st.floats(0, 100))
def test_percentiles_are_numpys(values, q):
    scale = max(abs(value) for value in values)
    assert percentile(values, q) == approx(float(np.percentile(values, q)), rel=1e-12, abs=1e-12 * scale)


@given(numbers)
def test_percentiles_rise_between_least_and_most(values):
    spread = distribution(values)
    rising = [spread[name] for name in ("min", "p50", "p90", "p99", "max")]
    assert rising == sorted(rising)
    assert spread["count"] == len(values)


def test_nothing_has_no_percentile():
    assert distribution([None, None]) == dict.fromkeys(("p50", "p90", "p99", "mean", "min", "max")) | {"count": 0}


@given(times, st.floats(-10, 0))
def test_first_token_and_the_gaps_make_the_whole(stamps, arrival):
    found = request_metrics(request(arrival), stamps)
    assert found["ttft_s"] + math.fsum(found["itl_s"]) == approx(found["e2el_s"], abs=1e-9)
    assert len(found["itl_s"]) == len(stamps) - 1
    if len(stamps) == 1:
        assert found["tpot_s"] is None
    else:
        expected = (found["e2el_s"] - found["ttft_s"]) / (len(stamps) - 1)
        assert found["tpot_s"] == approx(expected, abs=1e-9)
        assert min(found["itl_s"]) - 1e-9 <= found["tpot_s"] <= max(found["itl_s"]) + 1e-9


@given(times, st.floats(-10, 0), st.floats(-1e3, 1e3))
def test_figures_do_not_know_when_the_clock_began(stamps, arrival, shift):
    here = request_metrics(request(arrival), stamps)
    there = request_metrics(request(arrival + shift), [stamp + shift for stamp in stamps])
    for name in ("ttft_s", "e2el_s"):
        assert here[name] == approx(there[name], abs=1e-6)


@given(recorders())
def test_a_summary_counts_what_is_in_the_tables_and_is_json(recorder):
    requests, steps, tokens = recorder.requests(), recorder.steps(), recorder.tokens()
    summary = summarize(requests, steps, tokens)
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    assert sum(summary["requests"]["by_finish_reason"].values()) == len(requests)
    assert summary["tokens"]["output"] == len(tokens)
    assert summary["ttft_s"]["count"] == sum(row["first_token"] is not None for row in requests)
    assert summary["itl_s"]["count"] == len(tokens) - summary["ttft_s"]["count"]
    assert sum(phase["steps"] for phase in summary["phases"].values()) == len(steps)
    whole = math.fsum(phase["wall_s"] for phase in summary["phases"].values())
    assert whole == approx(math.fsum(s["wall_seconds"] for s in steps))
    assert summary["wall_s"] is None or summary["wall_s"] >= whole - 1e-6


@given(recorders())
def test_first_token_times_are_from_arrival(recorder):
    served = [row for row in recorder.requests() if row["finish_reason"] != "refused"]
    for row, found in zip(served, per_request(recorder.requests(), recorder.tokens()), strict=True):
        if row["first_token"] is not None:
            assert found["ttft_s"] == row["first_token"] - row["arrival"]


@given(recorders())
def test_a_goodput_is_of_what_ended_well_among_what_was_served(recorder):
    """However late: a request that was cancelled or failed attains no objective, and a refused one is none."""
    served = [row for row in recorder.requests() if row["finish_reason"] != "refused"]
    well = sum(row["finish_reason"] in ("stop", "length") for row in served)
    found = recorded_goodput(recorder, SLO(ttft=1e9, tpot=1e9), 2.0)
    assert (found["requests"], found["requests_per_s"]) == (well, well / 2)
    assert found["share"] == (well / len(served) if served else None)


def test_an_objective_is_attained_up_to_its_bound():
    slo, good = SLO(ttft=1.0, tpot=0.5), {"ttft_s": 1.0, "tpot_s": 0.5, "e2el_s": 9.0}
    rows = [
        good,
        {**good, "tpot_s": None},
        {**good, "ttft_s": 1.01},
        {**good, "tpot_s": 0.51},
        {**good, "e2el_s": None},
    ]
    assert [goodput([row], slo, None)["requests"] for row in rows] == [1, 1, 0, 0, 0]


def test_rates_and_shares_by_hand():
    steps = [
        step(phase="prefill", time=3.0, wall_seconds=2.0, prefill_tokens=100, forward_seconds=1.0,
             predicted_flops=8.0),
        step(time=4.0, wall_seconds=0.5, decode_tokens=4, telemetry_seconds=0.01, pages_used=7, compiles=2),
        step(time=5.0, wall_seconds=0.5, decode_tokens=6, telemetry_seconds=0.02, forward_seconds=0.25,
             predicted_bytes=10.0, pages_used=3, compiles=2),
        step(phase="mixed", time=6.0, wall_seconds=1.0, decode_tokens=1, prefill_tokens=1, telemetry_seconds=9.0),
    ]  # fmt: skip
    stamps = [{"request_id": "a", "index": index, "time": 3.0 + index} for index in range(3)]
    summary = summarize([request(1.0, finished=6.5)], steps, stamps)
    assert summary["wall_s"] == 5.5
    assert summary["output_tokens_per_s"] == 3 / 5.5
    assert summary["prefill_tokens_per_s"] == 50
    assert summary["decode_tokens_per_s"] == 10
    assert summary["telemetry_share_of_decode"] == approx(0.03)
    assert summary["phases"]["prefill"]["flops_per_s"] == 8
    assert summary["phases"]["decode"]["bytes_per_s"] == 40
    assert (summary["pages_used_peak"], summary["compiles"]) == (7, 2)


def test_steps_that_compiled_are_counted_apart():
    steps = [step(wall_seconds=float(wall), compiles=count) for wall, count in ((1, 2), (5, 3), (1, 3), (7, 5))]
    summary = summarize([], steps, [])
    assert (summary["compiles"], summary["compiling_steps"], summary["compiling_wall_s"]) == (5, 2, 12.0)


def test_refused_and_cancelled_requests_bend_no_latency():
    requests = [
        request(request_id="a"),
        request(request_id="b", finish_reason="cancelled"),
        request(request_id="c", finish_reason="refused", first_scheduled=None, first_token=None),
    ]
    tokens = [{"request_id": name, "index": 0, "time": time} for name, time in (("a", 1.0), ("b", 50.0))]
    summary = summarize(requests, [], tokens)
    assert summary["e2el_s"]["count"] == 1
    assert summary["e2el_s"]["max"] == 1.0
    assert summary["ttft_s"]["count"] == summary["queue_s"]["count"] == 2
    assert summary["requests"]["by_finish_reason"] == {"stop": 1, "cancelled": 1, "refused": 1}
    assert summary["tokens"]["prompt"] == 6


def test_an_id_used_twice_has_two_outputs():
    requests = [request(0.0), request(10.0)]
    stamps = [(0, 1.0), (1, 2.0), (0, 13.0), (1, 14.0)]
    tokens = [{"request_id": "a", "index": index, "time": time} for index, time in stamps]
    first, second = per_request(requests, tokens)
    assert (first["ttft_s"], second["ttft_s"]) == (1.0, 3.0)
    assert first["itl_s"] == second["itl_s"] == [1.0]


def test_an_empty_run_has_a_summary():
    summary = summarize([], [], [])
    assert (summary["wall_s"], summary["output_tokens_per_s"]) == (None, None)
    assert summary["telemetry_share_of_decode"] is None
