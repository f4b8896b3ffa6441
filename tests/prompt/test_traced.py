"""Traced texts: every operation gives the text that `str` gives, and no content's character passes for a literal."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.thorough import tries
from workbench.prompt.traced import COMPUTED, TEMPLATE, Origin, Traced, follow, joined, origin_of, plain, runs_of
from workbench.prompt.traced_json import to_json

CONTENT = Origin("message", 0)
LITERALS, CONTENTS = "abAB -", "xyXYßŉΣéİ\n\t"  # no letter of one becomes a letter of the other in any case
CHARACTERS = {
    *CONTENTS,
    *(c for letter in CONTENTS for case in (str.upper, str.lower, str.title, str.casefold) for c in case(letter)),
}


def _traced(parts: list[tuple[bool, str]]) -> Traced:
    return joined(Traced(text, TEMPLATE if literal else CONTENT) for literal, text in parts)


def _part(literal: bool) -> st.SearchStrategy[tuple[bool, str]]:
    return st.text(st.sampled_from(LITERALS if literal else CONTENTS), max_size=4).map(lambda text: (literal, text))


texts = st.lists(st.booleans().flatmap(_part), max_size=4).map(_traced)
places = st.none() | st.integers(-6, 6)
OPERATIONS: dict[str, Any] = {
    "strip": lambda t, a, b, n: t.strip(a or None),
    "lstrip": lambda t, a, b, n: t.lstrip(),
    "rstrip": lambda t, a, b, n: t.rstrip(b or None),
    "lower": lambda t, a, b, n: t.lower(),
    "upper": lambda t, a, b, n: t.upper(),
    "title": lambda t, a, b, n: t.title(),
    "capitalize": lambda t, a, b, n: t.capitalize(),
    "swapcase": lambda t, a, b, n: t.swapcase(),
    "casefold": lambda t, a, b, n: t.casefold(),
    "add": lambda t, a, b, n: a + t + b,
    "multiply": lambda t, a, b, n: t * n + 2 * t,
    "replace": lambda t, a, b, n: t.replace(a[:1], b, n),
    "split": lambda t, a, b, n: b.join(t.split(a[:1] or None, n)),
    "words": lambda t, a, b, n: a.join(t.split()),
    "rsplit": lambda t, a, b, n: b.join(t.rsplit(a[:1] or None, n)),
    "spaces": lambda t, a, b, n: b.join(t.rsplit(None, n)),
    "splitlines": lambda t, a, b, n: a.join(t.splitlines(n > 1)),
    "partition": lambda t, a, b, n: b.join(t.partition(a or b or "x")),
    "rpartition": lambda t, a, b, n: b.join(t.rpartition(a or b or "x")),
    "percent": lambda t, a, b, n: (t.replace("%", "") + "%s%d") % (a, n),
    "named": lambda t, a, b, n: (t.replace("%", "") + "%(p)s %%") % {"p": b},
    "width": lambda t, a, b, n: (t.replace("%", "") + "%-5s%r") % (a, n),
    "slice": lambda t, a, b, n: t[n - 2 : n + 3],
    "step": lambda t, a, b, n: t[::-1] + t[:: n + 1],
    "letters": lambda t, a, b, n: b.join(each for each in t),
    "place": lambda t, a, b, n: t[n] if n < len(t) else t,
    "prefix": lambda t, a, b, n: t.removeprefix(a).removesuffix(b),
}


@settings(max_examples=tries(400), deadline=None)
@given(
    text=texts,
    steps=st.lists(st.tuples(st.sampled_from(sorted(OPERATIONS)), texts, texts, st.integers(0, 3)), max_size=4),
)
def test_texts_are_those_of_str_and_contents_stay_contents(
    text: Traced, steps: list[tuple[str, Traced, Traced, int]]
) -> None:
    expected = plain(text)
    for name, a, b, number in steps:
        text = OPERATIONS[name](text, a, b, number)
        expected = OPERATIONS[name](expected, plain(a), plain(b), number)
        assert type(text) is Traced and plain(text) == expected, name
        assert sum(length for length, _ in runs_of(text)) == len(text)
        origins = [origin for length, origin in runs_of(text) for _ in range(length)]
        wrong = [c for c, o in zip(expected, origins, strict=True) if o == TEMPLATE and c in CHARACTERS - set(LITERALS)]
        assert not wrong, name


@settings(max_examples=tries(200), deadline=None)
@given(
    data=st.data(),
    indent=st.none() | st.integers(0, 3) | st.just("\t"),
    ascii_only=st.booleans(),
    ordered=st.booleans(),
)
def test_json_is_that_of_the_library(data: st.DataObject, indent: Any, ascii_only: bool, ordered: bool) -> None:
    leaves = texts | st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False)
    values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3))
    value = data.draw(values)
    text = to_json(value, ensure_ascii=ascii_only, indent=indent, sort_keys=ordered)
    assert isinstance(text, Traced)
    assert plain(text) == json.dumps(plain(value), ensure_ascii=ascii_only, indent=indent, sort_keys=ordered)
    keyed = to_json({1: text, None: [], False: {}, 1.5: ()}, separators=(",", ":"))
    given = {1: plain(text), None: [], False: {}, 1.5: ()}
    assert plain(keyed) == json.dumps(given, separators=(",", ":"), ensure_ascii=False)


@pytest.mark.parametrize(
    ("inputs", "origin"),
    [
        ([Traced("a", TEMPLATE)], TEMPLATE),
        ([Traced("x", CONTENT), 3, [Traced("y", CONTENT)]], CONTENT),
        ([Traced("x", CONTENT), Traced("a", TEMPLATE)], COMPUTED),
        ([3], COMPUTED),
        ([], COMPUTED),
        (["a"], COMPUTED),
        ([Traced("x", CONTENT), Traced("user", Origin("role"))], CONTENT),
        ([b"x"], COMPUTED),
        ([{Traced("k", CONTENT): 1}], CONTENT),
        ([Traced("x", CONTENT), "a"], COMPUTED),
        ([Traced("", CONTENT)], COMPUTED),
    ],
)
def test_what_is_not_followed_is_no_literal_of_contents(inputs: list[Any], origin: Origin) -> None:
    assert origin_of(inputs) == origin
    assert follow("z", inputs)._runs == ((1, origin),)
