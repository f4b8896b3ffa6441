"""The check itself: what it must not let pass, and a table of gaps that is held to the truth."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import compiled_kernels.capabilities as gaps_module
import compiled_kernels.check as check_module
from compiled_kernels.backends import Backend, BackendError, backend_problems
from compiled_kernels.capabilities import GAPS, Gap
from compiled_kernels.cases import Case, Suite, case_of, suite_of, suites
from compiled_kernels.check import check, verdict
from compiled_kernels.compiled_calls import compile_call
from compiled_kernels.interpreted import interpreting, needs_interpreter
from tests.helpers.kernels import needs, with_call
from tests.thorough import THOROUGH

ROOT = Path(__file__).parents[2]
MAX_CASES = 3  # of an operator's cases: `make test` tries the smallest


@pytest.fixture
def gap(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def add(operator: str, backend: Backend, case: str) -> None:
        monkeypatch.setattr(gaps_module, "GAPS", (Gap(operator, backend, case, "known"),))

    return add


rotary = suite_of("rotary")
BROKEN = with_call("rotary", lambda *inputs: rotary.call(*inputs, backend=Backend.EAGER) + 1)


def throws(*_: Any) -> None:
    raise RuntimeError("no\n such kernel")


@pytest.mark.parametrize("backend", [Backend.EAGER, Backend.INDUCTOR])
def test_every_small_case_is_right_as_written(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    def tried(suite: Suite) -> tuple[Case, ...]:
        """Return small cases; spans of attention are the command's, which compiles them."""
        spans = suite.operator.endswith("attention")
        fit = [case for case in suite.cases if not case.timed and not (spans and not case.name.startswith("decode"))]
        return tuple(fit if THOROUGH else sorted(fit, key=lambda case: case.cost.flops)[:MAX_CASES])

    small = [replace(suite, cases=tried(suite), exact=suite.exact) for suite in suites()]
    monkeypatch.setattr(check_module, "suites", lambda: small)
    found = list(check((backend,)))
    assert len(found) == sum(len(suite.cases) for suite in small) and all(suite.cases for suite in small)
    assert [row for row in found if row.status == "failed"] == []


def test_every_gap_names_a_case() -> None:
    names = [(suite.operator, case.name) for suite in suites() for case in suite.cases]
    for gap in GAPS:
        assert any(gap.covers(operator, gap.backend, case) for operator, case in names), gap
        assert gap.reason
        assert not gap.worked_around_in or (ROOT / gap.worked_around_in).is_file()


@pytest.mark.parametrize("row", [gap for gap in GAPS if gap.backend is not Backend.TRITON], ids=str)
def test_every_gap_is_still_open(row: Gap) -> None:
    """The rows of the backend triton are held to it in its interpreter (interpreted/laws.py)."""
    if problem := backend_problems()[row.backend]:
        pytest.skip(f"backend {row.backend}: {problem}")
    suite = suite_of(row.operator)
    covered = [case for case in suite.cases if row.covers(suite.operator, row.backend, case.name)]
    cheapest = min(covered, key=lambda case: case.cost.bytes)
    assert verdict(suite, cheapest, row.backend) == ("gap", row.reason)


def test_a_gap_that_has_closed_fails(gap: Callable[..., None]) -> None:
    gap("rotary", Backend.INDUCTOR, "5x3x2*")
    status, reason = verdict(rotary, case_of(rotary, "5x3x2 float32"), Backend.INDUCTOR)
    assert status == "failed" and "this gap has closed" in reason
    assert verdict(rotary, case_of(rotary, "2x1x96 float32"), Backend.INDUCTOR) == ("ok", "")


def test_a_wrong_result_in_a_gap_is_a_gap(gap: Callable[..., None]) -> None:
    assert verdict(BROKEN, BROKEN.cases[0], Backend.INDUCTOR)[0] == "failed"
    gap("rotary", Backend.INDUCTOR, "*")
    assert verdict(BROKEN, BROKEN.cases[0], Backend.INDUCTOR) == ("gap", "known")


def test_what_a_kernel_throws_is_its_failure_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_module, "suites", lambda: (with_call("rotary", throws), rotary))
    rows = list(check((Backend.INDUCTOR,)))
    half = len(rows) // 2
    assert {row.status for row in rows[:half]} == {"failed"} and {row.status for row in rows[half:]} == {"ok"}
    assert rows[0].reason == "RuntimeError: no such kernel"


def test_a_backend_that_does_not_work_here_is_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_module, "backend_problems", lambda: dict.fromkeys(Backend, "not here"))
    assert {(row.status, row.reason, row.execution) for row in check((Backend.MLIR,), "rotary")} == {
        ("gap", "not here", "")
    }


@needs(Backend.INDUCTOR)
def test_the_compiled_form_is_checked() -> None:
    suite = suite_of("gated_silu")
    cases = tuple(case for case in suite.cases if not case.timed)
    form = compile_call(suite, Backend.INDUCTOR)
    assert [verdict(suite, case, Backend.INDUCTOR, form) for case in cases] == [("ok", "")] * len(cases)
    assert verdict(suite, cases[0], Backend.INDUCTOR, lambda gate_up: 1.1 * form(gate_up))[0] == "failed"


@pytest.mark.interpreter
@pytest.mark.skipif(not needs_interpreter(), reason="needs triton (pip install triton), and no GPU")
def test_the_interpreter_answers_in_a_process_of_its_own() -> None:
    rows = list(check((Backend.TRITON, Backend.EAGER), "gated_gelu", interpret=True))  # few cases, all of them small
    assert {row.status for row in rows} == {"ok"}
    for backend, form in (("eager", "as written"), ("triton", "interpreted")):
        mine = [row for row in rows if row.backend == backend]
        assert [row.case for row in mine] == [case.name for case in suite_of("gated_gelu").cases]
        assert {row.execution for row in mine} == {form}


@pytest.mark.interpreter
def test_a_process_that_breaks_is_reported() -> None:
    message = "ended with 1: .*unknown operator 'nothing'"
    with interpreting(["nothing"]) as rows, pytest.raises(BackendError, match=message):
        list(rows)


@pytest.mark.interpreter
def test_the_process_ends_when_its_output_is_no_longer_read(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen] = []

    class Watched(subprocess.Popen):
        def __init__(self, *arguments: Any, **named: Any):
            super().__init__(*arguments, **named)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Watched)
    with interpreting(["linear_quantized"]):
        pass
    assert [process.returncode is not None for process in started] == [True]
