"""Draw an exercise, its question and feedback, for a saved or printed notebook."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from workbench import svg

RIGHT, WRONG = ("✓", "Right", "#007a59"), ("✗", "Not yet", "#c04a00")


@dataclass(frozen=True)
class Feedback:
    """The feedback that an exercise shows at present; empty texts are not shown."""

    tries: tuple[tuple[str, bool], ...] = ()  # each answer and whether it was right
    problem: str = ""  # why the last answer does not count as a try
    hint: str = ""
    solution: str = ""
    because: str = ""
    predicted: bool = False  # the one try was a prediction

    @property
    def right(self) -> bool:
        return bool(self.tries) and self.tries[-1][1]


def draw_feedback(feedback: Feedback) -> str:
    """Return the lines below the question, as HTML: verdict, hint, solution and reason."""
    lines = []
    if feedback.problem:
        lines.append(_line("problem", escape(feedback.problem)))
    elif feedback.tries:
        given, right = feedback.tries[-1]
        sign, word, colour = RIGHT if right else WRONG
        if feedback.predicted and not right:
            word = "Not what came out"
        count = f", try {len(feedback.tries)}" if len(feedback.tries) > 1 else ""
        lines.append(_line("verdict", f'<b style="color:{colour}">{sign} {word}{count}</b>: {escape(given)}'))
    if feedback.hint and not feedback.right:
        lines.append(_line("hint", f"<b>Hint.</b> {escape(feedback.hint)}"))
    if feedback.solution:
        name = "Computed" if feedback.right or feedback.predicted else "Solution"
        lines.append(_line("solution", f"<b>{name}:</b> {escape(feedback.solution)}"))
    if feedback.because:
        lines.append(_line("because", escape(feedback.because)))
    return "".join(lines)


def draw_exercise(question: str, choices: Sequence[str], unit: str, feedback: Feedback) -> str:
    """Return the whole exercise as HTML: question, choices and feedback."""
    parts = [f'<p style="white-space:pre-wrap"><b>{escape(question)}</b></p>'] if question else []
    given = feedback.tries[-1][0] if feedback.tries else None
    if choices:
        marks = (f"<li>{'◉' if choice == given else '○'} {escape(choice)}</li>" for choice in choices)
        parts.append(f'<ul style="list-style:none;padding-left:0">{"".join(marks)}</ul>')
    elif given is None:
        parts.append(f"<p>A number{f' in {escape(unit)}' if unit else ''}: not answered yet.</p>")
    return svg.html(*parts, draw_feedback(feedback))


def _line(kind: str, content: str) -> str:
    return f'<p class="wb-exercise-{kind}">{content}</p>'
