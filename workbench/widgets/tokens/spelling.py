"""A token as it can be read alone: what is not seen has a sign, bytes that are no character are told as bytes."""

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
    """What tells a token's text by its id: from `texts` by id, else from `tokenizer`; `#id` where neither knows it."""

    def tell(token: int) -> str:
        if texts is not None:
            return spelled(texts[token].encode("utf-8", "replace")) if 0 <= token < len(texts) else f"#{token}"
        known = tokenizer is not None and 0 <= token < tokenizer.vocab
        return (spelled(tokenizer.token_bytes(token)) if known and tokenizer is not None else "") or f"#{token}"

    return tell
