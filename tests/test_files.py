"""Whatever bytes a person or a folder brings: they are read, or refused in one line, in bounded memory."""

from __future__ import annotations

import json
import math
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from tests.helpers.hostile_texts import HOSTILE_JSON, HOSTILE_YAML
from tests.helpers.refusals import refuses
from workbench import files
from workbench.errors import WorkbenchError
from workbench.files import MAX_DEPTH, UnreadableText, read_bytes, read_json, read_json_file, read_yaml, read_yaml_file

PAIRS = [(read, words, text) for read, found in ((read_yaml, HOSTILE_YAML), (read_json, HOSTILE_JSON))
         for words, texts in found.items() for text in texts]  # fmt: skip


@pytest.mark.parametrize(("read", "words", "text"), PAIRS, ids=lambda each: getattr(each, "__name__", repr(each)[:40]))
def test_what_is_hostile_is_refused_in_one_line_and_little_memory(read: Any, words: str, text: str | bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(UnreadableText) as error:
            read(text, "some place")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    message = str(error.value)
    assert message.startswith("some place: ") and words in message and "\n" not in message and len(message) < 300
    assert peak < 200e6


def test_many_values_are_refused_before_all_of_them_are_built() -> None:
    with pytest.raises(UnreadableText, match=r"more than 250,000 values; give less \(line 1, column 500,000\)"):
        read_yaml("[" + "a," * 2_000_000 + "]")


YAMLISH = st.lists(
    st.sampled_from([
        "a", "b", "1", "0x1f", "-", "- ", ": ", "? ", ",", "[", "]", "{", "}", "&a ", "*a", "&b ", "*b", "<<", "!!int ",
        "!!set ", "!!omap ", "!!timestamp ", "!!python/name:os ", "|", ">", "'", '"', "\\", "\n", "\n  ", " ", "#", "%",
        "---", "...", "~", "yes", "1e999", "2026-13-01", "1:2:3", "\t", "\ufeff", "\x85", "@", "`", "=", ".inf",
    ]),
    max_size=40,
).map("".join)  # fmt: skip


@given(st.binary(max_size=300) | st.text(max_size=300) | YAMLISH)
@example("{a, a: {a: 1}}")
@example("? 1\n? 1")
@example("&a a: *a")
@example("!!binary a: 1")
@example("!!omap [a: 1]")
@example("!!pairs [a]")
@example("=: 1")
@example("!!int")
@example("{? {a: 1} : b}")
@example("!!set [a]")
@example("<<: 1")
@example("<<: [1]")
@example("!!str {a: b}")
@example("!!int {a: b}")
@example("!!timestamp [a]")
@example("!!null {a: b}")
@example("!!seq a")
@example("!!map [a]")
@example("\ufeff[a")
@example("!!set :")
def test_any_text_is_read_or_refused(text: str | bytes) -> None:
    for read in (read_yaml, read_json):
        try:
            found = read(text, "some place")
        except UnreadableText as error:
            assert str(error).startswith("some place: ") and "\n" not in str(error)
        else:
            assert depth(found) <= MAX_DEPTH
            repr(found)
            for value in leaves(found):
                if isinstance(value, int):
                    assert math.isfinite(float(value)) and str(value)


@given(YAMLISH)
def test_both_parsers_read_the_same(text: str) -> None:
    """libyaml's is there for its speed alone."""
    if files.CParser is None or files.NEEDS_PYTHON_PARSER.search(text):
        return
    found = []
    for parser in (files._InC, files._InPython):
        try:
            found.append(repr(parser(text, 10_000).get_single_data()))
        except (yaml.YAMLError, *files.PARSE_ERRORS):
            return
    assert found[0] == found[1]


PLAIN = st.none() | st.booleans() | st.integers(-(10**90), 10**90) | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(PLAIN, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))


@given(VALUES)
def test_all_json_there_is_comes_back(value: Any) -> None:
    assert read_json(json.dumps(value)) == value
    assert (
        read_json(json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass").decode("utf-8", "replace"))
        is not None
        or value is None
    )


@given(VALUES, st.integers(0, 3), st.sampled_from([None, 1]), st.data())
def test_a_key_that_stands_twice_in_json_is_named_with_its_lines(
    value: Any, above: int, indent: int | None, data: st.DataObject
) -> None:
    around = {"x": [0, value, {"key": value, "twice": value, "last": 1}]}
    text = json.dumps(around, indent=indent)
    assert read_json(text) == around
    key = json.dumps("twice") if data.draw(st.booleans()) else '"\\u0074wice"'
    text = "\n" * above + text.replace('"last": 1', f"{key}: 1")
    with pytest.raises(UnreadableText) as error:
        read_json(text)
    lines = [number for number, line in enumerate(text.split("\n"), 1) if '"twice"' in line or key in line]
    first, last = (lines[-2], lines[-1]) if indent else (above + 1, above + 1)
    assert str(error.value) == f"x.2.twice is given twice, in lines {first} and {last}; leave one of them"


def test_aliases_that_stand_for_little_are_fine() -> None:
    assert read_yaml("a: &x {b: 1}\nc: {b: 2, a: *x}\nd: {<<: *x, b: 3}\ne: {<<: *x}") == {
        "a": {"b": 1}, "c": {"b": 2, "a": {"b": 1}}, "d": {"b": 3}, "e": {"b": 1},
    }  # fmt: skip


@pytest.mark.parametrize("read", [read_yaml_file, read_json_file])
def test_a_file_is_bounded_too_and_named(read: Any, tmp_path: Path) -> None:
    file = tmp_path / "written"
    for make, words in (
        (lambda: None, "No such file"),
        (lambda: file.write_bytes(b"[" * 10_000), "nested more than 64 deep"),
        (lambda: file.write_bytes(b"\xff"), "line 1 is not UTF-8"),
    ):
        make()
        with pytest.raises(WorkbenchError) as error:
            read(file)
        assert str(error.value).startswith(f"{file}: ") and words in str(error.value)
    refuses("/dev/zero: too long: more than 1,000 bytes", read_bytes, "/dev/zero", 1000)
    refuses("cannot be read", read_bytes, "a\0b")


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for pair in value.items():
            yield from leaves(list(pair))
    elif isinstance(value, list | tuple | set):
        for each in value:
            yield from leaves(each)
    else:
        yield value


def depth(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth, value.values()), default=0)
    return 1 + max(map(depth, value), default=0) if isinstance(value, list | tuple) else 0
