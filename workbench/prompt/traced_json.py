"""Write values as JSON, as `json.dumps` does, with the origin of every character."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from workbench.prompt.traced import Origin, Traced, follow, joined, origin_of, plain, runs_of

MAX_DEPTH = 200


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return the JSON of `value`; punctuation and numbers have the origin of the surrounding strings."""
    options: dict[str, Any] = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
    made = json.dumps(plain(value), ensure_ascii=ensure_ascii, **plain(options))
    origin = origin_of([value])
    space = " " * indent if isinstance(indent, int) else indent
    between, after_key = separators or ((", ", ": ") if indent is None else (",", ": "))
    writer = _Writer(origin, ensure_ascii, space, plain(between), plain(after_key), sort_keys)
    text = joined(writer.parts(value, 0))
    return text if text == made else follow(made, [value])


class _Writer:
    def __init__(
        self, origin: Origin, ascii_only: bool, indent: str | None, between: str, after_key: str, sort_keys: bool
    ):
        self._origin, self._ascii, self._indent = origin, ascii_only, indent
        self._between, self._after_key, self._sort_keys = between, after_key, sort_keys

    def parts(self, value: Any, depth: int) -> Iterator[Traced]:
        if depth > MAX_DEPTH:
            raise ValueError(f"JSON nested more than {MAX_DEPTH} deep")
        if isinstance(value, str):
            yield from self._text(value)
        elif isinstance(value, Mapping):
            items = sorted(value.items()) if self._sort_keys else value.items()
            yield from self._items(
                "{}",
                (
                    [*self._key(key), self._mark(self._after_key)] + [*self.parts(each, depth + 1)]
                    for key, each in items
                ),
                depth,
            )
        elif isinstance(value, list | tuple):
            yield from self._items("[]", ([*self.parts(each, depth + 1)] for each in value), depth)
        else:
            yield self._mark(json.dumps(value))

    def _items(self, brackets: str, items: Iterator[list[Traced]], depth: int) -> Iterator[Traced]:
        line = "" if self._indent is None else "\n" + self._indent * (depth + 1)
        empty = True
        yield self._mark(brackets[0])
        for item in items:
            yield self._mark(line if empty else self._between + line)
            yield from item
            empty = False
        if not empty and self._indent is not None:
            yield self._mark("\n" + self._indent * depth)
        yield self._mark(brackets[1])

    def _key(self, key: Any) -> Iterator[Traced]:
        if isinstance(key, str):
            yield from self._text(key)
        else:  # a number, true, false or null
            yield self._mark(json.dumps({key: 0})[1:-4])

    def _text(self, text: str) -> Iterator[Traced]:
        characters, place = str.__str__(text), 0
        yield self._mark('"')
        for length, origin in runs_of(text):
            stretch = json.dumps(characters[place : place + length], ensure_ascii=self._ascii)
            yield Traced(stretch[1:-1], origin)
            place += length
        yield self._mark('"')

    def _mark(self, text: str) -> Traced:
        return Traced(text, self._origin)
