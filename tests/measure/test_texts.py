"""Counts over texts move with the changes made to the texts."""

from __future__ import annotations

import math
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workbench.experiment.experiment import Experiment
from workbench.measure.compare_variants import measure_variants
from workbench.measure.predictions import predict_variants
from workbench.measure.sampled_texts import (
    HELD_OUT_ROW,
    LOOP_ROW,
    MIN_LOOP_REPEATS,
    MIN_LOOP_SPAN,
    RANDOM_ROW,
    distinct_ngram_fraction,
    ends_in_loop,
    entropy,
    token_surprisal,
)

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=9)


@given(before=st.lists(st.integers(0, 9), max_size=30), stretch=TOKENS)
def test_a_stretch_again_and_again_is_a_loop(before: list[int], stretch: list[int]) -> None:
    assert ends_in_loop(before + stretch * max(MIN_LOOP_REPEATS, MIN_LOOP_SPAN))
    assert not ends_in_loop(before + stretch * MIN_LOOP_SPAN + [99])


def test_no_loop_where_nothing_repeats_or_too_little() -> None:
    assert not ends_in_loop(list(range(50)))
    assert not ends_in_loop([1, 2, 3, 4, 5, 5, 5])  # three of a kind are no loop yet


@given(ids=st.lists(st.integers(0, 5), min_size=4, max_size=40), n=st.integers(1, 4))
def test_shares_of_different_grams(ids: list[int], n: int) -> None:
    assert 0 < distinct_ngram_fraction(ids, n) <= 1
    assert distinct_ngram_fraction(ids * 2, n) <= distinct_ngram_fraction(ids, n) or n > 1
    assert distinct_ngram_fraction([7] * len(ids), n) == 1 / (len(ids) - n + 1)


def test_bits_and_entropy() -> None:
    even = torch.zeros(5, 8)
    assert entropy(even) == pytest.approx(3)
    assert token_surprisal(even, [0, 1, 2, 3, 4])[0] == pytest.approx(15)
    sure = torch.full((2, 4), -math.inf).index_fill(1, torch.tensor([1]), 0.0)
    assert token_surprisal(sure, [1, 1]) == (pytest.approx(0), pytest.approx(0), 1.0)


def test_texts_of_the_demo_model() -> None:
    variants = {
        "greedy": {"sampling.temperature": 0},
        "cool": {"sampling.temperature": 0.5},
        "free": {},
        "hot": {"sampling.temperature": 3},
        "two": {"sampling.top_k": 2},
    }
    work = {"kind": "texts", "prompts": 2, "prompt_tokens": 24, "output_tokens": 24, "repeats": 2}
    asked = Experiment.from_values({"question": "?", "model": {"name": "demo"}, "backend": "eager", "workload": work}
                          | {"variants": variants})  # fmt: skip
    prediction = cast(dict, predict_variants(asked))
    drawn = [prediction["variants"][name]["drawn_entropy"] for name in ("greedy", "cool", "free", "hot")]
    assert drawn == sorted(drawn) and drawn[0] == 0
    assert prediction["variants"]["two"]["drawn_entropy"] <= 1
    found = measure_variants(asked, lambda line: None, prediction)
    rows = {row["variant"]: row for row in found.rows}
    assert rows[LOOP_ROW]["looped"] == 1 and rows[LOOP_ROW]["repeated_4"] > 0.5 > rows[RANDOM_ROW]["repeated_4"]
    assert rows[RANDOM_ROW]["bits_per_byte"] > rows["hot"]["bits_per_byte"] > rows["free"]["bits_per_byte"]
    assert rows["greedy"]["bits_a_token"] < rows[HELD_OUT_ROW]["bits_a_token"]
    assert rows["greedy"]["most_likely"] > 0.9 > rows["hot"]["most_likely"]
    assert all(rows[name]["repeated_alike"] for name in variants)
    assert len(found.tables["texts"]) == 2 * (3 + len(variants))
