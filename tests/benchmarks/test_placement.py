"""Rounds are compared within one placement of the cores."""

from __future__ import annotations

import os
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.peers.placement import MIN_LATENCY_RATIO, core_to_core_ns, group_by_placement, largest_placement
from benchmarks.peers.rows import summarize_runs
from tests.helpers.kernels import needs_mlir

latencies = st.lists(st.one_of(st.none(), st.floats(1, 1000)), max_size=12)


@given(latencies)
def test_a_placement_is_what_lies_near_its_least(found: list[float | None]) -> None:
    numbers = group_by_placement(found)
    known = sorted((each, number) for each, number in zip(found, numbers, strict=True) if each is not None)
    least: dict[int, float] = {}
    for each, number in known:
        least.setdefault(number, each)
        assert each < MIN_LATENCY_RATIO * least[number] or each == least[number]
    firsts = sorted(least.items())
    assert [number for number, _ in firsts] == list(range(len(firsts)))
    assert all(high >= MIN_LATENCY_RATIO * low for (_, low), (_, high) in zip(firsts, firsts[1:], strict=False))
    assert all(number == 0 for each, number in zip(found, numbers, strict=True) if each is None)


@given(latencies)
def test_what_is_kept_is_one_placement_and_most_of_the_runs(found: list[float | None]) -> None:
    runs = [{"core_to_core_ns": each, "number": i} for i, each in enumerate(found)]
    kept, numbers = largest_placement(runs), group_by_placement(found)
    chosen = {numbers[run["number"]] for run in kept}
    assert len(chosen) == bool(runs)
    assert all(len(kept) >= numbers.count(number) for number in numbers)


def run_of(peer: str, place: float | None, rate: float) -> dict:
    measured = [{"tokens": rate, "seconds": 1.0}]
    rest = {"load_seconds": 1.0, "peak_bytes": 1, "others_cpu_share": None, "weights": "", "how": "", "status": "ok"}
    return {"peer": peer, "format": "f", "work": "w", "core_to_core_ns": place, "measured": measured, **rest}


def test_rows_leave_rounds_of_another_placement_out() -> None:
    names, line = ("workbench mlir", "p", "q"), {"format": "f", "work": "w", "status": "ok", "reason": ""}
    lines = [{"peer": name, **line} for name in names]
    runs = [run_of("workbench mlir", 22.0, 10.0), run_of("p", 21.0, 5.0), run_of("workbench mlir", 24.0, 12.0)]
    runs += [run_of("p", 105.0, 50.0), run_of("q", 104.0, 1.0)]
    ours, p, q = summarize_runs(lines, runs)
    assert (ours["tokens_per_s"], ours["left_out"], ours["of_best_peer"]) == (11.0, 0, 2.2)
    assert (p["tokens_per_s"], p["left_out"], p["core_to_core_ns"]) == (5.0, 1, 21.0)
    assert q["status"] == "elsewhere" and "tokens_per_s" not in q
    died = {**run_of("p", 105.0, 1.0), "status": "failed", "reason": "killed"}
    assert summarize_runs(lines, [*runs, died])[1]["reason"] == "killed"  # wherever the cores sat meanwhile
    before = summarize_runs(
        lines[:2], [{**run, "core_to_core_ns": None} for run in runs[:4]]
    )  # records from before know none
    assert before[1]["tokens_per_s"] == 27.5 and before[1]["core_to_core_ns"] is None


@needs_mlir
def test_the_latency_of_this_machine_is_a_time() -> None:
    """More than light takes from one end of a processor to the other."""
    found = core_to_core_ns()
    assert found is None or found > 1


@needs_mlir
def test_one_thread_alone_waits_for_no_other() -> None:
    program = "from benchmarks.peers.placement import core_to_core_ns; print(core_to_core_ns())"
    environment = {**os.environ, "OMP_THREAD_LIMIT": "1"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == "None"
