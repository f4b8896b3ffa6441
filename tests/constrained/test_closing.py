"""The way to an answer's end: it is one, whatever came before, and it is spelt in the fewest tokens."""

from __future__ import annotations

import itertools
import json
import random
import re

import jsonschema
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from experiments.random_schemas import draw_schema
from tests.prompt.samples import byte_level, trained
from tests.thorough import tries
from workbench.constrained.closing import EndSearch, NodeBudget, is_end
from workbench.constrained.grammar import GrammarVocabulary
from workbench.constrained.shortest_match import shortest_match
from workbench.constrained.spelling import BYTES, Speller, Spelling
from workbench.response_format import JSONSchema, Regex

VOCABULARY = GrammarVocabulary(byte_level())


@settings(max_examples=tries(60))
@given(number=st.integers(0, 5000), seed=st.integers(0, 999), count=st.integers(0, 60))
def test_every_state_has_an_end_after_which_the_answer_is_valid(number: int, seed: int, count: int) -> None:
    """A grammar is walked by random symbols; from where that leads, the end that is found is one."""
    schema = draw_schema(number)[1]
    grammar = VOCABULARY.compile(JSONSchema(json_schema=schema, max_whitespace=0))
    matcher, dice = grammar.symbols.deep_copy(), random.Random(seed)
    walked: list[int] = []
    for _ in range(count):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = [symbol for symbol in range(BYTES) if mask >> symbol & 1]
        if not allowed:
            break
        walked.append(dice.choice(allowed))
        assert matcher.consume_tokens(walked[-1:])
    search = EndSearch(matcher, VOCABULARY.end_symbol, [grammar.shortest], grammar.hints)
    parts = EndSearch(matcher, VOCABULARY.end_symbol, [grammar.shortest], grammar.hints)
    assert search.run()
    way = search.way
    if not parts.run(NodeBudget(1)):
        parts.keep_state()
        matcher = matcher.deep_copy()  # what follows here does not reach into that search
    while not parts.run(budget := NodeBudget(3)):
        assert budget.left <= 0
    assert parts.way == way
    assert way is not None and is_end(matcher, way, VOCABULARY.end_symbol)
    assert matcher.validate_tokens(list(way)) == len(way)  # the state is as it was
    jsonschema.validate(json.loads(bytes([*walked, *way])), schema)


@pytest.mark.parametrize(
    ("schema", "wanted"),
    [
        ({}, "0"),
        ({"type": "object", "required": ["a"], "properties": {"a": {"type": "string"}}}, '{"a": ""}'),
        ({"anyOf": [{"type": "array", "minItems": 9, "items": {"type": "null"}}, {"type": "boolean"}]}, "true"),
        ({"enum": ["a long value", "b"]}, '"b"'),
        ({"type": "array", "items": {"type": "string"}}, "[]"),
        ({"type": "integer", "minimum": 1234}, "2000"),
        ({"type": "string", "pattern": "xyz"}, '"xyz"'),
    ],
    ids=str,
)
def test_the_way_from_the_start_is_the_shortest_answer(schema: dict, wanted: str) -> None:
    shortest = VOCABULARY.compile(JSONSchema(json_schema=schema)).shortest
    assert bytes(shortest).decode() == wanted


def test_free_text_that_needs_a_word_finds_it() -> None:
    assert bytes(VOCABULARY.compile(Regex(regex=".*END[0-9]{3}")).shortest) == b"END000"


LITERALS = {"a": "a", "/": "/", r"\/": "/", r"\\": "\\", "\n": "\n", r"\n": "\n"}  # in a regex, and what they match


@settings(max_examples=tries(180), deadline=None)
@given(st.lists(st.sampled_from(list(LITERALS)), min_size=1, max_size=12))
@example([r"\\", "/"])
def test_regex_matches_its_own_slashes_and_backslashes(pieces: list[str]) -> None:
    assert bytes(VOCABULARY.compile(Regex(regex="".join(pieces))).shortest).decode() == "".join(
        LITERALS[piece] for piece in pieces
    )


@settings(max_examples=tries(60))
@given(st.text("abc", min_size=1, max_size=9), st.sets(st.text("abc", min_size=1, max_size=4), max_size=8))
def test_spelling_takes_the_fewest_tokens(text: str, words: set[str]) -> None:
    tokens = {word.encode(): id for id, word in enumerate(sorted(words))}
    spelt = Speller(tokens, {}).spell(tuple(text.encode()))
    fewest = next(
        (count for count in range(1, len(text) + 1)
         for cuts in itertools.combinations(range(1, len(text)), count - 1)
         if all(text[a:b] in words for a, b in itertools.pairwise((0, *cuts, len(text))))),
        None,
    )  # fmt: skip
    assert (None if spelt is None else len(spelt)) == fewest
    if spelt is not None:
        names = {id: word for word, id in tokens.items()}
        assert b"".join(names[id] for id in spelt).decode() == text


@settings(max_examples=tries(60))
@given(st.lists(st.text("abc", max_size=9), min_size=1, max_size=6), st.sets(st.text("abc", min_size=1, max_size=4)))
def test_a_spelling_that_is_kept_is_that_of_the_new_symbols(texts: list[str], words: set[str]) -> None:
    speller = Speller({word.encode(): id for id, word in enumerate(sorted(words))}, {})
    kept = Spelling(speller)
    for text in texts:
        anew = speller.spell(tuple(text.encode()))
        assert kept.count(text.encode()) == (None if anew is None else len(anew))
        assert kept.first(text.encode()) == (anew[0] if anew else None)
        assert not text or speller.has_each(text.encode()) == all(each in words for each in text)


def test_control_tokens_are_spelt_by_themselves() -> None:
    vocabulary = GrammarVocabulary(trained())
    tool = vocabulary.symbol_of[trained().special_token_ids["<|tool|>"]]
    spelt = vocabulary.speller.spell((*b"ab", tool, *b"c"))
    assert spelt is not None and trained().decode(spelt, special=True) == "ab<|tool|>c"
    assert all(each not in spelt for each in vocabulary.speller.without([spelt[0]]).tokens.values() if each == spelt[0])


@settings(max_examples=tries(80))
@given(st.from_regex(r"([a-c]|\\d|\[a-z_\]|\(ab\|c\)|x\{2,3\}|\.|\\\.|y\*|z\+|\[^a0\]){1,6}", fullmatch=True))
def test_a_short_match_matches(pattern: str) -> None:
    found = shortest_match(pattern)
    assert found is not None and re.fullmatch(pattern, found)
