"""Draw generated text as its tokens, underlined and tinted by probability, with their alternatives.

A token is spelled so that it can be read alone: signs for whitespace, escapes for bytes that are no character.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import NamedTuple, Protocol

from workbench import svg
from workbench.display import truncate_text
from workbench.svg import format_percent

NUM_PROBABILITY_CLASSES = 10
UNDERLINE_PIXELS = [
    (NUM_PROBABILITY_CLASSES - 1 - n) * 4 // NUM_PROBABILITY_CLASSES for n in range(NUM_PROBABILITY_CLASSES)
]  # pixels under a token: the less probable, the more
MAX_TINT = 0.16  # opacity behind the least probable tokens: text of either theme is as easy to read on it
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
MAX_LETTERS = 24  # letters


class GeneratedToken(NamedTuple):
    """One token: its number, what it added to the text (it may lag behind), what the vocabulary has for it, how
    probable it was (None where that was not asked for), and what else was, the most probable first."""

    id: int
    text: str
    spelling: str
    probability: float | None = None
    alternatives: tuple[tuple[str, float], ...] = ()


def draw_token(sample: int, index: int, piece: GeneratedToken, mark: str = "") -> str:
    """One element. Its text is what the token added, no more and no less; signs for what cannot be seen are style.

    With a `mark` it is outlined, and its tip begins with it."""
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
    """The prompt and what was generated from it, each sample by itself, with what was added and how it ended. In a
    `pre`: elsewhere exports make one space of tokens that are several. `marks` are texts by (sample, index)."""
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
    words = "probability of each token, from so many percent (the heavier its underline, the less probable):"
    return svg.tag("div", f"{words} ", svg.tag("span", marks, class_="wb-shades"), class_="wb-legend")


class TokenVocabulary(Protocol):
    vocab_size: int

    def token_bytes(self, id: int, /) -> bytes: ...


def spell_bytes(raw: bytes) -> str:
    """`␣def`, `⏎`, `\\xe2`; long ones are cut."""
    text = raw.decode("utf-8", "backslashreplace")
    text = "".join(
        WHITESPACE_SIGNS.get(letter) or (letter if letter.isprintable() else repr(letter)[1:-1]) for letter in text
    )
    return truncate_text(text, MAX_LETTERS)


def speller(tokenizer: TokenVocabulary | None = None, texts: Sequence[str] | None = None) -> Callable[[int], str]:
    """Return a function from token id to text: from `texts`, else `tokenizer`, else `#id`."""

    def tell(token: int) -> str:
        if texts is not None:
            return spell_bytes(texts[token].encode("utf-8", "replace")) if 0 <= token < len(texts) else f"#{token}"
        known = tokenizer is not None and 0 <= token < tokenizer.vocab_size
        return (spell_bytes(tokenizer.token_bytes(token)) if known and tokenizer is not None else "") or f"#{token}"

    return tell
