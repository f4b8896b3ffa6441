"""Spell a token so that it can be read alone: signs for whitespace, escapes for bytes that are no character."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from workbench.shown import truncate_text

WHITESPACE_SIGNS = {" ": "␣", "\n": "⏎", "\r": "␍", "\t": "⇥"}
MAX_LETTERS = 24  # letters


class TokenVocabulary(Protocol):
    vocab_size: int

    def token_bytes(self, id: int, /) -> bytes: ...


def spell_bytes(raw: bytes) -> str:
    """`␣def`, `⏎`, `\\xe2`; long ones are cut."""
    text = raw.decode("utf-8", "backslashreplace")
    text = "".join(WHITESPACE_SIGNS.get(letter) or (letter if letter.isprintable() else repr(letter)[1:-1]) for letter in text)
    return truncate_text(text, MAX_LETTERS)


def speller(tokenizer: TokenVocabulary | None = None, texts: Sequence[str] | None = None) -> Callable[[int], str]:
    """Return a function from token id to text: from `texts`, else `tokenizer`, else `#id`."""

    def tell(token: int) -> str:
        if texts is not None:
            return spell_bytes(texts[token].encode("utf-8", "replace")) if 0 <= token < len(texts) else f"#{token}"
        known = tokenizer is not None and 0 <= token < tokenizer.vocab_size
        return (spell_bytes(tokenizer.token_bytes(token)) if known and tokenizer is not None else "") or f"#{token}"

    return tell
