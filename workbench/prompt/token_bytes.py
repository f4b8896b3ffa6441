"""Map tokens to bytes by the decoder that a `tokenizer.json` names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tokenizers import pre_tokenizers

FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class ByteRule:
    """A decoder under which a text is the bytes of its tokens in order, without some leading spaces.

    `alphabet`: the vocabulary is written in GPT-2's byte alphabet. Otherwise it is written as in sentencepiece, with
    `replacements` (`▁` for a space) and, with `fallback`, entries like `<0x0A>` for single bytes.
    """

    alphabet: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    fallback: bool = False
    strip: str = " "  # the character dropped from the front of a text,
    strip_count: int = 0  # so many times at most

    def token_bytes(self, token: str, added: bool) -> bytes:
        """Return the bytes of the vocabulary's entry `token`; `added` entries are not in the byte alphabet."""
        if self.alphabet:
            known = not added and all(character in BYTE_OF for character in token)
            return bytes(BYTE_OF[character] for character in token) if known else token.encode()
        for old, new in self.replacements:
            token = token.replace(old, new)
        byte = FALLBACK.fullmatch(token) if self.fallback else None
        return bytes([int(byte[1], 16)]) if byte else token.encode()


class LeadingStrip:
    """Strip leading characters of a text that arrives in pieces, as a byte rule says."""

    def __init__(self, rule: ByteRule):
        self._character, self._left = rule.strip, rule.strip_count

    def strip(self, piece: str) -> str:
        while self._left and piece:
            if piece[0] == self._character:
                piece, self._left = piece[1:], self._left - 1
            else:
                self._left = 0
        return piece


def parse_byte_rule(decoder: Mapping | None) -> ByteRule | None:
    """Parse the decoder of a `tokenizer.json`; None if a token's text depends on other tokens."""
    if decoder is None:
        return None
    steps = list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return ByteRule(alphabet=True)
    replacements = []
    while steps and steps[0]["type"] == "Replace" and "String" in steps[0]["pattern"]:
        step = steps.pop(0)
        replacements.append((step["pattern"]["String"], step["content"]))
    fallback = _take(steps, "ByteFallback") is not None
    fused = _take(steps, "Fuse") is not None
    strip = _take(steps, "Strip") if fused else None
    if steps or not fused or (strip and strip["stop"]):
        return None
    if strip is None:
        return ByteRule(replacements=tuple(replacements), fallback=fallback)
    return ByteRule(False, tuple(replacements), fallback, strip["content"], strip["start"])


def _take(steps: list[Mapping], kind: str) -> Mapping | None:
    return steps.pop(0) if steps and steps[0]["type"] == kind else None


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's table: a printable byte is its own character, the others follow from U+0100 on, in order."""
    printable = {ord(c): c for c in pre_tokenizers.ByteLevel.alphabet() if ord(c) < 256}
    others = [byte for byte in range(256) if byte not in printable]
    return {c: byte for byte, c in printable.items()} | {chr(256 + n): byte for n, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()
