"""Cases of operators: names that tell them apart, and costs that are what must be moved."""

from __future__ import annotations

import pytest
import torch

import compiled_kernels
from compiled_kernels.cases import case_of, suite_of, suites
from compiled_kernels.masks import Causal


def test_cases_of_one_operator_have_different_names() -> None:
    for suite in suites():
        names = [case.name for case in suite.cases]
        assert len(set(names)) == len(names), suite.operator
    assert {suite.operator for suite in suites()} <= set(compiled_kernels.__all__)


@pytest.mark.parametrize("name", ["decode window float32", "mixed window and sinks float32", "mixed float32"])
def test_attention_moves_what_is_seen_and_no_more(name: str) -> None:
    case = case_of(suite_of("paged_attention"), name)
    of = case.arguments
    mask, heads = of.get("mask", Causal()), of["num_kv_heads"] * of["queries_per_kv"]
    looks, read = 0, 0
    for context, span in zip(of["contexts"], of["spans"], strict=True):
        pairs = [
            (query, key)
            for query in range(context - span, context)
            for key in range(context)
            if bool(mask(torch.tensor(query), torch.tensor(key)))
        ]
        looks, read = looks + len(pairs), read + len({key for _, key in pairs})
    assert case.cost.flops == 4 * looks * heads * of["dim"]
    assert case.cost.bytes == 4 * of["dim"] * (2 * read * of["num_kv_heads"] + 2 * sum(of["spans"]) * heads)
