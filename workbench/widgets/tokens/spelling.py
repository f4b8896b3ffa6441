"""Spell a token so that it can be read alone: signs for whitespace, escapes for bytes that are no character."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from workbench.shown import cut

SIGNS = {" ": "␣", "\n": "⏎", "\r": "␍", "\t": "⇥"}
MOST = 24  # letters


class Tokens(Protocol):
    vocab: int

    def token_bytes(self, id: int, /) -> bytes: ...


def spelled(raw: bytes) -> str:
    """`␣def`, `⏎`, `\\xe2`; long ones are cut."""
    told = raw.decode("utf-8", "backslashreplace")
    told = "".join(SIGNS.get(letter) or (letter if letter.isprintable() else repr(letter)[1:-1]) for letter in told)
    return cut(told, MOST)


def speller(tokenizer: Tokens | None = None, texts: Sequence[str] | None = None) -> Callable[[int], str]:
    """Return a function from token id to text: from `texts`, else `tokenizer`, else `#id`."""

    def tell(token: int) -> str:
        if texts is not None:
            return spelled(texts[token].encode("utf-8", "replace")) if 0 <= token < len(texts) else f"#{token}"
        known = tokenizer is not None and 0 <= token < tokenizer.vocab
        return (spelled(tokenizer.token_bytes(token)) if known and tokenizer is not None else "") or f"#{token}"

    return tell
