"""The picture of speculation: drafted tokens in place in the text, figures, and acceptance by position."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from workbench import svg
from workbench.widgets.speculation.data import DraftVerification, PlacedToken, SpeculationSpeed

TOKEN_MARKS = {  # what stands before the token, and what it means
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
    ".wb-pic .now{font-weight:700;background:var(--jp-layout-color2,#eee)}.wb-pic td,.wb-pic th{padding:1px 14px 1px 0;"
    "text-align:left;font:inherit}.wb-pic td{font-weight:700;font-variant-numeric:tabular-nums}"
)
WIDTH, HEIGHT = 760, 186
MIN_WIDTH_OF_TWO = 720  # pixels for both charts side by side


def draw_text(pieces: Sequence[PlacedToken], shown: int, token_text: Callable[[int], str]) -> str:
    """The text as it stood when the check after number `shown` began; the pieces of that one are marked."""
    parts = []
    for piece in pieces:
        if piece.verification > shown:
            break
        text = "?" if piece.token is None else token_text(piece.token)
        mark, meaning = TOKEN_MARKS[piece.kind]
        kind = None if piece.kind == "plain" else f"{piece.kind} now" if piece.verification == shown else piece.kind
        tip = (
            f"check {piece.verification}"
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
        f'<span class="{kind}">{mark}token</span> {meaning}'
        for kind, (mark, meaning) in TOKEN_MARKS.items()
        if kind != "plain"
    )
    return f'<p class="spelled">{" &nbsp; ".join(keys)}</p><div class="spelled">{"".join(parts)}</div>'


def describe_verification(number: int, last: int, check: DraftVerification, spell: Callable[[int], str]) -> str:
    """One check as a sentence."""
    count = len(check.token_ids)
    known = [spell(each) for each in check.token_ids if each is not None]
    drafted = f"{count} drafted" + (f", <code>{escape(' '.join(known))}</code>" if known else "")
    token_text = f"Verification {number} of {last}, step {check.step}: {drafted}; {check.accepted} accepted"
    after = check.emitted[check.accepted :]
    how = "besides" if check.accepted == count else "instead"
    return f"<p>{token_text}{f', then <code>{escape(spell(after[0]))}</code> {how}' if after else ''}.</p>"


def draw_table(figures: Mapping[str, Any], speeds: SpeculationSpeed | None, same: str, speed_reason: str) -> str:
    """The figures of the run; `why` there are no `speeds`, `same` what the plain run says of the tokens."""
    length, rate = figures["mean_acceptance_length"], figures["draft_acceptance_rate"]
    rows = [
        ("verifications", f"{figures['verifications']:,}"),
        ("drafted, accepted", f"{figures['drafted_tokens']:,}, {figures['accepted_tokens']:,}"),
        ("acceptance rate", "" if rate is None else f"{rate:.1%}"),
        ("mean acceptance length", "" if length is None else f"{length:.2f} tokens a check"),
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
    """Draw acceptance by position, with what one chance for all would give, and verifications by tokens accepted."""
    chance, counts = figures["chance"] or 0.0, figures["acceptance_histogram"]
    total = max(1, sum(counts))
    left = [
        (str(n), share, chance**n, f"draft {n} accepted in {share:.1%} of verifications; alike: {chance**n:.1%}")
        for n, share in enumerate(figures["acceptance_by_position"], 1)
    ]
    right = [(str(n), count / total, None, f"{n} accepted in {count} of {total}") for n, count in enumerate(counts)]
    beside = width >= MIN_WIDTH_OF_TWO
    wide = (width - 120) / 2 if beside else width - 60
    below = 0 if beside else HEIGHT - 16
    parts = _bars(left, 40, wide, "acceptance by position in the draft", "c0", "draft")
    other = _bars(right, 40, wide, "share of verifications in which so many are accepted", "c4", "accepted")
    parts.append(svg.group(*other, transform=f"translate({wide + 60 if beside else 0:g},{below})"))
    legend = f"were each accepted alike, with chance {chance:.0%}"
    parts += [svg.diamond(50, below + HEIGHT - 8, class_="l1"), svg.text(60, below + HEIGHT - 4, legend)]
    return svg.document(
        width, below + HEIGHT, *parts, title="acceptance by position in the draft; verifications by tokens accepted"
    )


def _bars(
    rows: Sequence[tuple[str, float, float | None, str]], x: float, across: float, title: str, kind: str, key: str
) -> list[str]:
    """Bars of (name, share, what was expected, tip), with their shares in figures where there is room."""
    top, bottom, wide = 40, HEIGHT - 36, across / max(1, len(rows))
    parts, figures = [svg.text(x, 12, title)], []
    for share in (0.0, 0.5, 1.0):
        y = bottom - share * (bottom - top)
        parts += [
            svg.line(x, y, x + across, y, class_="grid"),
            svg.text(x - 4, y + 4, f"{share:.0%}", text_anchor="end"),
        ]
    for number, (name, share, guess, tip) in enumerate(rows):
        at, thick = x + wide * (number + 0.15), 0.7 * wide
        tall = share * (bottom - top)
        live = {"tip": tip, "key": f"{key}:{name}", "tabindex": 0 if key == "draft" and not number else -1}
        parts.append(svg.rect(at, bottom - tall, thick, tall, class_=kind, **live))
        if wide >= 24:
            above = min(bottom - tall, bottom if guess is None else bottom - guess * (bottom - top) - 5) - 3
            figures.append(
                svg.text(at + thick / 2, max(above, 24), f"{share:.0%}", text_anchor="middle", class_="figure")
            )
        if len(rows) <= 24 or number % 8 == 0:
            parts.append(svg.text(at + thick / 2, bottom + 13, name, text_anchor="middle"))
        if guess is not None:
            y = bottom - guess * (bottom - top)
            parts.append(svg.diamond(at + thick / 2, y, class_="l1", stroke_width=2))
    return [*parts, *figures]
