"""Ask a question and check the reader's answer against a computed one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakSet

import anywidget
import traitlets

from workbench.errors import WorkbenchError
from workbench.widgets.exercise import picture as exercise_picture
from workbench.widgets.exercise.grading import ComputedAnswer, wanted
from workbench.widgets.exercise.picture import Feedback
from workbench.widgets.view import PictureWidget

HERE = Path(__file__).parent
MAX_TRIES = 2  # wrong answers until the solution is shown
_ASKED: WeakSet[Exercise] = WeakSet()  # exercises of this kernel


class ExerciseForm(anywidget.AnyWidget):
    """The form of an exercise: its question with a field or choices, its buttons, and a region that screen readers
    announce on changes."""

    _esm = (HERE / "exercise.js").read_text(encoding="utf-8")
    _css = (HERE / "exercise.css").read_text(encoding="utf-8")
    question = traitlets.Unicode().tag(sync=True)
    choices = traitlets.List(traitlets.Unicode()).tag(sync=True)
    unit = traitlets.Unicode().tag(sync=True)
    draft = traitlets.Unicode().tag(sync=True)  # the typed or chosen answer before its check
    feedback = traitlets.Unicode().tag(sync=True)
    has_hint = traitlets.Bool(False).tag(sync=True)
    prediction = traitlets.Bool(False).tag(sync=True)
    closed = traitlets.Bool(False).tag(sync=True)  # whether the answer was right or the solution is shown


class Exercise(PictureWidget):
    """A question whose answer is checked: a number, one of several `choices`, or a `prediction`.

    Args:
        question: text of the question; leave it empty if the text above the cell asks it.
        answer: the right answer, or a function without arguments that computes it when an answer is checked.
        choices: texts of the choices, one of them right; without choices the answer is a number.
        unit: unit of the number; answers in convertible units are accepted (`3 KiB` for bytes).
        tolerance: the largest relative error that counts as right.
        hint: text shown on demand.
        because: the reason, shown with the right answer; or a function that returns it for the computed answer.
        prediction: whether there is one try only, followed by the computed answer.

    After two wrong answers the solution is shown. `check`, `show_hint`, `show_solution` and `reset` are the buttons'
    methods.
    """

    def __init__(
        self,
        question: str = "",
        answer: Any = None,
        *,
        choices: Sequence[Any] = (),
        unit: str = "",
        tolerance: float = 0.01,
        hint: str = "",
        because: str | Callable[[Any], str] = "",
        prediction: bool = False,
    ):
        super().__init__()
        self._answer, self._tolerance, self._hint, self._because = answer, tolerance, hint, because
        self._prediction, self.feedback = prediction, Feedback(predicted=prediction)
        names = [str(choice) for choice in choices]
        self.form = ExerciseForm(
            question=question, choices=names, unit=unit, has_hint=bool(hint), prediction=prediction
        )
        if not callable(answer):
            self._compute()  # raises here for an invalid answer
        self.form.on_msg(lambda _, content, __: self._press(content))
        self.show(self.form)
        _ASKED.add(self)

    @property
    def right(self) -> bool:
        """Return whether the last answer was right."""
        return self.feedback.right

    def check(self, given: Any) -> bool:
        """Check an answer and show the feedback; return whether it was right."""
        given = str(given).strip()
        self.form.draft = given
        if self.form.closed:
            return self.right
        before = self.feedback
        if not given:
            self._say(tries=before.tries, hint=before.hint, problem=wanted(self.form.choices, self.form.unit))
            return False
        try:
            answer = self._compute()
            right = answer.accepts(given)
        except Exception as error:  # of the reader's cells: anything can be in them
            self._say(tries=before.tries, hint=before.hint, problem=_problem(error))
            return False
        tries = (*before.tries, (given, right))
        if right or self._prediction or len(tries) >= MAX_TRIES:
            self._close(answer, tries)
        else:
            self._say(tries=tries, hint=before.hint)
        return right

    def show_hint(self) -> None:
        self._say(tries=self.feedback.tries, hint=self._hint)

    def show_solution(self) -> None:
        """Show the computed answer and its reason, and close the exercise."""
        try:
            self._close(self._compute(), self.feedback.tries)
        except Exception as error:  # of the reader's cells: anything can be in them
            self._say(tries=self.feedback.tries, hint=self.feedback.hint, problem=_problem(error))

    def reset(self) -> None:
        """Ask again, without the previous answers."""
        self.form.draft, self.form.closed = "", False
        self._say()

    def redraw(self) -> None:
        self.form.feedback = exercise_picture.draw_feedback(self.feedback)

    def picture(self) -> str:
        form = self.form
        return exercise_picture.draw_exercise(form.question, form.choices, form.unit, self.feedback)

    def _compute(self) -> ComputedAnswer:
        value = self._answer() if callable(self._answer) else self._answer
        return ComputedAnswer(value, tuple(self.form.choices), self.form.unit, self._tolerance)

    def _close(self, answer: ComputedAnswer, tries: tuple[tuple[str, bool], ...]) -> None:
        because = self._reason(answer)
        self.form.closed = True
        self._say(tries=tries, hint=self.feedback.hint, solution=str(answer), because=because)

    def _reason(self, answer: ComputedAnswer) -> str:
        return self._because(answer.value) if callable(self._because) else self._because

    def _say(self, **feedback: Any) -> None:
        self.feedback = Feedback(predicted=self._prediction, **feedback)
        self.redraw()
        self.keep()

    def _press(self, content: dict[str, Any]) -> None:
        match content:
            case {"check": given}:
                self.check(given)
            case {"press": "hint"}:
                self.show_hint()
            case {"press": "solution"}:
                self.show_solution()
            case {"press": "again"}:
                self.reset()
        self.form.send({"answered": True})

    def __repr__(self) -> str:
        words = self.form.question or self._hint or (self._because if isinstance(self._because, str) else "")
        return f"Exercise({words!r})"


def unanswerable() -> list[str]:
    """Return a line with the error for each exercise in this kernel whose answer or reason cannot be computed."""
    found = []
    for exercise in list(_ASKED):
        try:
            answer = exercise._compute()
            exercise._reason(answer)
        except Exception as error:  # of a notebook's cells: anything can be in them
            found.append(f"{exercise!r}: {type(error).__name__}: {error}")
    return sorted(found)


def _problem(error: Exception) -> str:
    if isinstance(error, WorkbenchError):
        return str(error)
    return f"The answer could not be computed ({type(error).__name__}: {error}). Run the cells above first."
