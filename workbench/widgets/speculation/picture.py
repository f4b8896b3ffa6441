"""Draw speculation: drafted tokens within the text, figures, and acceptance by position."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from workbench import svg
from workbench.figures.bars import Column, columns
from workbench.figures.figure import beside
from workbench.svg import Axis
from workbench.units import format_percent
from workbench.widgets.speculation.data import DraftVerification, PlacedToken, SpeculationSpeed

TOKEN_MARKS = {  # by kind: the sign before a token, and its meaning
    "plain": ("", "not drafted"),
    "accepted": ("✓", "drafted, accepted"),
    "rejected": ("✗", "drafted, rejected"),
    "untried": ("", "drafted after a rejected one"),
    "unused": ("∎", "drafted, after the end"),
    "corrected": ("→", "sampled instead"),
    "bonus": ("+", "sampled after all were accepted"),
}
OUTPUT_KINDS = ("plain", "accepted", "corrected", "bonus")
STYLE = (
    ".wb-pic .spelled{line-height:2;margin:8px 0;max-width:760px;overflow-wrap:anywhere}.wb-pic .spelled,.wb-pic code{"
    "font-family:var(--jp-code-font-family,monospace)}.wb-pic .spelled span{padding:1px 2px;margin-right:1px}"
    ".wb-pic .accepted{border-bottom:3px solid #009e73}.wb-pic .rejected{text-decoration:line-through;"
    "border-top:2px dotted #d55e00}.wb-pic .untried,.wb-pic .unused{text-decoration:line-through;opacity:.62}"
    ".wb-pic .corrected{outline:1px solid currentColor}.wb-pic .bonus{outline:1px dashed currentColor}"
    ".wb-pic .spelled .key{white-space:nowrap}.wb-pic .now{font-weight:700;background:var(--jp-layout-color2,#eee)}"
    ".wb-pic td,.wb-pic th{padding:1px 14px 1px 0;text-align:left;font:inherit}"
    ".wb-pic td{font-weight:700;font-variant-numeric:tabular-nums}"
)
WIDTH, HEIGHT = 760, 186
MIN_WIDTH_OF_TWO = 720  # pixels for both charts side by side


def draw_text(pieces: Sequence[PlacedToken], shown: int, token_text: Callable[[int], str]) -> str:
    """Draw the text after verification number `shown`, with the tokens of that verification marked."""
    parts = []
    for piece in pieces:
        if piece.verification > shown:
            break
        text = "?" if piece.token is None else token_text(piece.token)
        mark, meaning = TOKEN_MARKS[piece.kind]
        kind = None if piece.kind == "plain" else f"{piece.kind} now" if piece.verification == shown else piece.kind
        tip = (
            f"verification {piece.verification}"
            + (f", draft {piece.draft_position}" if piece.draft_position else "")
            + f": {meaning}"
        )
        live = {
            "data_tip": tip,
            "data_key": f"k{piece.verification}",
            "tabindex": 0 if piece.verification == shown else -1,
        }
        parts.append(svg.tag("span", escape(mark + text), class_=kind, **(live if piece.verification else {})))
        parts.append("<br>" if text.endswith("⏎") and piece.kind in OUTPUT_KINDS else "")
    keys = (
        f'<span class="key"><span class="{kind}">{mark}token</span> {meaning}</span>'
        for kind, (mark, meaning) in TOKEN_MARKS.items()
        if kind != "plain"
    )
    return f'<p class="spelled">{" &nbsp; ".join(keys)}</p><div class="spelled">{"".join(parts)}</div>'


def describe_verification(number: int, last: int, check: DraftVerification, spell: Callable[[int], str]) -> str:
    """Describe one verification in a sentence of HTML."""
    count = len(check.token_ids)
    known = [spell(each) for each in check.token_ids if each is not None]
    drafted = f"{count} drafted" + (f", <code>{escape(' '.join(known))}</code>" if known else "")
    token_text = f"Verification {number} of {last}, step {check.step}: {drafted}; {check.accepted} accepted"
    after = check.emitted[check.accepted :]
    how = "besides" if check.accepted == count else "instead"
    return f"<p>{token_text}{f', then <code>{escape(spell(after[0]))}</code> {how}' if after else ''}.</p>"


def draw_table(figures: Mapping[str, Any], speeds: SpeculationSpeed | None, same: str, speed_reason: str) -> str:
    """Draw the figures of a run as a table.

    Args:
        figures: as `speculation_figures` returns them.
        speeds: the speed-up, or None if unknown.
        same: comparison of the tokens with the plain run's, or "".
        speed_reason: why `speeds` is None.
    """
    length, rate = figures["mean_acceptance_length"], figures["draft_acceptance_rate"]
    rows = [
        ("verifications", f"{figures['verifications']:,}"),
        ("drafted, accepted", f"{figures['drafted_tokens']:,}, {figures['accepted_tokens']:,}"),
        ("acceptance rate", "" if rate is None else format_percent(rate)),
        ("mean acceptance length", "" if length is None else f"{length:.2f} tokens a verification"),
    ]
    if speeds is None:
        rows += [("speed-up", f"not known: {speed_reason}")]
    else:
        rows += [
            ("predicted speed-up", "" if speeds.predicted is None else f"{speeds.predicted:.2f} times"),
            (
                "measured speed-up",
                f"{speeds.measured:.2f} times" + (", against its own plain steps" if speeds.own else ""),
            ),
            ("a step takes", f"{speeds.cost:.2f} plain steps"),
            ("tokens a second", f"{speeds.tokens_per_s:,.0f}; plain {speeds.plain_tokens_per_s:,.0f}"),
        ]
    rows += [("tokens", same)] if same else []
    cells = [f"<th>{name}</th><td>{escape(value)}</td>" for name, value in rows]
    lines = ("".join(cells[at : at + 2]) for at in range(0, len(cells), 2))
    return f"<table>{''.join(f'<tr>{each}</tr>' for each in lines)}</table>"


def draw_charts(figures: Mapping[str, Any], width: float = WIDTH) -> str:
    """Draw acceptance by position, with its value under one constant chance, and verifications by accepted tokens."""
    chance, counts = figures["chance"] or 0.0, figures["acceptance_histogram"]
    total = max(1, sum(counts))
    left = [
        Column(
            str(n),
            share,
            mark=chance**n,
            tip=f"draft {n} accepted in {format_percent(share)} of verifications; "
            f"with one chance for all {format_percent(chance**n)}",
        )
        for n, share in enumerate(figures["acceptance_by_position"], 1)
    ]
    right = [Column(str(n), count / total, tip=f"{n} accepted in {count} of {total}") for n, count in enumerate(counts)]
    two = width >= MIN_WIDTH_OF_TWO
    size = {"width": (width - 160) / 2 if two else width - 80, "height": HEIGHT - 76}
    words = f"acceptance by position (◇: a constant {format_percent(chance)})"
    shown = [
        columns(left, "position in the draft", Axis("", percent=True), words, **size),
        columns(right, "accepted tokens", Axis("", percent=True), "verifications by accepted tokens", **size),
    ]
    return beside(shown, columns=2 if two else 1).svg(in_page=True)
