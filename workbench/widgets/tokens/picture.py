"""Draw a text as tokens: ids and texts, or bytes for tokens that are not whole characters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

from workbench import svg
from workbench.units import UNKNOWN
from workbench.widgets.table import draw_table

MAX_TOKENS = 2000  # most tokens that are drawn
STYLE = (
    ".wb-sides{display:flex;flex-wrap:wrap;gap:4px 20px}.wb-sides>div{flex:1 1 22em;min-width:0}"
    ".wb-pic pre.wb-side{max-height:24em;overflow:auto;font:13px var(--jp-code-font-family,ui-monospace,monospace);"
    "white-space:normal;word-break:normal;word-spacing:-.4em;margin:0;padding:0;border:0;background:none;color:inherit}"
    ".wb-side b{display:inline-flex;flex-direction:column;vertical-align:top;font-weight:400;white-space:pre;"
    "border:1px solid rgba(128,128,128,.6);border-radius:2px;margin:0 0 4px;padding:0 3px;min-width:.7em;"
    "word-spacing:normal}"
    ".wb-side b:nth-of-type(even){background:rgba(128,128,128,.22)}"
    ".wb-side b:is(:hover,:focus){outline:2px solid #d55e00}"
    ".wb-side sub{vertical-align:baseline;opacity:.8;"
    "font:10px var(--jp-ui-font-family,system-ui,sans-serif)}"
    ".wb-side u{text-decoration-style:dotted}"
    ".wb-pic .wb-side b.ctl{background:currentColor}.wb-side b.ctl>*{color:var(--jp-layout-color0,#fff);opacity:1}"
    ".wb-side b.ctl u{text-decoration:none;font-weight:600}"
    "@media print{.wb-pic pre.wb-side{max-height:none}}"
)


class TokenizedPiece(NamedTuple):
    """One token: its id, its bytes, its spelling in the vocabulary, and whether it is a control token."""

    id: int
    bytes: bytes
    spelling: str
    control: bool = False

    @property
    def text(self) -> str | None:
        """Return the token's text, or None if its bytes are not whole characters."""
        try:
            return self.bytes.decode()
        except UnicodeDecodeError:
            return None


@dataclass(frozen=True)
class Tokenization:
    """The tokens of a text with `characters` characters, or an error."""

    name: str
    vocab_size: int
    characters: int
    tokens: tuple[TokenizedPiece, ...] = ()
    error: str = ""

    @property
    def characters_per_token(self) -> float | None:
        return self.characters / len(self.tokens) if self.tokens else None

    @property
    def bytes_per_token(self) -> float | None:
        return sum(len(cut.bytes) for cut in self.tokens) / len(self.tokens) if self.tokens else None


def draw_tokenizations(sides: Sequence[Tokenization]) -> str:
    columns = (
        svg.tag("div", svg.tag("small", escape(side.name)), _pieces(side, place)) for place, side in enumerate(sides)
    )
    return svg.html(svg.tag("style", STYLE), _figures(sides), svg.tag("div", *columns, class_="wb-sides"))


def _figures(sides: Sequence[Tokenization]) -> str:
    heads = ("tokenizer", "tokens", "characters", "characters a token", "bytes a token", "vocabulary")
    rows = [
        (e.name, f"{len(e.tokens):,}", f"{e.characters:,}", _ratio(e.characters_per_token), _ratio(e.bytes_per_token),
         f"{e.vocab_size:,}") for e in sides
    ]  # fmt: skip
    return draw_table(heads, rows)


def _ratio(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.2f}"


def _pieces(side: Tokenization, place: int) -> str:
    if side.error:
        return svg.tag("div", escape(side.error), role="alert")
    marks = [draw_piece(cut, place, index) for index, cut in enumerate(side.tokens[:MAX_TOKENS])]
    more = f" and {len(side.tokens) - MAX_TOKENS:,} more" if len(side.tokens) > MAX_TOKENS else ""
    # Spaces, and ids as subscripts, separate the tokens in an untrusted notebook, which has no styles.
    return svg.tag(
        "pre", " ".join(marks), more, class_="wb-side", data_scroll=""
    )  # a `pre`, because exports merge spaces in other elements


def draw_piece(cut: TokenizedPiece, place: int, index: int) -> str:
    """Draw a box with a token's text above its id, and a line break after a token that ends a line.

    A token that is not text by itself is shown as its bytes, underlined.
    """
    if cut.control:
        shown = svg.tag("u", escape(cut.spelling))
    elif (text := cut.text) is None:
        shown = svg.tag("u", _hex(cut.bytes))
    else:
        shown = svg.tag("span", escape(text.replace("\r", "␍").replace("\n", "↵").replace("\t", "⇥"), quote=False))
    tip = f"id {cut.id} · bytes {_hex(cut.bytes)}\nin the vocabulary: {cut.spelling}"
    focus = {"data_key": f"{place}.{index}", "tabindex": -1 if index else 0, "data_tip": tip}
    box = svg.tag("b", shown, svg.tag("sub", str(cut.id)), class_="ctl" if cut.control else None, **focus)
    return box + ("<br>" if cut.bytes.endswith(b"\n") else "")


def _hex(data: bytes) -> str:
    return data.hex(" ").upper()
