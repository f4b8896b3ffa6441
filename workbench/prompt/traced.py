"""Strings that track the origin of each character through the operations of a template.

A chat template writes control tokens; a message can only spell their names. Both are characters of one rendered text,
so each character keeps its origin. Characters from a template's literals have the origin TEMPLATE; all others are
content. A text from an operation that is not tracked is COMPUTED, never a literal.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from string import Formatter
from typing import Any


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of characters in a prompt.

    `part` is template, role (a word such as `user`, which a template may put into a control token), computed, system,
    tool, document, message or argument; `index` counts within the part, and `field` is a path within it.
    """

    part: str
    index: int | None = None
    field: str = ""
    generated: bool = False  # text within `{% generation %}`: an answer of the model

    @property
    def is_written(self) -> bool:
        """Return whether the template itself wrote this text: only such text is encoded to control tokens."""
        return self.part in ("template", "role")

    def __str__(self) -> str:
        place = self.part if self.index is None else f"{self.part} {self.index}"
        return f"{place}: {self.field}" if self.field else place


TEMPLATE, ROLE, COMPUTED = Origin("template"), Origin("role"), Origin("computed")
Run = tuple[int, Origin]  # (number of characters, their origin)


class Traced(str):
    """A string with the origins of its characters: `_runs` lists (length, origin) in order.

    Methods that are not defined here return a plain `str`; `follow` derives its origin from the inputs.
    """

    __slots__ = ("_runs",)
    _runs: tuple[Run, ...]

    def __new__(cls, text: str = "", runs: Iterable[Run] | Origin = COMPUTED) -> Traced:
        made = super().__new__(cls, text)
        made._runs = ((len(made), runs),) if isinstance(runs, Origin) else _merged(runs)
        return made

    def __str__(self) -> Traced:
        return self

    def __add__(self, other: str) -> Traced:
        return joined((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> Traced:
        return joined((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, times: Any) -> Traced:
        return Traced(str.__mul__(self, times), self._runs * max(0, times))

    def __rmul__(self, times: Any) -> Traced:
        return self * times

    def __mod__(self, values: Any) -> str:
        return _formatted(self, values)

    def __getitem__(self, place: Any) -> Traced:
        text = str.__getitem__(self, place)
        if not isinstance(place, slice):
            first = place.__index__() % len(self)
            return Traced(text, _cut(self._runs, first, first + 1))
        first, last, step = place.indices(len(self))
        if step == 1:
            return Traced(text, _cut(self._runs, first, last))
        origins = _by_character(self)
        return Traced(text, ((1, origins[n]) for n in range(first, last, step)))

    def __iter__(self) -> Iterator[Traced]:
        for character, origin in zip(str.__iter__(self), _by_character(self), strict=True):
            yield Traced(character, origin)

    def strip(self, characters: str | None = None) -> Traced:
        return self.lstrip(characters).rstrip(characters)

    def lstrip(self, characters: str | None = None) -> Traced:
        return self[len(self) - len(str.lstrip(self, characters)) :]

    def rstrip(self, characters: str | None = None) -> Traced:
        return self[: len(str.rstrip(self, characters))]

    def removeprefix(self, prefix: str) -> Traced:
        return self[len(prefix) :] if self.startswith(prefix) else self

    def removesuffix(self, suffix: str) -> Traced:
        return self[: len(self) - len(suffix)] if self.endswith(suffix) else self

    def split(self, sep: str | None = None, maxsplit: int = -1) -> list[Traced]:  # type: ignore[override] (of texts)
        return self._pieces(str.split(self, sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: int = -1) -> list[Traced]:  # type: ignore[override] (of texts)
        return self._pieces(str.rsplit(self, sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[Traced]:  # type: ignore[override] (of texts)
        whole = self._pieces(str.splitlines(self, True), "")
        lengths = map(len, str.splitlines(self, keepends))
        return [line[:length] for line, length in zip(whole, lengths, strict=True)]

    def partition(self, sep: str) -> tuple[Traced, Traced, Traced]:
        return self._at(str.find(self, sep), sep) if sep in self else (self, self[:0], self[:0])

    def rpartition(self, sep: str) -> tuple[Traced, Traced, Traced]:
        return self._at(str.rfind(self, sep), sep) if sep in self else (self[:0], self[:0], self)

    def replace(self, old: str, new: str, count: int = -1) -> Traced:  # type: ignore[override] (names are positional)
        if not old:  # between all characters
            pieces: list[str] = [each for each in self]
            limit = len(self) + 1 if count < 0 else min(count, len(self) + 1)
            return joined(each for n in range(len(self) + 1) for each in ([new] * (n < limit) + pieces[n : n + 1]))
        pieces = [*self.split(old, count)]
        return joined(each for n, piece in enumerate(pieces) for each in ([new] * (n > 0) + [piece]))

    def join(self, parts: Iterable[str]) -> Traced:
        return joined(each for n, part in enumerate(parts) for each in ([self] * (n > 0) + [part]))

    def lower(self) -> str:
        return self._mapped(str.lower)

    def upper(self) -> str:
        return self._mapped(str.upper)

    def casefold(self) -> str:
        return self._mapped(str.casefold)

    def capitalize(self) -> str:
        return self._mapped(str.capitalize, by_letter=False)

    def title(self) -> str:
        return self._mapped(str.title, by_letter=False)

    def swapcase(self) -> str:
        return self._mapped(str.swapcase)

    def _pieces(self, pieces: list[str], sep: str | None) -> list[Traced]:
        """Locate consecutive pieces of this text, separated by `sep`, or by spaces (None)."""
        starts = [*accumulate((length for length, _ in self._runs), initial=0)]
        located, place = [], 0
        for piece in pieces:
            place = str.find(self, piece, place) if sep is None else place
            end = place + len(piece)
            run = bisect_right(starts, place) - 1  # not from run 0: there may be as many runs as pieces
            runs = self._runs[run : bisect_left(starts, end)]
            located.append(Traced(piece, _cut(runs, place - starts[run], end - starts[run])))
            place = end + len(sep or "")
        return located

    def _at(self, place: int, sep: str) -> tuple[Traced, Traced, Traced]:
        return self[:place], self[place : place + len(sep)], self[place + len(sep) :]

    def _mapped(self, change: Callable[[str], str], by_letter: bool = True) -> str:
        """Change the case of letters. No change shortens a letter, so if the length stays equal, all positions stay.

        `by_letter`: the length of a letter's result does not depend on its neighbours.
        """
        text, plain = change(self), str.__str__(self)
        if len(text) == len(self):
            return Traced(text, self._runs)
        lengths = [len(change(letter)) for letter in plain]
        if not by_letter or sum(lengths) != len(text):
            return Traced(text, origin_of([self]))
        return Traced(text, zip(lengths, _by_character(self), strict=True))


def joined(parts: Iterable[Any]) -> Traced:
    """Join texts to one with the origins of all parts; a plain text gets the origin COMPUTED."""
    parts = list(parts)
    return Traced("".join(parts), (run for part in parts for run in runs_of(part)))


def runs_of(text: str) -> tuple[Run, ...]:
    return text._runs if isinstance(text, Traced) else ((len(text), COMPUTED),)


def follow(value: Any, inputs: Iterable[Any]) -> Any:
    """Return `value`, the result of an untracked operation on `inputs`: its plain strings take the origin of the
    inputs.
    """
    if type(value) is str:
        return Traced(value, origin_of(inputs))
    if type(value) in (list, tuple) and any(type(each) is str for each in value):
        origin = origin_of(inputs)
        return type(value)(Traced(each, origin) if type(each) is str else each for each in value)
    return value


def origin_of(inputs: Iterable[Any]) -> Origin:
    """Return the origin of a text computed from `inputs`: a literal if all inputs are literals, content if all are
    content.

    Mixed inputs give COMPUTED: a control token in such a text may come from the template or from a message. A role
    among the inputs is ignored: it is a word, not a control token.
    """
    common = {origin for each in inputs for origin in _origins(each)}
    origins = {each for each in common if each.part != "role"} or common
    contents = [each for each in origins if not each.is_written and each.part != "computed"]
    if origins and len(contents) == len(origins):
        return min(contents, key=str)
    return TEMPLATE if origins and all(each.is_written for each in origins) else COMPUTED


def plain(value: Any) -> Any:
    """Return a value without origins: plain strings in place of traced ones, also within lists and mappings."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {plain(key): plain(each) for key, each in value.items()}
    return type(value)(map(plain, value)) if type(value) in (list, tuple) else value


def traced(value: Any, origin: Origin) -> Any:
    """Return `value` with this origin for every string in it, keys included; the path is added to the origin's field.

    Strings that are traced already stay unchanged."""
    if isinstance(value, str):
        return value if isinstance(value, Traced) else Traced(value, origin)
    if isinstance(value, Mapping):
        return {
            k if isinstance(k, Traced) else Traced(str(k), origin): traced(each, _below(origin, k))
            for k, each in value.items()
        }
    if isinstance(value, list | tuple):
        return [traced(each, _below(origin, n)) for n, each in enumerate(value)]
    return value


def _below(origin: Origin, name: object) -> Origin:
    return replace(origin, field=f"{origin.field}.{name}" if origin.field else str(name))


def _merged(runs: Iterable[Run]) -> tuple[Run, ...]:
    nonempty = ((length, origin) for length, origin in runs if length)
    return tuple((sum(length for length, _ in same), origin) for origin, same in groupby(nonempty, lambda run: run[1]))


def _cut(runs: tuple[Run, ...], first: int, last: int) -> Iterator[Run]:
    """Yield the runs of characters [first, last)."""
    place = 0
    for length, origin in runs:
        if place >= last:
            return
        yield max(0, min(place + length, last) - max(place, first)), origin
        place += length


def _by_character(text: Traced) -> list[Origin]:
    return [origin for length, origin in text._runs for _ in range(length)]


def _origins(value: Any) -> Iterator[Origin]:
    """Yield the origins of every string in `value`; COMPUTED for a plain one."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, str):
            yield from (origin for _, origin in runs_of(each)) if each else ()
        elif isinstance(each, Mapping):
            waiting += [*each.keys(), *each.values()]
        elif isinstance(each, list | tuple | set | frozenset):
            waiting += each


_CONVERSION = re.compile(r"%(?:\((?P<name>[^)]*)\))?(?P<how>[-#0 +]*[\d]*(?:\.\d+)?)(?P<kind>[a-zA-Z%])")


def _formatted(text: Traced, values: Any) -> str:
    """Return `text % values`, tracked if no width comes from the values."""
    made = str.__mod__(text, values)
    conversions, pieces, rest = list(_CONVERSION.finditer(text)), [], 0
    named: Any = values
    arguments = iter(values if isinstance(values, tuple) else (values,))
    try:
        for place in conversions:
            pieces.append(text[rest : place.start()])
            rest = place.end()
            if place["kind"] == "%":
                pieces.append(text[rest - 1 : rest])
                continue
            value = named[place["name"]] if place["name"] is not None else next(arguments)
            pieces.append(_one(value, "%" + place["how"] + place["kind"], place["kind"] == "s" and not place["how"]))
    except (StopIteration, LookupError, TypeError, ValueError):
        return follow(made, [text, values])
    traced = joined([*pieces, text[rest:]])
    return traced if traced == made else follow(made, [text, values])


def _one(value: Any, how: str, as_it_is: bool) -> str:
    if as_it_is and isinstance(value, Traced):
        return value
    return Traced(str.__mod__(how, (value,)), origin_of([value]))


def follow_format(text: str, made: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Return `made`, the result of `text.format(*args, **kwargs)`, tracked if its fields are plain strings."""
    pieces: list[str] = []
    literal = origin_of([text])
    try:
        for number, (words, name, how, conversion) in enumerate(Formatter().parse(text)):
            pieces.append(Traced(words, literal))
            if name is None:
                continue
            value = args[int(name or number)] if not name or name.isdigit() else kwargs[name]
            pieces.append(_one(value, "%s", not how and not conversion))
    except (LookupError, ValueError, TypeError):
        return follow(made, [text, args, kwargs])
    traced = joined(pieces)
    return traced if traced == made else follow(made, [text, args, kwargs])
