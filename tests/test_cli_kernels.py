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
import workbench.bench.kernels as kernel_show_module
import workbench.bench.model as bench_module
from compiled_kernels.backends import Backend, backend_problems
from compiled_kernels.cases import case_of, suite_of, suites
from compiled_kernels.check import CheckResult
from compiled_kernels.measure import KernelMeasurement, KernelTiming
from compiled_kernels.mlir import ahead
from workbench.cli import main
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


def ceiling(kind: str, value: float, unit: str) -> Ceiling:
    return Ceiling(kind, value, unit, "made up", 1, 1, 1.0, 1, dtype="bfloat16")


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No backend is really timed; reads go at 8 GB/s and products at 1 TFLOP/s."""

    def measure(suite: Any, case: Any, backends: Any, *_: Any) -> KernelMeasurement:
        there = {backend: TIMES[backend] for backend in backends if backend in TIMES}
        return KernelMeasurement(
            "cache", 4, 1000, there, {backend: "not here" for backend in backends if backend not in there}
        )

    made_up = MachineCeilings((ceiling("read", 8e9, "bytes/s"),), (ceiling("gemm", 1e12, "FLOP/s"),))
    monkeypatch.setattr(kernel_bench_module, "measure", measure)
    monkeypatch.setattr(kernel_show_module, "measure", measure)
    for module in (kernel_bench_module, bench_module):
        monkeypatch.setattr(module, "ceilings_for", lambda *_, **__: made_up)


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[CheckResult]:
    rows = list(ROWS)
    monkeypatch.setattr(check_module, "check", lambda *_, **__: iter(rows))
    return rows


def words(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the printed words, without the frame of a table."""
    return " ".join(capsys.readouterr().out.translate(dict.fromkeys(map(ord, "│┃"), " ")).split())


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [entry["operator"] for entry in found] == OPERATORS
    for entry in found:
        assert entry["formula"] and entry["source"] and entry["backends"][:2] == ["eager", "inductor"]
        file, line = entry["place"].split(":")
        source = Path(__file__).parents[1].joinpath(file).read_text().splitlines()
        assert f"def {entry['operator']}(" in source[int(line) - 1]
        assert entry["cases"] == len(suite_of(entry["operator"]).cases) >= entry["timed"]
    assert main(["kernels", "list"]) == 0
    printed = words(capsys)
    assert all(operator in printed for operator in OPERATORS) and "gap on mlir, 12 cases: selection has no" in printed


def test_check_as_json_is_one_list(checked: list[CheckResult], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "check", "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert err == "" and [row["status"] for row in found] == ["ok", "gap", "gap"]
    assert all(set(row) >= {"operator", "backend", "case", "status", "reason"} for row in found)
    checked.append(CheckResult("rotary", "mlir", "c", "failed", "wrong by 3"))
    assert main(["kernels", "check", "--json"]) == 1


def test_check_counts_and_lists_gaps_and_failures(
    checked: list[CheckResult], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workbench.progress.LINE_INTERVAL_SECONDS", 0.0)  # short work leaves no line otherwise
    assert main(["kernels", "check"]) == 0
    out, err = capsys.readouterr()
    assert "gap rotary on mlir, 2 cases: not [yet]" in " ".join(out.split()) and "1 ok, 2 gap, 0 failed" in out
    assert "case" in err and "case" not in out.splitlines()[0]
    checked += [CheckResult("rotary", "mlir", case, "failed", "wrong by 3") for case in "cd"]
    assert main(["kernels", "check"]) == 1
    assert "failed rotary on mlir, c; d: wrong by 3" in words(capsys)


def test_check_really_checks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "check", "--operator", "rotary", "--backend", "eager", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["case"] for row in found] == [case.name for case in suite_of("rotary").cases]
    assert {row["status"] for row in found} == {"ok"} and {row["execution"] for row in found} == {"as written"}


def test_a_check_knows_how_many_rows_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend mlir has a row of each case for every level."""
    from compiled_kernels import check
    from workbench.cli import kernels

    monkeypatch.setattr(check, "verdict", lambda *_: ("ok", ""))
    backends = (Backend.MLIR, Backend.EAGER)
    assert kernels._rows("rotary", backends) == len(list(check.check(backends, "rotary")))


@pytest.mark.usefixtures("timed")
def test_bench_tells_shares_and_ratios(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["kernels", "bench", "--operator", "rms_norm", "--case", "1x2048 bfloat16", "--threads", "1"]
    assert main([*asked, "--json", "--out", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    record = json.loads(out)
    (file,) = tmp_path.iterdir()
    assert file.name.startswith("kernels-") and str(file) in err and json.loads(file.read_text()) == record
    rows = {row["backend"]: row for row in record["rows"]}
    work = case_of(suite_of("rms_norm"), "1x2048 bfloat16").cost
    assert rows["inductor"]["bound"] == "read" and rows["inductor"]["speedup_over_eager"] == 2.0
    assert rows["inductor"]["share_of_ceiling"] == pytest.approx(work.bytes / 8e9 / 2e-6)
    assert rows["mlir"]["status"] == "not timed" and rows["mlir"]["reason"] == "not here"
    assert record["threads"] == 1 and record["environment"]["packages"]["torch"]
    assert main([*asked, "--backend", "inductor"]) == 0
    printed = words(capsys)
    assert "inductor 2.0 1.0 to 3.0" in printed and "eager" not in printed.split("x eager")[1]


@pytest.mark.usefixtures("timed")
def test_a_product_of_many_rows_is_held_to_the_gemm_rate(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "bench", "--operator", "linear", "--case", "512x576x3072 bfloat16", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)["rows"][0]
    assert row["bound"] == "gemm"
    assert row["share_of_ceiling"] == pytest.approx(2 * 512 * 576 * 3072 / 1e12 / row["seconds"])


@pytest.mark.usefixtures("timed")
def test_show_lists_stages_and_prints_one(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["kernels", "show", "rms_norm", "--backend", "eager"]
    assert main(asked) == 0
    printed = words(capsys)
    assert "source" in printed and "measured 4.0 us" in printed and "at the least 4,608 bytes" in printed
    assert main([*asked, "--json", "--case", "3x70 bfloat16"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["case"] == "3x70 bfloat16" and found["stages"][0]["stage"] == "source" and len(found["artifact"]) == 64
    assert main([*asked, "--stage", "source"]) == 0
    out, err = capsys.readouterr()
    assert "def rms_norm_reference(" in out and f"artifact {found['artifact']}" in err
    assert main([*asked, "--stage", "source", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == out.rstrip("\n") + "\n"


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (["kernels", "show", "rms_nrom"], "unknown operator 'rms_nrom'; did you mean 'rms_norm'?"),
        (["kernels", "show", "rms_norm", "--backend", "egaer"], "unknown backend 'egaer'; did you mean 'eager'?"),
        (["kernels", "show", "rms_norm", "--backend", "eager", "--stage", "sorce"], "did you mean 'source'?"),
        (["kernels", "show", "rms_norm", "--case", "1x57"], "unknown case of rms_norm '1x57'"),
        (["kernels", "check", "--operator", "rotery"], "did you mean 'rotary'?"),
        (["kernels", "bench", "--backend", "mlri"], "did you mean 'mlir'?"),
        (["kernels", "bench", "--operator", "rotary", "--case", "1x1"], "unknown timed case '1x1'"),
        (["kernels", "show", "decode_step", "--case", "a"], "--case: of no effect here: decode_step has a --model"),
        (["kernels", "show", "rms_norm", "--rows", "2"], "--rows: of no effect here: only decode_step has such"),
        (["kernels", "show", "decode_step", "--backend", "inductor"], "one function only on backend mlir"),
        (["kernels", "show", "decode_step", "--backend", "mlri"], "did you mean 'mlir'?"),
        (["kernels", "show", "decode_step", "--rows", "0"], "--rows 0: must be at least 1"),
        (["kernels", "lsit"], "No such command 'lsit'"),
        (["bench", "--depth", "-1"], "--depth -1: must be at least 0"),
        (["bench", "--batch", "0"], "--batch 0: must be at least 1"),
        (["bench", "--repetitions", "0"], "repetitions 0: must be at least 1"),
        (["bench", "--depth", "100"], "depth 100: must be a multiple of 512"),
        (["bench", "--model", "shape:tyni"], "no shape 'tyni'"),
        (["bench", "--model", "nowhere"], "nowhere: no such folder"),
        (["bench", "--format", "xml"], "Invalid value for '--format'"),
        (["bench", "--peers", "--model", "demo"], "give shape:NAME"),
        (["bench", "--peers", "--format", "csv"], "--format csv: peers have table, md and json"),
        (["bench", "--peers", "--batch", "1", "--no-memory"], "--batch, --memory: of no effect with --peers"),
        (["bench", "--peers", "--prompt", "512", "--cold-start"], "--cold-start, --prompt: of no effect with --peers"),
        (["bench", "--peers", "--rounds", "0", "--model", "shape:tiny"], "rounds 0: must be at least 1"),
        (["bench", "--peers", "--dtype", "float32", "--weights", "int8"], "--dtype float32 and --weights int8"),
        (["bench", "--peers", "--weights", "int5"], "no format 'int5'; did you mean"),
        (["bench", "--work", "mixed"], "--work: of no effect without --peers"),
        (["bench", "--peer-python", "a=b", "--rounds", "3"], "--peer-python, --rounds: of no effect without --peers"),
        (["bench", "--json", "--format", "md"], "--json and --format md: give one of them"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_a_mistake_is_one_line_and_code_2(asked: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(asked) == 2
    out, err = capsys.readouterr()
    (line,) = [line for line in err.replace("\r", "\n").splitlines() if line.startswith("error: ")]
    assert out == "" and expected in line and "Traceback" not in err


MLIR = pytest.mark.skipif(
    backend_problems()[Backend.MLIR] is not None, reason=f"backend mlir: {backend_problems()[Backend.MLIR]}"
)
PTX = pytest.mark.skipif(find_spec("triton") is None, reason="pip install 'inference-workbench[triton]'")


@MLIR
def test_show_the_llvm_of_rms_norm(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "show", "rms_norm", "--backend", "mlir", "--stage", "llvm"]) == 0
    out, err = capsys.readouterr()
    assert "llvm.func" in out and "on mlir, llvm; artifact " in err


LLVM = pytest.mark.skipif(ahead.unavailable_reason() is not None, reason=f"ahead of time: {ahead.unavailable_reason()}")


@LLVM
def test_ahead_names_what_is_portable(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "ahead", "--operator", "linear", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["status"] for row in rows if row["level"] == "v3"} == {"portable"}
    assert main(["kernels", "ahead", "--operator", "linear"]) == 0
    assert f"for aarch64: {sum(row['status'] == 'portable' for row in rows)} portable" in words(capsys)


def test_ahead_for_an_unknown_target_names_the_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "ahead", "--target", "arch64"]) == 2
    assert "unknown target 'arch64'; did you mean 'aarch64'?" in capsys.readouterr().err


@PTX
def test_show_the_ptx_of_paged_attention(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "show", "paged_attention", "--backend", "triton", "--stage", "ptx"]) == 0
    assert ".visible .entry" in capsys.readouterr().out


@MLIR
def test_show_the_decode_step(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["kernels", "show", "decode_step", "--backend", "mlir", "--model", "shape:tiny", "--rows", "2"]
    assert main([*asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["stage"] for each in found["stages"]][:2] == ["vector", "llvm"]
    assert main(asked) == 0 and found["artifact"] in words(capsys)
    assert main([*asked, "--stage", "llvm"]) == 0
    out, err = capsys.readouterr()
    assert "llvm.func @decode_step" in out and f"artifact {found['artifact']}" in err
    runner = workbench.load("shape:tiny", backend="mlir", max_num_seqs=2)
    requests = [Request(f"{i}", (1, 2, 3), SamplingParameters(max_tokens=3, ignore_eos=True)) for i in range(2)]
    assert {e.reason for e in runner.stream(requests) if isinstance(e, Finished)} == {"length"}
    assert runner.executor.artifacts["decode 2"] == found["artifact"], "what is shown is what runs"


def test_bench_really_times(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["kernels", "bench", "--operator", "rms_norm", "--case", "1x2048 bfloat16", "--backend", "eager"]
    assert main([*asked, "--threads", "1", "--seconds", "0.02", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["status"] == "ok" and 0 < row["p10_seconds"] <= row["seconds"] <= row["p90_seconds"]
    assert row["speedup_over_eager"] == 1.0 and row["share_of_ceiling"] > 0


@pytest.mark.usefixtures("timed")
@pytest.mark.parametrize("format", ["table", "md", "csv", "json"])
def test_a_model_is_benched_in_every_format(format: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--prompt", "16", "--generate", "2", "--batch", "1", "--depth", "0", "--repetitions", "1", "--no-memory"]
    asked = ["bench", "--model", "shape:tiny", "--backend", "eager", *small, "--format", format, "--out", str(tmp_path)]
    assert main(asked) == 0
    out, err = capsys.readouterr()
    (file,) = tmp_path.iterdir()
    assert file.name.startswith("bench-tiny-") and str(file) in err
    assert "prefill 16" in out and "decode 2" in out
    if format == "json":
        assert json.loads(out) == json.loads(file.read_text())
        assert main([*asked[:-4], "--json"]) == 0 and json.loads(capsys.readouterr().out)["rows"]


@pytest.mark.parametrize("asked", ["kernels", "kernels show", "kernels check", "kernels ahead", "bench"])
def test_help_tells(asked: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*asked.split(), "--help"]) == 0
    assert f"workbench {asked}" in words(capsys)
