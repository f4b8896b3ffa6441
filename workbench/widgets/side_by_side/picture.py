"""Draw two generations: both texts, where they part, and a table of what each took."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from workbench import svg
from workbench.machine.processor import is_contended
from workbench.svg import format_percent, format_seconds
from workbench.widgets.playground.data import PlayedRequest
from workbench.widgets.playground.picture import FINISH_REASONS, TEXT_STYLE, format_bytes
from workbench.widgets.side_by_side.data import SIDES, TextDifference, TokenChoice, middle_half, spread
from workbench.widgets.tokens.text import draw_generated_text, draw_probability_legend

MARK = "the first token that differs"
REASONS = "; ".join(f"{reason}: {words}" for reason, words in FINISH_REASONS.items())
CONTEXT_TOKENS = 12  # before the first difference, that are shown again beside it
DRIFT_WIDTH, DRIFT_HEIGHT, PAD = 250, 70, 34
STYLE = (
    ".wb-pic .wb-sides{display:grid;grid-template-columns:minmax(0,9fr) minmax(0,11fr);gap:0 16px;height:236px;"
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
BOTH_STYLE = (
    ".wb-pic .wb-both{display:grid;grid-template-columns:minmax(0,1fr) minmax(0,1fr);gap:12px}"
    ".wb-pic .wb-both h4{margin:0;font-size:13px}"
)


def draw_side_text(name: str, played: PlayedRequest, prompt: str, difference: TextDifference) -> str:
    """Draw the text of one side, with its first token that differs marked; it scrolls in a place of fixed height."""
    tokens = dict(played.tokens_by_sample)  # which another thread may be adding to
    marks = {} if difference.position is None else {(0, difference.position): MARK}
    text = draw_generated_text(prompt, tokens, dict(played.trailing_text), dict(played.finish_reasons), marks)
    place = svg.tag(
        "div", text, class_="wb-text-place", data_scroll="", role="region", aria_label=f"text on the {name}"
    )
    return svg.tag("style", TEXT_STYLE) + place


def draw_both_texts(sides: Sequence[PlayedRequest], prompt: str, difference: TextDifference) -> str:
    """Draw both texts beside each other, as a saved notebook has them."""
    parts = (
        svg.tag("div", svg.tag("h4", name), draw_side_text(name, played, prompt, difference))
        for name, played in zip(SIDES, sides, strict=True)
    )
    return svg.tag("style", BOTH_STYLE) + svg.tag("div", *parts, class_="wb-both") + draw_probability_legend()


def draw_comparison(
    sides: tuple[PlayedRequest, PlayedRequest], difference: TextDifference, first: int, others: float | None, done: bool
) -> str:
    """Draw where the texts part on the left, and a table of times and bytes on the right."""
    left = svg.tag("div", _difference(sides, difference, done), _drift(difference))
    right = svg.tag("div", _table(sides), _noise(sides, first, others, done))
    return svg.tag("style", STYLE) + svg.tag("div", left, right, class_="wb-sides", data_scroll="sides")


def _difference(sides: tuple[PlayedRequest, PlayedRequest], difference: TextDifference, done: bool) -> str:
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
    own = "–" if choice.own is None else format_percent(choice.own)
    other = "–" if choice.other is None else format_percent(choice.other)
    if choice.bound is not None:
        other = f"≤ {format_percent(choice.bound)}"
    shown = svg.tag("td", svg.tag("code", escape(token), class_="at"))
    return svg.tag("tr", svg.tag("th", name), shown, svg.tag("td", own), svg.tag("td", other))


def _drift(difference: TextDifference) -> str:
    """Draw how far apart the log-probabilities of the equal tokens were: whether the models drifted before."""
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


def _table(sides: tuple[PlayedRequest, PlayedRequest]) -> str:
    rows = [
        _row("first token", [side.ttft for side in sides], format_seconds, "TTFT, from the request's arrival"),
        _row("per token", [side.tpot for side in sides], _milliseconds, "TPOT, after the first token, on average"),
        _text_row("middle half, ms", [_half(side) for side in sides], "quartiles of the times between two tokens"),
        _row("KV per token", [side.kv_bytes_per_token for side in sides], _bytes,
             "KV cache: bytes of the pages in use in the last step, over the tokens in them"),
        _row("output tokens", [float(side.num_tokens) or None for side in sides], "{:.0f}".format, "of all samples"),
        _row("steps", [float(side.steps) or None for side in sides], "{:.0f}".format, "forward passes of the runner"),
        _text_row("finished", [_finish(side) for side in sides], REASONS),
    ]  # fmt: skip
    if any(side.drafted for side in sides):
        accepted = [f"{side.accepted} of {side.drafted}" if side.drafted else "–" for side in sides]
        rows.append(_text_row("drafts accepted", accepted, "tokens that speculation proposed"))
    head = svg.tag("tr", *(svg.tag("th", name) for name in (" ", *SIDES, "right / left")))
    return svg.tag("table", svg.tag("thead", head), svg.tag("tbody", *rows))


def _row(name: str, values: Sequence[float | None], form: Callable[[float], str], tip: str) -> str:
    left, right = values
    ratio = f"× {right / left:.2f}" if left and right is not None else "–"
    cells = ["–" if value is None else form(value) for value in values]
    return _cells(name, [*cells, ratio], tip)


def _text_row(name: str, values: Sequence[str], tip: str) -> str:
    return _cells(name, [*values, ""], tip)


def _cells(name: str, cells: Sequence[str], tip: str) -> str:
    return svg.tag("tr", svg.tag("th", name), *(svg.tag("td", escape(cell) or " ") for cell in cells), data_tip=tip)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _bytes(count: float) -> str:
    return format_bytes(round(count))


def _half(side: PlayedRequest) -> str:
    half = middle_half(side)
    return "–" if half is None else f"{half[0] * 1e3:.3g}–{half[1] * 1e3:.3g}"


def _finish(side: PlayedRequest) -> str:
    return side.finish_reasons.get(0, "–")


def _noise(sides: tuple[PlayedRequest, PlayedRequest], first: int, others: float | None, done: bool) -> str:
    """Say how the times were measured and how much of them is noise."""
    if not done:
        return ""
    words = [
        f"One run of each, one after the other, {SIDES[first]} first, each after a warm-up and an empty prefix cache."
    ]
    spreads = [spread(side) for side in sides]
    if all(each is not None for each in spreads):
        words.append("A token's time varies by " + ", ".join(
            f"± {each:.0%} ({name})" for name, each in zip(SIDES, spreads, strict=True)) + ".")  # fmt: skip
    words.append("The experiment below repeats it and gives the ratio an interval.")
    if others is not None:
        words.append(f"Other processes took {others:.0%} of the processor" + (
            ": do not trust these times." if is_contended(others) else "."))  # fmt: skip
    return svg.tag("p", escape(" ".join(words)), class_="note")
