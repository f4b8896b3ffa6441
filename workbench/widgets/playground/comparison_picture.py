"""Draw the first difference between two generations, and a table of their times and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from workbench import svg
from workbench.machine.processor import is_contended
from workbench.units import format_percent, format_seconds
from workbench.widgets.playground.data import SIDES, PlayedRequest
from workbench.widgets.playground.difference import TextDifference, TokenChoice, middle_half, spread
from workbench.widgets.playground.picture import figure_rows

CONTEXT_TOKENS = 12  # tokens before the first difference, repeated next to it
DRIFT_WIDTH, DRIFT_HEIGHT, PAD = 250, 70, 34
STYLE = (
    ".wb-pic .wb-sides{display:grid;grid-template-columns:minmax(0,9fr) minmax(0,11fr);gap:0 16px;height:268px;"
    "overflow:auto;align-content:start;margin:6px 0}"
    ".wb-pic .wb-sides table{border-collapse:collapse;width:100%}"
    ".wb-pic .wb-sides td,.wb-pic .wb-sides th{text-align:right;padding:1px 0 1px 8px;font-size:12px;"
    "font-variant-numeric:tabular-nums;font-weight:400;white-space:nowrap}"
    ".wb-pic .wb-sides th:first-child{text-align:left;padding-left:0}.wb-pic .wb-sides thead th{opacity:.75}"
    ".wb-pic .wb-sides h4{margin:0 0 4px;font-size:13px;font-weight:600}"
    ".wb-pic .wb-sides p{margin:2px 0;font-size:12px}"
    ".wb-pic .wb-sides code{font-family:var(--jp-code-font-family,monospace);background:none;color:inherit;"
    "white-space:pre-wrap;overflow-wrap:anywhere}"
    ".wb-pic .wb-sides code.at{outline:2px solid #cc79a7;padding:0 2px;font-weight:700}"
    ".wb-pic .wb-sides .note{margin-top:6px;opacity:.85;max-width:60em}"
    "@media print{.wb-pic .wb-sides{height:auto}}"
)


def draw_comparison(
    sides: Sequence[PlayedRequest], difference: TextDifference, first: int, others: float | None, done: bool
) -> str:
    """Draw the first difference of the texts on the left, and a table of times and bytes on the right."""
    left = svg.tag("div", _difference(sides, difference, done), _drift(difference))
    right = svg.tag("div", _table(sides), _noise(sides, first, others, done))
    return svg.tag("style", STYLE) + svg.tag("div", left, right, class_="wb-sides", data_scroll="sides")


def _difference(sides: Sequence[PlayedRequest], difference: TextDifference, done: bool) -> str:
    if not any(side.num_tokens for side in sides):
        return svg.tag("h4", "first difference") + svg.tag("p", "Play both sides: nothing has been compared yet.")
    if difference.position is None:
        so_far = "" if done else " so far"
        words = f"no difference in {difference.compared} tokens{so_far}"
        waiting = "" if difference.compared else svg.tag("p", "One side has no token yet.")
        return svg.tag("h4", words, role="status") + waiting
    assert difference.choices is not None
    tokens = sides[0].tokens_by_sample.get(0, [])
    before = "".join(token.text for token in tokens[max(0, difference.position - CONTEXT_TOKENS) : difference.position])
    head = f"first difference: token {difference.position + 1}, after {difference.position} that are equal"
    rows = [_choice(name, choice) for name, choice in zip(SIDES, difference.choices, strict=True)]
    heads = ("", "token", "P(own)", "P(other)")
    tip = "probabilities of both tokens by each side's model, before temperature and filters"
    table = svg.tag(
        "table", svg.tag("thead", svg.tag("tr", *(svg.tag("th", each or " ") for each in heads))),
        svg.tag("tbody", *rows), data_tip=tip,
    )  # fmt: skip
    context = svg.tag("p", "after ", svg.tag("code", escape(repr(before[-60:])))) if before else ""
    return svg.tag("h4", head, role="status") + context + table


def _choice(name: str, choice: TokenChoice) -> str:
    token = "the text ended" if choice.token is None else choice.token
    own, other = format_percent(choice.own), format_percent(choice.other)
    if choice.bound is not None:
        other = f"≤ {format_percent(choice.bound)}"
    shown = svg.tag("td", svg.tag("code", escape(token), class_="at"))
    return svg.tag("tr", svg.tag("th", name), shown, svg.tag("td", own), svg.tag("td", other))


def _drift(difference: TextDifference) -> str:
    """Draw the difference of both models' log-probabilities, in nats, for each token before the texts diverge."""
    mean, most = difference.mean_drift, difference.max_drift
    if mean is None or most is None:
        return ""
    if not most:
        return svg.tag("p", "Until there both models gave the same tokens equal log-probabilities.")
    top, words = most, f"log-probability, right less left: mean |d| {mean:.2g}, at most {most:.2g} nats a token"
    middle, high = DRIFT_HEIGHT / 2, DRIFT_HEIGHT / 2 - 8
    step = (DRIFT_WIDTH - PAD - 4) / max(1, len(difference.drift) - 1)
    points = [(PAD + n * step, middle - high * each / top) for n, each in enumerate(difference.drift)]
    parts = [
        svg.line(PAD, middle, DRIFT_WIDTH - 4, middle, class_="grid"),
        svg.text(0, middle - high + 4, f"{top:.1g}", font_size=10), svg.text(0, middle + 4, "0", font_size=10),
        svg.text(0, middle + high + 4, f"-{top:.1g}", font_size=10),
        svg.path(points, class_="l3", stroke_width=1.5) if len(points) > 1
        else svg.circle(points[0][0], points[0][1], 3, class_="c3"),
    ]  # fmt: skip
    picture = svg.document(DRIFT_WIDTH, DRIFT_HEIGHT, *parts, title=words)
    return svg.tag("p", words) + picture


def _table(sides: Sequence[PlayedRequest]) -> str:
    halves = ["–" if half is None else " to ".join(map(format_seconds, half)) for half in map(middle_half, sides)]
    rows = figure_rows(sides)
    rows.insert(2, ("middle half", halves, "", "quartiles of the times between two tokens"))
    body = (
        svg.tag(
            "tr", svg.tag("th", name), *(svg.tag("td", escape(cell) or " ") for cell in (*cells, ratio)), data_tip=tip
        )
        for name, cells, ratio, tip in rows
    )
    head = svg.tag("tr", *(svg.tag("th", name) for name in (" ", *SIDES, "right / left")))
    return svg.tag("table", svg.tag("thead", head), svg.tag("tbody", *body))


def _noise(sides: Sequence[PlayedRequest], first: int, others: float | None, done: bool) -> str:
    """Describe how the times were measured, and their noise."""
    if not done:
        return ""
    words = [
        f"One run of each, one after the other, {SIDES[first]} first, each after a warm-up and an empty prefix cache."
    ]
    spreads = [spread(side) for side in sides]
    if all(each is not None for each in spreads):
        words.append("A token's time varies by " + ", ".join(
            f"± {format_percent(each)} ({name})" for name, each in zip(SIDES, spreads, strict=True)) + ".")  # fmt: skip
    words.append("The experiment below repeats it and gives the ratio an interval.")
    if others is not None:
        words.append(f"Other processes took {format_percent(others)} of the processor" + (
            ": do not trust these times." if is_contended(others) else "."))  # fmt: skip
    return svg.tag("p", escape(" ".join(words)), class_="note")
