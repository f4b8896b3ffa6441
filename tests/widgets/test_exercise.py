"""Exercises: an answer is accepted within its tolerance and refused outside it, and is computed when it is checked."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from workbench.errors import WorkbenchError
from workbench.widgets.exercise.grading import UNITS, ComputedAnswer, parse_number
from workbench.widgets.exercise.view import Exercise, unanswerable

VALUES = st.floats(1e-6, 1e12).flatmap(lambda size: st.sampled_from([size, -size]))
TOLERANCES = st.floats(1e-6, 0.5)


@given(VALUES, TOLERANCES, st.floats(-0.999, 0.999))
def test_an_answer_within_tolerance_is_accepted(value: float, tolerance: float, share: float) -> None:
    given = value * (1 + 0.99 * share * tolerance)
    assert ComputedAnswer(value, tolerance=tolerance).accepts(repr(given))


@given(VALUES, TOLERANCES, st.floats(1.05, 100), st.sampled_from([-1, 1]))
def test_an_answer_outside_it_is_refused(value: float, tolerance: float, times: float, side: int) -> None:
    given = value * (1 + side * times * tolerance)
    # The relative error is taken of the larger number, as math.isclose has it.
    assume(abs(given - value) > 1.001 * tolerance * max(abs(given), abs(value)))
    assert not ComputedAnswer(value, tolerance=tolerance).accepts(repr(given))


@given(
    VALUES | st.integers(-(10**12), 10**12),
    st.just(0.0) | TOLERANCES,
    st.sampled_from(["", "%", "bytes", "ms", "pages"]),
)
def test_the_solution_as_it_is_shown_is_accepted(value: float, tolerance: float, unit: str) -> None:
    answer = ComputedAnswer(value, unit=unit, tolerance=tolerance)
    assert answer.accepts(str(answer))
    assert parse_number(str(answer), unit) == pytest.approx(value, rel=max(tolerance, 1e-12))


@given(st.integers(0, 10**9), st.sampled_from(UNITS), st.data())
def test_units_of_one_kind_convert(number: int, family: dict[str, float], data: Any) -> None:
    mine, wanted = (data.draw(st.sampled_from(sorted(family))) for _ in range(2))
    assume(mine)  # without a unit it is taken in the one that is wanted
    assert parse_number(f"{number:,} {mine}", wanted) == pytest.approx(number * family[mine] / family[wanted])


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [("1,632", "bytes", 1632), ("2.5e3", "", 2500), (".5", "s", 0.5), ("3 KiB", "bytes", 3072), ("−4", "", -4),
     ("20ms", "s", 0.02), ("12 %", "", 0.12), ("12", "%", 12), ("7 token", "tokens", 7), ("1_000", "", 1000)],
)  # fmt: skip
def test_numbers_as_people_type_them(text: str, unit: str, value: float) -> None:
    assert parse_number(text, unit) == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "unit"), [("", ""), ("many", ""), ("3,5", ""), ("4 s", "bytes"), ("1 2", ""), ("5 apples", "tokens")]
)
def test_what_is_no_number_is_refused_and_costs_no_try(text: str, unit: str) -> None:
    with pytest.raises(WorkbenchError, match="Type a number"):
        parse_number(text, unit)
    exercise = Exercise("How many?", 3, unit=unit)
    assert not exercise.check(text) and exercise.feedback.tries == () and exercise.feedback.problem
    assert exercise.check("3")


def test_the_answer_is_computed_when_it_is_checked() -> None:
    state: dict[str, float] = {}
    exercise = Exercise("How many?", lambda: state["tokens"], because=lambda value: f"It has {value:.0f} tokens.")
    assert not exercise.check("5") and exercise.feedback.tries == ()
    assert "KeyError" in exercise.feedback.problem and "Run the cells above" in exercise.form.feedback
    state["tokens"] = 5
    assert exercise.check("5") and "It has 5 tokens." in exercise.form.feedback
    exercise.reset()
    state["tokens"] = 7
    assert not exercise.check("5") and exercise.check("7")


def test_a_hint_on_demand_and_the_solution_after_a_second_wrong_try() -> None:
    exercise = Exercise("How many?", 10, unit="pages", hint="Count <them>.", because="Ten & no more.")
    assert "Count" not in exercise.picture() and "not answered yet" in exercise.picture()
    exercise.check("3")
    assert "✗" in exercise.picture() and "10" not in exercise.picture() and not exercise.form.closed
    exercise.show_hint()
    assert "Count &lt;them&gt;." in exercise.picture() and exercise.feedback.tries == (("3", False),)
    exercise.check("4")
    assert "10 pages" in exercise.picture() and "Ten &amp; no more." in exercise.picture() and exercise.form.closed
    assert not exercise.check("10"), "it is closed"
    exercise.reset()
    assert exercise.check("10") and "✓" in exercise.picture() and exercise.right and exercise.form.closed


def test_the_solution_on_request() -> None:
    exercise = Exercise("How many?", lambda: 3.14159, tolerance=0.001)
    exercise.show_solution()
    assert "3.142" in exercise.picture() and exercise.form.closed and not exercise.right


def test_a_choice() -> None:
    exercise = Exercise("Which?", lambda: "b" + "", choices=["a", "b", "c"], because="So.")
    assert not exercise.check("a") and exercise.check("b") and "◉ b" in exercise.picture()
    unknown = Exercise("Which?", lambda: "d", choices=["a", "b"])
    assert not unknown.check("a") and "none of the choices" in unknown.feedback.problem
    assert not unknown.check("") and "Choose one" in unknown.feedback.problem


def test_a_prediction_has_one_try() -> None:
    exercise = Exercise("How long?", lambda: 8.0, unit="ms", tolerance=0.25, prediction=True, because="Measured.")
    assert not exercise.check("2") and exercise.form.closed
    assert "Not what came out" in exercise.picture() and "8 ms" in exercise.picture()
    exercise.reset()
    assert exercise.check("0.007 s")


def test_buttons_do_what_the_methods_do() -> None:
    exercise = Exercise("How many?", 2, hint="Two.")
    for message in ({"press": "hint"}, {"check": "1"}, {"press": "solution"}):
        exercise._press(message)
    assert exercise.form.closed and exercise.feedback.hint == "Two."
    exercise._press({"press": "again"})
    assert exercise.feedback.tries == () and exercise.form.draft == "" and not exercise.form.closed


def test_exercises_that_cannot_be_answered_are_found() -> None:
    before = set(unanswerable())
    kept = [Exercise("Of what?", lambda: {}["x"]), Exercise("Which?", lambda: "d", choices=["a"]), Exercise("2?", 2)]
    kept += [Exercise(answer=lambda: None, because="Above.")]
    assert "<b>" not in kept[-1].picture() and "<b>2?</b>" in kept[-2].picture()
    found = [each for each in unanswerable() if each not in before]
    assert found == [
        "Exercise('Above.'): WorkbenchError: the answer None is no number; give `choices`, or compute a number",
        "Exercise('Of what?'): KeyError: 'x'",
        "Exercise('Which?'): WorkbenchError: the answer 'd' is none of the choices a",
    ]
    assert all(each.feedback.problem == "" for each in kept)
