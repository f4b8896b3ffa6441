"""The model-level table: what is counted, on a tiny model; no time is asserted."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import workbench
import workbench.bench.model as bench_module
from workbench.bench import model_table as bench_text
from workbench.bench.fresh_process import in_fresh_process, memory_in_decode
from workbench.bench.model import (
    BenchCase,
    BenchRepetition,
    bench,
    bench_row,
    max_sequence_length,
    mixed_case,
    run_repetition,
    standard_cases,
)
from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError
from workbench.machine.ceilings import Ceiling, MachineCeilings
from workbench.machine.processor import allocated_weight_bytes, peak_bytes, resident_bytes
from workbench.model.memory import activation_bytes
from workbench.runs.folder import write_dated_record

BUDGET = 16


def ceiling(kind: str, value: float, unit: str) -> Ceiling:
    return Ceiling(kind, value, unit, "made up", 1, 1, 1.0, 1, dtype="bfloat16", level="DRAM")


CEILINGS = MachineCeilings((ceiling("read", 100.0, "bytes/s"),), (ceiling("gemm", 1000.0, "FLOP/s"),))


@pytest.fixture(scope="module")
def runner() -> Runner:
    return workbench.load("shape:tiny", backend="eager", max_num_seqs=4, max_num_batched_tokens=BUDGET, pages=40)


@given(batch=st.integers(1, 4), depth=st.sampled_from([0, 16, 48]), output=st.integers(1, 5), seed=st.integers(0, 9))
def test_prefill_counts_what_comes_after_the_depth(
    runner: Runner, batch: int, depth: int, output: int, seed: int
) -> None:
    work = BenchCase("prefill", batch, depth, prompt=32, output=output)
    figures = run_repetition(runner, work, seed)
    assert figures.tokens == batch * 32 and len(figures.step_seconds) == batch * 32 / BUDGET
    assert not runner.has_unfinished_requests and runner.scheduler.pages_in_use == 0


@given(batch=st.integers(1, 4), depth=st.sampled_from([0, 16, 48]), output=st.integers(1, 5), seed=st.integers(0, 9))
def test_decode_counts_steps_of_the_whole_batch(runner: Runner, batch: int, depth: int, output: int, seed: int) -> None:
    work = BenchCase("decode", batch, depth, prompt=16, output=output)
    figures = run_repetition(runner, work, seed)
    assert figures.tokens == batch * output and len(figures.step_seconds) == output
    assert figures.forward_seconds < figures.wall_seconds and figures.bytes > 0
    assert figures.kv_bytes >= batch * (depth + 16) * runner.store.bytes_per_token
    assert max_sequence_length(work, BUDGET) >= depth + 16 + output
    assert not runner.has_unfinished_requests and runner.scheduler.pages_in_use == 0


def test_mixed_counts_every_output_token(runner: Runner) -> None:
    figures = run_repetition(runner, mixed_case(((20, 3), (5, 7), (9, 1), (40, 2))), 0)
    assert figures.tokens == 13 and figures.wall_seconds > 0


def test_rows_are_medians_and_shares(runner: Runner) -> None:
    each = [BenchRepetition(10, wall, wall / 2, 500.0 * wall, 25.0 * wall, 7, 0, (wall,)) for wall in (1.0, 4.0, 2.0)]
    row = bench_row(BenchCase("decode", 1), each, runner, CEILINGS)
    assert row["tokens_per_s"] == 5.0 and row["spread"] == [2.5, 10.0] and row["outside_forward_share"] == 0.5
    assert row["outside_kernels_share"] is None, "a backend that does not tell is not taken to have no overhead"
    runs = [replace(figures, kernel_seconds=figures.wall_seconds / 4) for figures in each]
    assert bench_row(BenchCase("decode", 1), runs, runner, CEILINGS)["outside_kernels_share"] == 0.75
    assert bench_row(BenchCase("decode", 1), [*runs, each[0]], runner, CEILINGS)["outside_kernels_share"] is None
    assert row["share_of_read_ceiling"] == 0.5 and row["share_of_gemm_ceiling"] == 1.0
    assert row["share_of_roofline"] == 1.0 and row["step_seconds"]["p50"] == 2.0 and row["reason"] == ""
    compiling = [BenchRepetition(10, 1.0, 0.5, 1.0, 1.0, 7, compiles, (1.0,)) for compiles in (0, 1)]
    assert "compiled while" in bench_row(BenchCase("decode", 1), compiling, runner, CEILINGS)["reason"]


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_module, "ceilings_for", lambda *_, **__: CEILINGS)
        works = standard_cases((1, 2), (0, 224), 32, 3)
        made = bench(
            "shape:tiny",
            works,
            settings={"backend": "eager"},
            threads=1,
            repetitions=2,
            memory=False,
            on_progress=lines.append,
        )
    made["progress"] = lines
    return made


def test_the_record_has_a_row_for_each_work_in_turn(record: dict[str, Any]) -> None:
    names = [(row["work"], row["batch"], row["depth"]) for row in record["rows"]]
    assert names == [(f"{k} {n}", b, d) for b in (1, 2) for d in (0, 224) for k, n in (("prefill", 32), ("decode", 3))]
    states = {(row["depth"], row["status"]) for row in record["rows"]}
    assert states == {(0, "ok"), (224, "not run")}
    assert all("the model's context is 256" in row["reason"] for row in record["rows"] if row["depth"])
    assert record["settings"]["backend_used"] == "eager" and record["settings"]["threads"] == 1
    turns = [line.split(":")[0] for line in record["progress"] if " at 0" in line]
    assert turns == ["warm-up"] * 4 + ["round 1/2"] * 4 + ["round 2/2"] * 4  # interleaved


def test_the_record_is_strict_json_in_a_dated_file(record: dict[str, Any], tmp_path: Path) -> None:
    path = write_dated_record(record, tmp_path / "records", "bench-tiny")
    assert path.name.startswith("bench-tiny-2") and json.loads(path.read_text())["rows"] == record["rows"]
    (tmp_path / "file").write_text("")
    with pytest.raises(WorkbenchError, match="cannot be written"):
        write_dated_record(record, tmp_path / "file", "bench-tiny")


def test_formats_hold_every_row(record: dict[str, Any]) -> None:
    rows = list(csv.DictReader(io.StringIO(bench_text.to_csv(record))))
    assert len(rows) == len(record["rows"])
    for printed, row in zip(rows, record["rows"], strict=True):
        assert printed["work"] == row["work"]
        if row["status"] == "ok":
            assert (
                float(printed["tokens_per_s"]) == row["tokens_per_s"]
                and float(printed["spread_max"]) == row["spread"][1]
            )
            assert float(printed["step_seconds_p50"]) == row["step_seconds"]["p50"]
    text = bench_text.to_markdown(record)
    assert "| > " in text and bench_text.KERNEL_TIME_REMARK in text
    kernel_row = {**record["rows"][0], "outside_kernels_share": 0.125}
    assert "12.5%" in bench_text.to_markdown({**record, "rows": [kernel_row]})
    assert bench_text.KERNEL_TIME_REMARK not in bench_text.to_markdown({**record, "rows": [kernel_row]})
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(record["rows"]) and len({line.count("|") for line in lines}) == 1
    assert "257 tokens, the model's context is 256" in text


def test_memory_and_starts_are_reported(record: dict[str, Any]) -> None:
    memory = {
        "batch": 1, "weights_bytes": 100e6, "cache_bytes": 10e6, "activations_bytes": 1e6, "formula_bytes": 111e6,
        "measured_bytes": 122.1e6, "process_peak_bytes": 500e6,
    }  # fmt: skip
    printed = "\n".join(bench_text.remarks({**record, "memory": [memory], "cold_start": {"cold": {"loaded": 2.5}}}))
    assert "cache 9.54 MiB + activations 977 KiB = 106 MiB by formula; the process grew by 116 MiB (1.10 x)" in printed
    assert "cold start: loaded 2.5 s" in printed


def test_memory_by_formula(runner: Runner) -> None:
    spec = runner.model.spec
    assert allocated_weight_bytes(runner) == 2 * spec.num_parameters + 8 * (
        16 // 2
    )  # and the rotary frequencies, in float64
    assert activation_bytes(spec, 2, 2) == 2 * activation_bytes(spec, 1, 2)
    assert activation_bytes(spec, 1, 2) == (2 * 64 + 3 * 128) * 2 + 4 * 257  # the feed-forward is the widest
    size, peak = resident_bytes(), peak_bytes()
    assert size is None or peak is None or 10**7 < size <= peak + 2**20


@pytest.mark.processes
def test_a_fresh_process_measures_its_own_memory() -> None:
    found = memory_in_decode({"model": "shape:tiny", "backend": "eager"}, threads=1, batch=2, prompt=40, output=4)
    assert found["cache_bytes"] == 2 * 64 * 256  # a page each; a token: 2 x 2 layers x 2 groups x 16 wide x 2 bytes
    assert found["formula_bytes"] == sum(found[f"{part}_bytes"] for part in ("weights", "cache", "activations"))
    if found["measured_bytes"] is not None:
        assert found["before_load_bytes"] + found["measured_bytes"] <= found["process_peak_bytes"] + 2**20


@pytest.mark.processes
def test_the_words_of_a_failed_process_are_reported() -> None:
    with pytest.raises(WorkbenchError, match="no shape 'tyni'"):
        job = {
            "settings": {"model": "shape:tyni", "backend": "eager"},
            "threads": 1,
            "batch": 1,
            "prompt": 4,
            "output": 2,
        }
        in_fresh_process(job)
