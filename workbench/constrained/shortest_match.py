"""Find a short text that a regular expression matches, using Python's own parser of expressions."""

from __future__ import annotations

from re import _constants as kinds  # type: ignore[attr-defined] (Python's own parser has no public name)
from re import _parser as sre_parse  # type: ignore[attr-defined] (as above)
from typing import Any

_OF_CLASS = {
    kinds.CATEGORY_DIGIT: "0", kinds.CATEGORY_WORD: "a", kinds.CATEGORY_SPACE: " ",
    kinds.CATEGORY_NOT_DIGIT: "a", kinds.CATEGORY_NOT_WORD: " ", kinds.CATEGORY_NOT_SPACE: "a",
}  # fmt: skip
MAX_LENGTH = 10_000


def shortest_match(pattern: str) -> str | None:
    """Return a short text that `pattern` matches, or None if Python parses the pattern differently or not at all.

    The result is a hint without guarantee: Rust's syntax differs in places.
    """
    if len(pattern) > MAX_LENGTH:  # Python's parser takes 2 us per character
        return None
    try:
        return _text(sre_parse.parse(pattern))
    except (ValueError, RecursionError, OverflowError, sre_parse.error, _Unknown):
        return None


class _Unknown(Exception):
    pass


def _text(parsed: Any) -> str:
    parts: list[str] = []
    for kind, value in parsed:
        if kind is kinds.LITERAL:
            parts.append(chr(value))
        elif kind is kinds.NOT_LITERAL:
            parts.append("a" if value != ord("a") else "b")
        elif kind is kinds.ANY:
            parts.append("a")
        elif kind is kinds.IN:
            parts.append(_member(value))
        elif kind is kinds.BRANCH:
            parts.append(min(map(_text, value[1]), key=len))
        elif kind is kinds.SUBPATTERN:
            parts.append(_text(value[-1]))
        elif kind in (kinds.MAX_REPEAT, kinds.MIN_REPEAT):
            inner = _text(value[2]) if value[0] else ""
            if value[0] * len(inner) > MAX_LENGTH:
                raise _Unknown
            parts.append(inner * value[0])
        elif kind is not kinds.AT:
            raise _Unknown
    return "".join(parts)


def _member(items: Any) -> str:
    """Return a member of a character class."""
    if items[0][0] is not kinds.NEGATE:
        kind, value = items[0]
        if kind is kinds.LITERAL:
            return chr(value)
        return chr(value[0]) if kind is kinds.RANGE else _OF_CLASS[value]
    for character in "a0 -_ABC!":
        if not any(_holds(item, character) for item in items[1:]):
            return character
    raise _Unknown


def _holds(item: Any, character: str) -> bool:
    kind, value = item
    if kind is kinds.LITERAL:
        return ord(character) == value
    if kind is kinds.RANGE:
        return value[0] <= ord(character) <= value[1]
    return True  # a class within a negated class: try another character
