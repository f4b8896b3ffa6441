"""Draw generated text token by token, underlined and tinted by probability, with alternatives.

A single token is spelled with signs for white space, and escapes for bytes that are not characters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import NamedTuple, Protocol

from workbench import svg
from workbench.display import truncate_text
from workbench.units import format_percent

NUM_PROBABILITY_CLASSES = 10
UNDERLINE_PIXELS = [
    (NUM_PROBABILITY_CLASSES - 1 - n) * 4 // NUM_PROBABILITY_CLASSES for n in range(NUM_PROBABILITY_CLASSES)
]  # thickness of the underline by class: thicker for less probable tokens
MAX_TINT = 0.16  # opacity behind the least probable tokens: faint enough for the text colours of both themes
GENERATED_STYLE = (
    ".wb-pic pre.wb-tokens{white-space:pre-wrap;overflow-wrap:anywhere;word-break:normal;max-height:26em;overflow:auto;"
    "font:13px var(--jp-code-font-family,ui-monospace,monospace);line-height:1.8;padding:4px;margin:0;border:0;"
    "background:none;color:inherit}"
    ".wb-pic b{font-weight:400;padding:1px 0 5px;text-underline-offset:4px;text-decoration-skip-ink:none;"
    "text-decoration-color:#d55e00}"
    ".wb-legend{font-size:11px;white-space:pre-wrap}"
    ".wb-tokens b:hover,.wb-tokens b:focus{outline:2px solid #0072b2}"
    ".wb-tokens .prompt{opacity:.7}.wb-tokens .e::before{content:'\\25ab'}.wb-tokens .n::before{content:'\\21b5'}"
    ".wb-pic .wb-tokens .m{outline:2px solid #cc79a7;outline-offset:1px;font-weight:700}"
    ".wb-sample{display:block;border-top:1px solid;opacity:.7;font-size:11px}"
    "@media print{.wb-pic pre.wb-tokens{max-height:none}}"
    + "".join(
        f".wb-pic .p{n}{{background-color:rgb(213 94 0/{MAX_TINT * UNDERLINE_PIXELS[n] / UNDERLINE_PIXELS[0]:.2f});"
        f"text-decoration-line:underline;text-decoration-thickness:{UNDERLINE_PIXELS[n]}px}}"
        for n in range(NUM_PROBABILITY_CLASSES)
        if UNDERLINE_PIXELS[n]
    )
)
WHITESPACE_SIGNS = {" ": "␣", "\n": "⏎", "\r": "␍", "\t": "⇥"}
MAX_LETTERS = 24  # of a spelled token


class GeneratedToken(NamedTuple):
    """One generated token: its id, the text that it added (empty while a character is incomplete), its spelling, its
    probability (None if not requested), and the most probable tokens at its place, the likeliest first."""

    id: int
    text: str
    spelling: str
    probability: float | None = None
    alternatives: tuple[tuple[str, float], ...] = ()


def draw_token(sample: int, index: int, piece: GeneratedToken, mark: str = "") -> str:
    """Draw one token as an element that contains exactly the token's text; signs for invisible characters are added by
    CSS.

    With a `mark` the token is outlined, and its tooltip begins with the mark."""
    names = (
        []
        if piece.probability is None
        else [f"p{min(int(piece.probability * NUM_PROBABILITY_CLASSES), NUM_PROBABILITY_CLASSES - 1)}"]
    )
    if mark:
        names.append("m")
    if not piece.text:
        names.append("e")
    elif piece.text[0] == "\n":
        names.append("n")
    place = {
        "data_key": f"{sample}.{index}",
        "tabindex": -1 if sample or index else 0,
        "data_tip": f"{mark}\n{tip(piece)}" if mark else tip(piece),
    }
    return svg.tag("b", escape(piece.text, quote=False), class_=" ".join(names) or None, **place)


def tip(piece: GeneratedToken) -> str:
    chance = "" if piece.probability is None else f" · {format_percent(piece.probability)}"
    lines = [f"{piece.spelling} · id {piece.id}{chance}"]
    return "\n".join([*lines, *(f"{format_percent(share)} {spelling}" for spelling, share in piece.alternatives)])


def draw_generated_text(
    prompt: str,
    samples: Mapping[int, Sequence[GeneratedToken]],
    trailing_text: Mapping[int, str],
    finish_reasons: Mapping[int, str],
    marks: Mapping[tuple[int, int], str] | None = None,
) -> str:
    """Draw the prompt and each generated sample, with its trailing text and finish reason.

    `marks` are texts by (sample, index). The element is a `pre`, because exports merge spaces in other elements."""
    marked = marks or {}
    parts = [svg.tag("span", escape(prompt, quote=False), class_="prompt")]
    for sample, pieces in sorted(samples.items()):
        if len(samples) > 1:
            parts.append(svg.tag("span", f"sample {sample} {finish_reasons.get(sample, '')}", class_="wb-sample"))
        tokens = (
            draw_token(sample, index, piece, marked.get((sample, index), "")) for index, piece in enumerate(pieces)
        )
        parts.append(svg.tag("span", *tokens, data_grows=f"s{sample}") if pieces else "")
        parts.append(escape(trailing_text.get(sample, ""), quote=False))
    return svg.tag("style", GENERATED_STYLE) + svg.tag("pre", *parts, class_="wb-tokens")


def draw_probability_legend() -> str:
    marks = "".join(svg.tag("b", f" {10 * n} ", class_=f"p{n}") for n in range(NUM_PROBABILITY_CLASSES))
    words = "probability of each token in percent, at least (a heavier underline means less probable):"
    return svg.tag("div", f"{words} ", svg.tag("span", marks, class_="wb-shades"), class_="wb-legend")


class TokenVocabulary(Protocol):
    vocab_size: int

    def token_bytes(self, id: int, /) -> bytes: ...


def spell_bytes(raw: bytes) -> str:
    """Return bytes as visible text, such as `␣def`, `⏎`, `\\xe2`, cut at `MAX_LETTERS`."""
    text = raw.decode("utf-8", "backslashreplace")
    text = "".join(
        WHITESPACE_SIGNS.get(letter) or (letter if letter.isprintable() else repr(letter)[1:-1]) for letter in text
    )
    return truncate_text(text, MAX_LETTERS)


def speller(tokenizer: TokenVocabulary | None = None, texts: Sequence[str] | None = None) -> Callable[[int], str]:
    """Return a function from a token id to visible text: from `texts` if given, else from `tokenizer`, else `#id`."""

    def tell(token: int) -> str:
        if texts is not None:
            return spell_bytes(texts[token].encode("utf-8", "replace")) if 0 <= token < len(texts) else f"#{token}"
        known = tokenizer is not None and 0 <= token < tokenizer.vocab_size
        return (spell_bytes(tokenizer.token_bytes(token)) if known and tokenizer is not None else "") or f"#{token}"

    return tell
