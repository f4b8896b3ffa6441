"""The check itself: what it must not let pass, and a table of gaps that is held to the truth."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import compiled_kernels.capabilities as gaps_module
import compiled_kernels.check as check_module
from compiled_kernels.backends import Backend, BackendError, backend_problems
from compiled_kernels.capabilities import GAPS, Gap
from compiled_kernels.cases import Case, Suite, case_of, suite_of, suites
from compiled_kernels.check import check, verdict
from compiled_kernels.compiled_calls import compile_call
from compiled_kernels.interpreted import interpreting, needs_interpreter
from tests.thorough import THOROUGH, some

COMPILES = backend_problems()[Backend.INDUCTOR]
MAX_CASE_FLOPS = 20_000_000  # floating-point operations of a case that `make test` tries
needs_compiler = pytest.mark.skipif(COMPILES is not None, reason=str(COMPILES))


@pytest.fixture
def gap(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def add(operator: str, backend: Backend, case: str) -> None:
        monkeypatch.setattr(gaps_module, "GAPS", (Gap(operator, backend, case, "known"),))

    return add


def rotary(call: Callable[..., Any]) -> Suite:
    """The suite of rotary, with another call in its place; the specification stays."""
    suite = suite_of("rotary")
    return replace(
        suite, call=lambda *inputs, backend: call(suite.call(*inputs, backend=backend), backend), exact=suite.exact
    )


def broken(outputs: torch.Tensor, backend: Backend) -> torch.Tensor:
    return outputs if backend is Backend.EAGER else outputs + 1


def throws(outputs: torch.Tensor, backend: Backend) -> torch.Tensor:
    if backend is not Backend.EAGER:
        raise RuntimeError("no\n such kernel")
    return outputs


@pytest.mark.parametrize("backend", [Backend.EAGER, Backend.INDUCTOR])
def test_every_small_case_is_right_as_written(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    def fits(operator: str, case: Case) -> bool:  # into a test; the others are the command's
        spans = operator.endswith("attention") and not case.name.startswith("decode")
        return not case.timed and not spans and (THOROUGH or case.cost.flops < MAX_CASE_FLOPS)

    small = [
        replace(s, cases=tuple(some([c for c in s.cases if fits(s.operator, c)], 3)), exact=s.exact) for s in suites()
    ]
    monkeypatch.setattr(check_module, "suites", lambda: small)
    rows = list(check((backend,)))
    assert len(rows) == sum(len(suite.cases) for suite in small) and all(suite.cases for suite in small)
    assert [row for row in rows if row.status == "failed"] == []


def test_every_gap_names_a_case() -> None:
    names = [(suite.operator, case.name) for suite in suites() for case in suite.cases]
    for gap in GAPS:
        assert any(gap.covers(operator, gap.backend, case) for operator, case in names), gap
        assert gap.reason
        assert not gap.worked_around_in or (Path(__file__).parents[2] / gap.worked_around_in).is_file()


@pytest.mark.parametrize("row", [gap for gap in GAPS if gap.backend is not Backend.TRITON], ids=str)
def test_every_gap_is_still_open(row: Gap) -> None:
    """The rows of the backend triton are held to it in its interpreter (triton_interpreted.py)."""
    if problem := backend_problems()[row.backend]:
        pytest.skip(f"backend {row.backend}: {problem}")
    suite = suite_of(row.operator)
    covered = [case for case in suite.cases if row.covers(suite.operator, row.backend, case.name)]
    cheapest = min(covered, key=lambda case: case.cost.bytes)
    assert verdict(suite, cheapest, row.backend) == ("gap", row.reason)


def test_a_gap_that_has_closed_fails(gap: Callable[..., None]) -> None:
    suite = suite_of("rotary")
    gap("rotary", Backend.INDUCTOR, "5x3x2*")
    status, reason = verdict(suite, case_of(suite, "5x3x2 float32"), Backend.INDUCTOR)
    assert status == "failed" and "this gap has closed" in reason
    assert verdict(suite, case_of(suite, "2x1x96 float32"), Backend.INDUCTOR) == ("ok", "")


def test_a_wrong_result_in_a_gap_is_a_gap(gap: Callable[..., None]) -> None:
    suite = rotary(broken)
    assert verdict(suite, suite.cases[0], Backend.INDUCTOR)[0] == "failed"
    gap("rotary", Backend.INDUCTOR, "*")
    assert verdict(suite, suite.cases[0], Backend.INDUCTOR) == ("gap", "known")


def test_what_a_kernel_throws_is_its_failure_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_module, "suites", lambda: (rotary(throws), suite_of("rotary")))
    rows = list(check((Backend.INDUCTOR,)))
    half = len(rows) // 2
    assert {row.status for row in rows[:half]} == {"failed"} and {row.status for row in rows[half:]} == {"ok"}
    assert rows[0].reason == "RuntimeError: no such kernel"


def test_a_backend_that_does_not_work_here_is_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_module, "backend_problems", lambda: dict.fromkeys(Backend, "not here"))
    assert {(row.status, row.reason, row.execution) for row in check((Backend.MLIR,), "rotary")} == {
        ("gap", "not here", "")
    }


def test_an_unknown_operator_is_reported_with_the_nearest() -> None:
    with pytest.raises(BackendError, match="unknown operator 'rotray'; did you mean 'rotary'?"):
        list(check(operator="rotray"))


@needs_compiler
def test_the_compiled_form_is_checked() -> None:
    suite = suite_of("gated_silu")
    cases = tuple(case for case in suite.cases if not case.timed)
    form = compile_call(suite, Backend.INDUCTOR)
    assert [verdict(suite, case, Backend.INDUCTOR, form) for case in cases] == [("ok", "")] * len(cases)
    wrong = replace(
        suite, call=lambda gate_up, backend: suite.call(gate_up, backend=backend) * (1 + 0.1 * (backend == "inductor"))
    )
    status, reason = verdict(
        replace(wrong, exact=suite.exact), cases[0], Backend.INDUCTOR, compile_call(wrong, Backend.INDUCTOR)
    )
    assert status == "failed" and "against float64" in reason


@pytest.mark.skipif(not needs_interpreter(), reason="needs triton (pip install triton), and no GPU")
def test_the_interpreter_answers_in_a_process_of_its_own() -> None:
    rows = list(check((Backend.TRITON, Backend.EAGER), "gated_gelu", interpret=True))  # few cases, all of them small
    assert {row.status for row in rows} == {"ok"}
    for backend, form in (("eager", "as written"), ("triton", "interpreted")):
        mine = [row for row in rows if row.backend == backend]
        assert [row.case for row in mine] == [case.name for case in suite_of("gated_gelu").cases]
        assert {row.execution for row in mine} == {form}


def test_a_process_that_breaks_is_reported() -> None:
    message = "ended with 1: .*unknown operator 'nothing'"
    with interpreting(["nothing"]) as rows, pytest.raises(BackendError, match=message):
        list(rows)


def test_the_process_ends_when_its_output_is_no_longer_read(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen] = []

    class Watched(subprocess.Popen):
        def __init__(self, *arguments: Any, **named: Any):
            super().__init__(*arguments, **named)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Watched)
    with interpreting(["linear_grouped"]):
        pass
    assert [process.returncode is not None for process in started] == [True]
