"""Encode a rendered template: text becomes control tokens only where the template itself wrote them.

If the template wrote all control tokens of a text, the text is encoded unchanged in one piece. Otherwise the template's
control tokens are replaced by private-use characters, and a copy of the tokenizer knows these in place of the names, so
that names in messages are plain characters. Either way one call encodes the whole text, and adjacent characters merge
as usual.
"""

from __future__ import annotations

import json
import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import tokenizers

from workbench.errors import WorkbenchError
from workbench.prompt.tokenization.tokenizer import Tokenizer
from workbench.prompt.traced import Traced, runs_of

PRIVATE_USE = range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE)  # planes 15 and 16
MAX_CUTS = 1000  # positions where a word-level model turns plain characters into control tokens


class TokenSpan(NamedTuple):
    """A token and its range of characters [first, last)."""

    id: int
    first: int
    last: int


class TemplateEncoder:
    """An encoder for the texts of one template.

    `names` are further added tokens that the template writes (Qwen's `<tool_call>`), which count as control tokens.
    """

    def __init__(self, tokenizer: Tokenizer, names: Iterable[str] = ()):
        self.tokenizer = tokenizer
        added = {name: id for name, id in tokenizer.added_token_ids.items() if name in frozenset(names)}
        self.control_ids = {**tokenizer.special_token_ids, **added}
        self._name_of = {id: name for name, id in self.control_ids.items()}
        self._lock = threading.Lock()
        self.end_token_ids: tuple[int, ...] | None = None  # computed on first use
        self.call_marks: list[tuple[str, str]] | None = None  # computed when an answer's format is first needed

    def encode(self, text: Traced) -> list[TokenSpan]:
        """Return the tokens of a rendered text; no token is prepended.

        Raises:
            WorkbenchError: for a lone surrogate, for characters that the tokenizer can only encode as a control token,
                and for a control token that the template computes from pieces that may come from a message.
        """
        characters = str.__str__(text)  # without origins: quick to cut
        tokens = self._spans(characters)
        written = _WrittenPlaces(text)
        forged = False
        for token in tokens:
            name = self._name_of.get(token.id)
            if name is None or self.is_unknown_character(token.id, characters[token.first : token.last]):
                continue
            first, last = _name_within(characters, token)
            if written.holds(first, last):
                continue
            if any(origin.part == "computed" for origin in written.origins(first, last)):
                raise WorkbenchError(
                    f"the chat template computes the control token {name!r} ({_excerpt(characters, first, last)}) in a "
                    "way in which its own text and a message's cannot be separated; write it in the template as it is"
                )
            forged = True
        if not forged:
            return tokens
        with self._lock:
            return self._copy.encode(text)

    def written_tokens(self, text: str) -> list[TokenSpan]:
        """Return the control tokens that the template wrote in a text."""
        controls = (token for token in self._spans(text) if token.id in self._name_of)
        return [each for each in controls if not self.is_unknown_character(each.id, text[each.first : each.last])]

    def is_unknown_character(self, id: int, text: str) -> bool:
        """Return whether a token is the unknown token and stands for characters outside of the vocabulary, not for its
        own name in the text.
        """
        return id == self.tokenizer.unknown_id and not self.tokenizer.spells(text, self._name_of.get(id, ""))

    def _spans(self, text: str) -> list[TokenSpan]:
        ids, offsets = self.tokenizer.encode_with_offsets(text)
        return [TokenSpan(id, *place) for id, place in zip(ids, offsets, strict=True)]

    @cached_property
    def _copy(self) -> _MarkedCopy:
        return _MarkedCopy(self)


class _MarkedCopy:
    """A copy of a tokenizer that reads a private-use character in place of each control token's name."""

    def __init__(self, encoder: TemplateEncoder):
        self._encoder, self._source = encoder, json.loads(encoder.tokenizer.to_json())
        self._first = -1
        self._mark_of: dict[int, str] = {}

    def encode(self, text: Traced) -> list[TokenSpan]:
        self._use_marks_not_in(text)
        marked, pieces = self._marked(text)
        cuts: list[int] = []  # positions in `marked` where the text is cut
        while True:
            tokens = self._tokens(marked, cuts)
            wrong_places = self._wrong(tokens, marked)
            if not wrong_places:
                return [TokenSpan(t.id, _place(pieces, t.first), _place(pieces, t.last)) for t in tokens]
            new = sorted({*cuts, *wrong_places})
            if len(new) == len(cuts) or len(new) > MAX_CUTS:
                bad = next(token for token in tokens if self._is_wrong(token, marked))
                name = self._encoder.tokenizer.id_to_token(bad.id)
                raise WorkbenchError(
                    f"text ({_excerpt(marked, bad.first, bad.last)}): this tokenizer can only read it as its control "
                    f"token {name!r}; take it out"
                )
            cuts = new

    def _use_marks_not_in(self, text: str) -> None:
        """Build the copy; rebuild it if a text contains the private-use characters it uses."""
        count = len(self._encoder.control_ids) + 1
        characters = {ord(each) for each in text if ord(each) >= PRIVATE_USE[0].start}
        if self._first >= 0 and characters.isdisjoint(range(self._first, self._first + count)):
            return
        starts = (first for plane in PRIVATE_USE for first in range(plane.start, plane.stop - count, count))
        first = next((first for first in starts if characters.isdisjoint(range(first, first + count))), None)
        if first is None:
            raise WorkbenchError(
                "text: it has private characters of every range, and spells control tokens; take one out"
            )
        self._first = first
        ids = list(self._encoder.control_ids.values())
        self._mark_of = {id: chr(self._first + 1 + number) for number, id in enumerate(ids)}
        self._cut = chr(self._first)
        added = [
            {**each, "content": self._mark_of[each["id"]], "normalized": False, "special": False}
            if each["id"] in self._mark_of
            else each
            for each in self._source["added_tokens"]
        ]
        cut = {"id": 0, "content": self._cut, "special": False, "normalized": False}
        cut |= dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        all_added = self._source["added_tokens"]
        id_of = {each["content"]: each["id"] for each in all_added if each["id"] not in self._mark_of}
        id_of |= {mark: id for id, mark in self._mark_of.items()}
        inner = tokenizers.Tokenizer.from_str(
            json.dumps(self._source | {"added_tokens": [], "truncation": None, "padding": None, "post_processor": None})
        )
        for each in [*added, cut]:  # one by one: ids are assigned in order
            inner.add_tokens([_added_token(each)])
        self._id_of: dict[int | None, int] = {inner.token_to_id(name): id for name, id in id_of.items()}
        self._cut_id = inner.token_to_id(self._cut)
        self._inner = inner

    def _marked(self, text: Traced) -> tuple[str, list[tuple[int, int]]]:
        """Return the text with marks in place of the template's control tokens, and pairs (position in it, position in
        `text`) at the start of each piece that is shifted as a whole.
        """
        parts: list[str] = []
        pieces, place, length = [(0, 0)], 0, 0
        for first, last in _written_stretches(text):
            stretch = str.__str__(text[first:last])
            for token in self._encoder.written_tokens(stretch):
                before = str.__str__(text[place : first + token.first])
                parts += [before, self._mark_of[token.id]]
                length += len(before)
                pieces.append((length, first + token.first))
                length, place = length + 1, first + token.last
                pieces.append((length, place))
        return "".join([*parts, str.__str__(text[place:])]), pieces

    def _tokens(self, marked: str, cuts: Sequence[int]) -> list[TokenSpan]:
        """Encode `marked`, cut at `cuts`; return tokens with the original tokenizer's ids and positions in `marked`."""
        edges = [0, *cuts, len(marked)]
        text = self._cut.join(marked[a:b] for a, b in zip(edges, edges[1:], strict=False))
        encoding = self._inner.encode(text, add_special_tokens=False)
        tokens = []
        for id, (first, last) in zip(encoding.ids, encoding.offsets, strict=True):
            if id != self._cut_id:
                first, last = (
                    at - bisect_right([cut + n for n, cut in enumerate(cuts)], at - 1) for at in (first, last)
                )
                tokens.append(TokenSpan(self._id_of.get(id, id), first, last))
        return tokens

    def _wrong(self, tokens: Sequence[TokenSpan], marked: str) -> list[int]:
        """Return the positions to cut so that plain characters never become a control token."""
        cuts: list[int] = []
        for token in tokens:
            if self._is_wrong(token, marked):
                length = token.last - token.first
                cuts += [token.first + 1] if length > 1 else [token.first, token.last]
        return [cut for cut in cuts if 0 < cut < len(marked)]

    def _is_wrong(self, token: TokenSpan, marked: str) -> bool:
        if token.id not in self._mark_of:
            return False
        words = marked[token.first : token.last]
        if self._mark_of[token.id] in words:
            return False
        return not self._encoder.is_unknown_character(token.id, words)


class _WrittenPlaces:
    """The character positions of a text that its template wrote."""

    def __init__(self, text: Traced):
        self._starts: list[int] = []
        self._runs = runs_of(text)
        place = 0
        for length, _ in self._runs:
            self._starts.append(place)
            place += length

    def origins(self, first: int, last: int) -> Iterator[Any]:
        number = max(0, bisect_right(self._starts, first) - 1)
        while number < len(self._runs) and self._starts[number] < last:
            yield self._runs[number][1]
            number += 1

    def holds(self, first: int, last: int) -> bool:
        return first < last and all(origin.is_written for origin in self.origins(first, last))


def _written_stretches(text: Traced) -> Iterator[tuple[int, int]]:
    """Yield the maximal character ranges that the template wrote."""
    place, first = 0, -1
    for length, origin in runs_of(text):
        if origin.is_written and first < 0:
            first = place
        elif not origin.is_written and first >= 0:
            yield first, place
            first = -1
        place += length
    if first >= 0:
        yield first, place


def _name_within(text: str, token: TokenSpan) -> tuple[int, int]:
    """Return the position of a token's name within its match: some tokens also match the spaces around the name."""
    taken = text[token.first : token.last]
    if not taken.strip():
        return token.first, token.last
    first = token.first + len(taken) - len(taken.lstrip())
    return first, max(first, token.last - (len(taken) - len(taken.rstrip())))


def _place(pieces: list[tuple[int, int]], at: int) -> int:
    begin, original = pieces[bisect_right(pieces, (at, 1 << 60)) - 1]
    return original + at - begin


def _added_token(values: dict[str, Any]) -> tokenizers.AddedToken:
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    return tokenizers.AddedToken(values["content"], special=False, **{flag: values[flag] for flag in flags})


def _excerpt(text: str, first: int, last: int) -> str:
    return repr(str.__str__(text)[max(0, first - 12) : last + 12])
