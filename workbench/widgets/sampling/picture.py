"""Draw the next token's distribution: the probability mass that each filter keeps, and the likely tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from workbench import svg
from workbench.units import format_percent
from workbench.widgets.flow import flow

WIDTH, ROW, LEFT = 760, 19, 190
FIGURES = (180, 88, 10)  # distances of the three columns' right ends from the right edge, in pixels
BAR_MARGIN = 80  # between the bars and the end of the first column
MONO = "font-family:var(--jp-code-font-family,monospace)"
STYLE = (
    f".wb-pic .mono,.wb-pic .strip{{{MONO}}}"
    ".wb-pic .gone{fill:url(#wb-fell);stroke:currentColor;stroke-opacity:.5}"
    ".wb-pic .was{fill:none;stroke:currentColor;stroke-opacity:.75}"
    ".wb-pic .num{text-anchor:end;font-variant-numeric:tabular-nums}.wb-pic .head{font-weight:600}"
    ".wb-pic .strip{line-height:1.9;max-width:760px;overflow-wrap:anywhere}"
    ".wb-pic .strip span{padding:1px;border-bottom:1px solid transparent;cursor:pointer}"
    ".wb-pic .strip .out{border-bottom-color:currentColor}.wb-pic .strip .later{opacity:.62}"
    ".wb-pic .strip .next{outline:2px solid currentColor;font-weight:700}"
)
HATCH = (
    '<defs><pattern id="wb-fell" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<line x1="0" y1="0" x2="0" y2="5" stroke="#d55e00" stroke-width="2"/></pattern></defs>'
)


@dataclass(frozen=True)
class FilterFigures:
    """The effect of one filter: probability mass `before` it and `kept` by it, number of tokens `left`, and entropy in
    bits after it."""

    name: str
    before: float
    kept: float
    left: int
    bits: float


@dataclass(frozen=True)
class CandidateToken:
    """One token, or several combined: its probability `before` and `after` the filters, the number of the filter that
    removed it (`fell`, 0: none), the number of times that it was `drawn`, and its probability after each filter
    (`shares`)."""

    name: str
    before: float
    after: float
    fell: int = 0
    drawn: int = 0
    shares: tuple[float, ...] = ()
    token: int = -1
    chosen: bool = False
    picked: bool = False


@dataclass(frozen=True)
class ContextToken:
    """A token of the text; `position` counts from the beginning of the text."""

    position: int
    text: str
    output: bool = False


def draw_context(words: Sequence[ContextToken], position: int, before: int, after: int) -> str:
    """Draw the text around `position`, with the token there marked; a click on a token goes to its position.

    `before` and `after` are the numbers of omitted tokens."""
    parts = [f'<span class="faint">… {before} before</span> '] if before else []
    for word in words:
        kind = "next" if word.position == position else "later" if word.position > position else ""
        caption = " ".join(filter(None, (kind, "out" if word.output else "")))
        tip = f"position {word.position}, {'output' if word.output else 'prompt'}: show this position's distribution"
        parts.append(
            svg.tag(
                "span", escape(word.text), class_=caption or None, data_tip=tip,
                data_key=f"t{word.position}" if word.position else None,
                tabindex=(0 if word.position == position else -1) if word.position else None,
            )
        )  # fmt: skip
        parts.append("<br>" if word.text.endswith("⏎") else "")
    if words and position > words[-1].position and not after:
        parts.append(svg.tag("span", "what comes next", class_="next"))
    parts.append(f' <span class="faint">{after} more …</span>' if after else "")
    return f'<div class="strip">{"".join(parts)}</div>'


def draw_distribution(
    sieves: Sequence[FilterFigures],
    candidates: Sequence[CandidateToken],
    draws: int,
    first_bits: tuple[int, float],
    title: str,
    width: float = WIDTH,
) -> str:
    """Draw filters above and tokens below. `first_bits` is (number of tokens, entropy in bits) before any filter."""
    top = 16 + ROW * (len(sieves) + 1)
    height = top + 44 + ROW * len(candidates) + 26
    parts = [svg.tag("style", STYLE), HATCH, *_filters(sieves, first_bits, width)]
    parts += _tokens(candidates, draws, top + 26, width)
    legend, high = _legend(height - 8, draws, width)
    return svg.document(width, height + high, *parts, *legend, title=title)


def _filters(sieves: Sequence[FilterFigures], first: tuple[int, float], width: float) -> list[str]:
    fell, left, bits = (width - each for each in FIGURES)
    bar = fell - BAR_MARGIN - LEFT
    heads = ((4, "filter, in order", ""), (LEFT, "probability kept", ""), (fell, "fell here", "num"))
    heads = (*heads, (left, "tokens left", "num"), (bits, "bits", "num"))
    parts = [svg.text(x, 12, caption, class_=f"head {kind}".strip()) for x, caption, kind in heads]
    for number, each in enumerate((FilterFigures("the model", 1, 1, *first), *sieves)):
        y = 16 + ROW * number
        name = f"{number}  {each.name}" if number else each.name
        gone = each.before - each.kept
        tip = f"{name}: {format_percent(each.kept)} of all probability kept, {format_percent(gone)} falls here; "
        tip += f"{each.left:,} tokens left, {each.bits:.2f} bits"
        short = each.name.rpartition(":")[2]  # a custom filter's path would overlap the bar
        inner = [
            svg.text(4, y + 14, f"{number}  {short}" if number else short),
            svg.rect(LEFT, y + 4, bar, 11, class_="was", stroke_dasharray="2 3"),
            svg.rect(LEFT, y + 4, bar * each.kept, 11, class_="c0"),
        ]
        if gone > 0:
            inner.append(svg.rect(LEFT + bar * each.kept, y + 4, bar * gone, 11, class_="gone"))
        figures = ((fell, format_percent(gone) if number else ""), (left, f"{each.left:,}"), (bits, f"{each.bits:.2f}"))
        inner += [svg.text(x, y + 14, caption, class_="num") for x, caption in figures if caption]
        parts.append(svg.group(*inner, tip=tip))
    return parts


def _tokens(candidates: Sequence[CandidateToken], draws: int, top: float, width: float) -> list[str]:
    first, second, third = (width - each for each in FIGURES)
    heads = [(LEFT - 8, "next token", "num"), (first, "model", "num"), (second, "after", "num")]
    heads += [(third, "drawn", "num")] if draws else []
    parts = [svg.text(x, top + 8, caption, class_=f"head {kind}") for x, caption, kind in heads]
    most = max([1e-12, *(max(each.before, each.after) for each in candidates)])
    for number, each in enumerate(candidates):
        y, scale = top + 14 + ROW * number, (first - BAR_MARGIN - LEFT) / most
        inner = [svg.text(LEFT - 8, y + 14, ("▶ " if each.chosen else "") + each.name, class_="num mono")]
        inner.append(svg.rect(LEFT, y + 3, scale * each.before, 13, class_="gone" if each.fell else "was"))
        if each.after > 0:
            inner.append(svg.rect(LEFT, y + 6, scale * each.after, 7, class_="c0"))
        if draws and each.drawn:
            x, middle = LEFT + scale * each.drawn / draws, y + 9.5
            inner.append(svg.diamond(x, middle, 4, class_="c1 l1"))
        after = f"✕ at {each.fell}" if each.fell else format_percent(each.after)
        inner += [
            svg.text(first, y + 14, format_percent(each.before), class_="num"),
            svg.text(second, y + 14, after, class_="num"),
        ]
        if draws:
            inner.append(svg.text(third, y + 14, f"{each.drawn:,}", class_="num"))
        if each.picked:
            inner.append(svg.rect(0, y + 1, width, ROW - 1, class_="line", stroke_dasharray="4 2"))
        key = {"key": f"c{each.token}", "tabindex": -1 if number else 0} if each.token >= 0 else {}
        parts.append(svg.group(svg.rect(0, y, width, ROW, fill="transparent"), *inner, tip=_tip(each, draws), **key))
    return parts


def _legend(y: float, draws: int, width: float) -> tuple[list[str], float]:
    """Draw the marks with their captions; return markup and the height of the rows below the first."""
    marks = [("was", 11, 12, "model"), ("c0", 8, 7, "after the filters"), ("gone", 11, 12, "fell, at which filter")]
    words = [*(caption for *_, caption in marks), *(["drawn"] if draws else []), "▶ in the text"]
    places = [(x, y + ROW * row) for x, row in flow([44 + 6.4 * len(each) for each in words], 8, width)]
    parts = []
    for (kind, up, high, _), (x, at) in zip(marks, places, strict=False):
        parts.append(svg.rect(x, at - up, 18, high, class_=kind))
    if draws:
        parts.append(svg.diamond(places[3][0] + 9, places[3][1] - 5, 4, class_="c1 l1"))
    parts += [svg.text(x + 24, at, each) for each, (x, at) in zip(words, places, strict=True)]
    return parts, places[-1][1] - y


def _tip(each: CandidateToken, draws: int) -> str:
    caption = [f"{each.name}, id {each.token}" if each.token >= 0 else each.name]
    caption += [f"model {format_percent(each.before)}"]
    caption += [f"after filter {number} {format_percent(share)}" for number, share in enumerate(each.shares, 1)]
    caption += [f"fell at filter {each.fell}"] if each.fell else []
    caption += [f"drawn {each.drawn:,} times, {each.after * draws:,.1f} expected"] if draws else []
    return "; ".join(caption)
