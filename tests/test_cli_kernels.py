"""`workbench kernels` and `workbench bench`: what they print where, and with which code they end."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import compiled_kernels.check as check_module
import workbench
import workbench.bench.kernels as kernel_bench_module
import workbench.bench.model as bench_module
from compiled_kernels.backends import Backend
from compiled_kernels.cases import case_of, suite_of, suites
from compiled_kernels.check import CheckResult
from compiled_kernels.measure import KernelMeasurement, KernelTiming
from compiled_kernels.mlir import ahead
from tests.helpers.command_line import answer, cli
from tests.helpers.kernels import needs_mlir
from workbench.cli import kernels
from workbench.machine.ceilings import Ceiling, MachineCeilings
from workbench.request import Request, SamplingParameters
from workbench.trace.events import Finished

OPERATORS = [suite.operator for suite in suites()]
TIMES = {Backend.EAGER: KernelTiming(4e-6, 3e-6, 5e-6, 9), Backend.INDUCTOR: KernelTiming(2e-6, 1e-6, 3e-6, 9)}
ROWS = [
    CheckResult("rotary", "eager", "a", "ok", "", "as written"),
    CheckResult("rotary", "mlir", "a", "gap", "not [yet]"),
    CheckResult("rotary", "mlir", "b", "gap", "not [yet]"),
]
PTX = pytest.mark.skipif(find_spec("triton") is None, reason="pip install 'inference-workbench[triton]'")
LLVM = pytest.mark.skipif(ahead.unavailable_reason() is not None, reason=f"ahead of time: {ahead.unavailable_reason()}")


def ceiling(kind: str, value: float, unit: str) -> Ceiling:
    return Ceiling(kind, value, unit, "made up", 1, 1, 1.0, 1, dtype="bfloat16")


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No backend is really timed; reads go at 8 GB/s and products at 1 TFLOP/s."""

    def measure(suite: Any, case: Any, backends: Any, *_: Any) -> KernelMeasurement:
        there = {backend: TIMES[backend] for backend in backends if backend in TIMES}
        absent = {backend: "not here" for backend in backends if backend not in there}
        return KernelMeasurement("cache", 4, 1000, there, absent)

    made_up = MachineCeilings((ceiling("read", 8e9, "bytes/s"),), (ceiling("gemm", 1e12, "FLOP/s"),))
    monkeypatch.setattr(kernel_bench_module, "measure", measure)
    for module in (kernel_bench_module, bench_module):
        monkeypatch.setattr(module, "ceilings_for", lambda *_, **__: made_up)


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[CheckResult]:
    rows = list(ROWS)
    monkeypatch.setattr(check_module, "check", lambda *_, **__: iter(rows))
    return rows


def test_list() -> None:
    found = answer("kernels list")
    assert [entry["operator"] for entry in found] == OPERATORS
    for entry in found:
        assert entry["formula"] and entry["source"] and entry["backends"][:2] == ["eager", "inductor"]
        file, line = entry["place"].split(":")
        source = Path(__file__).parents[1].joinpath(file).read_text().splitlines()
        assert f"def {entry['operator']}(" in source[int(line) - 1]
        assert entry["cases"] == len(suite_of(entry["operator"]).cases) >= entry["timed"]
    printed = cli("kernels list").text
    assert all(operator in printed for operator in OPERATORS) and "gap on mlir, 12 cases: selection has no" in printed


def test_check_as_json_is_one_list(checked: list[CheckResult]) -> None:
    ran = cli("kernels check --json")
    assert ran.err == "" and [row["status"] for row in ran.json] == ["ok", "gap", "gap"]
    assert all(set(row) >= {"operator", "backend", "case", "status", "reason"} for row in ran.json)
    checked.append(CheckResult("rotary", "mlir", "c", "failed", "wrong by 3"))
    cli("kernels check --json", code=1)


def test_check_counts_and_lists_gaps_and_failures(checked: list[CheckResult], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.progress.LINE_INTERVAL_SECONDS", 0.0)  # short work leaves no line otherwise
    ran = cli("kernels check")
    assert "gap rotary on mlir, 2 cases: not [yet]" in ran.text and "1 ok, 2 gap, 0 failed" in ran.out
    assert "case" in ran.err and "case" not in ran.out.splitlines()[0]
    checked += [CheckResult("rotary", "mlir", case, "failed", "wrong by 3") for case in "cd"]
    assert "failed rotary on mlir, c; d: wrong by 3" in cli("kernels check", code=1).text


def test_check_really_checks() -> None:
    found = answer("kernels check --operator rotary --backend eager")
    assert [row["case"] for row in found] == [case.name for case in suite_of("rotary").cases]
    assert {row["status"] for row in found} == {"ok"} and {row["execution"] for row in found} == {"as written"}


def test_a_check_knows_how_many_rows_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend mlir has a row of each case for every level."""
    monkeypatch.setattr(check_module, "verdict", lambda *_: ("ok", ""))
    backends = (Backend.MLIR, Backend.EAGER)
    assert kernels._rows("rotary", backends) == len(list(check_module.check(backends, "rotary")))


@pytest.mark.usefixtures("timed")
def test_bench_tells_shares_and_ratios(tmp_path: Path) -> None:
    asked = "kernels bench --operator rms_norm --case '1x2048 bfloat16' --threads 1"
    ran = cli(f"{asked} --json --out", tmp_path)
    record = ran.json
    (file,) = tmp_path.iterdir()
    assert file.name.startswith("kernels-") and str(file) in ran.err and json.loads(file.read_text()) == record
    rows = {row["backend"]: row for row in record["rows"]}
    work = case_of(suite_of("rms_norm"), "1x2048 bfloat16").cost
    assert rows["inductor"]["bound"] == "read" and rows["inductor"]["speedup_over_eager"] == 2.0
    assert rows["inductor"]["share_of_ceiling"] == pytest.approx(work.bytes / 8e9 / 2e-6)
    assert rows["mlir"]["status"] == "not timed" and rows["mlir"]["reason"] == "not here"
    assert record["threads"] == 1 and record["environment"]["packages"]["torch"]
    printed = cli(f"{asked} --backend inductor").text
    assert "inductor 2 µs 1 µs to 3 µs" in printed and "eager" not in printed.split("x eager")[1]


@pytest.mark.usefixtures("timed")
def test_a_product_of_many_rows_is_held_to_the_gemm_rate() -> None:
    row = answer("kernels bench --operator linear --case '512x576x3072 bfloat16'")["rows"][0]
    assert row["bound"] == "gemm"
    assert row["share_of_ceiling"] == pytest.approx(2 * 512 * 576 * 3072 / 1e12 / row["seconds"])


@pytest.mark.usefixtures("timed")
def test_show_lists_stages_and_prints_one() -> None:
    asked = "kernels show rms_norm --backend eager"
    printed = cli(asked).text
    assert "source" in printed and "measured 4 µs" in printed and "at the least 4,608 bytes" in printed
    found = answer(f"{asked} --case '3x70 bfloat16'")
    assert found["case"] == "3x70 bfloat16" and found["stages"][0]["stage"] == "source" and len(found["artifact"]) == 64
    ran = cli(f"{asked} --stage source")
    assert "def rms_norm_reference(" in ran.out and f"artifact {found['artifact']}" in ran.err
    assert answer(f"{asked} --stage source")["text"] == ran.out.rstrip("\n") + "\n"


@pytest.mark.parametrize(
    ("words", "shown", "said"),
    [
        pytest.param("rms_norm --backend mlir --stage llvm", "llvm.func", "on mlir, llvm; artifact ", marks=needs_mlir),
        pytest.param("paged_attention --backend triton --stage ptx", ".visible .entry", "", marks=PTX),
    ],
)
def test_show_prints_what_a_compiler_made(words: str, shown: str, said: str) -> None:
    ran = cli(f"kernels show {words}")
    assert shown in ran.out and said in ran.err


@LLVM
def test_ahead_names_what_is_portable() -> None:
    rows = answer("kernels ahead --operator linear")
    assert {row["status"] for row in rows if row["level"] == "v3"} == {"portable"}
    portable = sum(row["status"] == "portable" for row in rows)
    assert f"for aarch64: {portable} portable" in cli("kernels ahead --operator linear").text


@needs_mlir
@pytest.mark.parametrize("weights", ["auto", "int8"])
def test_show_the_decode_step(weights: str) -> None:
    asked = f"kernels show decode_step --backend mlir --model shape:tiny --set model.weights={weights} --rows 2"
    found = answer(asked)
    assert [each["stage"] for each in found["stages"]][:2] == ["vector", "llvm"]
    assert found["artifact"] in cli(asked).text
    ran = cli(f"{asked} --stage llvm")
    assert "llvm.func @decode_step" in ran.out and f"artifact {found['artifact']}" in ran.err
    runner = workbench.load("shape:tiny", weights=weights, backend="mlir", max_num_seqs=2)
    requests = [Request(f"{i}", (1, 2, 3), SamplingParameters(max_tokens=3, ignore_eos=True)) for i in range(2)]
    assert {e.reason for e in runner.stream(requests) if isinstance(e, Finished)} == {"length"}
    assert runner.core.executor.artifacts["decode 2"] == found["artifact"], "what is shown is what runs"


def test_bench_really_times() -> None:
    asked = "kernels bench --operator rms_norm --case '1x2048 bfloat16' --backend eager --threads 1 --seconds 0.02"
    (row,) = answer(asked)["rows"]
    assert row["status"] == "ok" and 0 < row["p10_seconds"] <= row["seconds"] <= row["p90_seconds"]
    assert row["speedup_over_eager"] == 1.0 and row["share_of_ceiling"] > 0


@pytest.mark.usefixtures("timed")
@pytest.mark.parametrize("format", ["table", "md", "csv", "json"])
def test_a_model_is_benched_in_every_format(format: str, tmp_path: Path) -> None:
    small = "--set workload.prompt_tokens=16 --set workload.output_tokens=2 --set measure.rounds=1 --no-memory"
    asked = f"bench shape:tiny --set backend=eager --batch 1 --depth 0 {small}"
    ran = cli(f"{asked} --format {format} --out", tmp_path)
    (file,) = tmp_path.iterdir()
    assert file.name.startswith("bench-tiny-") and str(file) in ran.err
    assert "prefill 16" in ran.out and "decode 2" in ran.out
    if format == "json":
        assert ran.json == json.loads(file.read_text())
