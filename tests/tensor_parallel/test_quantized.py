"""Quantized caches and activations on ranks, against one process, by bounds that are derived and not chosen."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from compiled_kernels import Backend
from tests.engine.tiny import runner_of
from tests.helpers import recorded
from tests.helpers.recorded import Rows
from tests.tensor_parallel.bound import allowed
from tests.tensor_parallel.in_threads import logits_of_ranks, runner_of_ranks
from tests.tensor_parallel.specs import DENSE, TEXT, weights
from workbench.engine.runner import Runner
from workbench.executors.reference import FLIPPED
from workbench.model.linear import Linear
from workbench.model.quantized import WeightFormat, quantize
from workbench.model.shapes import named_shape
from workbench.model.transformer import Transformer
from workbench.request import Request, SamplingParameters

SPEC = named_shape("tiny")
GIVEN: dict[str, Any] = {"page_size": 8, "pages": 24, "max_num_batched_tokens": 16}


def rows_of(runner: Runner) -> Rows:
    """Return the logits after each text that was sampled from; texts are many times as long as what stays dense."""
    draw, given = random.Random(0), SamplingParameters(temperature=0, max_tokens=12, ignore_eos=True)
    texts = (tuple(draw.randrange(4, 100) for _ in range(12 + 9 * i)) for i in range(3))
    return recorded.rows_of(runner, [Request(f"r{i}", text, given) for i, text in enumerate(texts)])


def farthest(ours: Rows, theirs: Rows) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[text].double() - theirs[text].double()).abs().max()) for text in ours)


@pytest.mark.parametrize("format", ["int8", "int4", "fp8"])
def test_a_quantized_cache_is_cut_by_heads(format: str) -> None:
    """Each head is quantized by itself, so that only rounding differs. In float64 it does not reach the codes (a number
    would have to lie within 1e-13 of the border of two), and what is left is the bound of float64: that of float32,
    times the ratio of both units, on both sides. In float32 a number near a border may become either code."""
    exact = weights(SPEC, torch.float64)
    cache = {"format": format, "quant_group": 8, "residual_length": 4}
    one = runner_of(Transformer.from_state(SPEC, dict(exact)), **GIVEN, cache=cache)
    alone = rows_of(one)
    rounded = rows_of(
        runner_of(
            Transformer.from_state(SPEC, {name: tensor.float() for name, tensor in exact.items()}), **GIVEN, cache=cache
        )
    )
    with runner_of_ranks(SPEC, exact, DENSE, 2, Backend.EAGER, **GIVEN, cache=cache) as shared:
        together = rows_of(shared)
        assert shared.store.bytes * 2 == one.store.bytes
    ratio = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    texts = list(alone.keys() & rounded.keys())
    bound = 2 * ratio * allowed(*(torch.stack([rows[text] for text in texts]) for rows in (rounded, alone)))
    assert farthest(together, alone) <= bound
    dense = rows_of(runner_of(Transformer.from_state(SPEC, dict(exact)), **GIVEN))
    same = dense.keys() & alone.keys()
    assert max(float((dense[text] - alone[text]).abs().max()) for text in same) > 1e6 * bound, "nothing was quantized"


@pytest.mark.parametrize("size", [2, 4])
def test_activations_in_int8_are_quantized_by_each_rank(size: int) -> None:
    """A rank gives its part of a row a scale of its own, at most as large as the whole row's: its numbers are not
    rounded further than those of one process, and both are that far from unquantized ones."""
    format = WeightFormat.parse("int8", activations="int8")
    state = quantize(weights(SPEC, torch.float32), SPEC, format)
    model = Transformer.from_state(SPEC, dict(state), format=format)
    alone = model.logits(TEXT)
    dense = Transformer.from_state(SPEC, model.dense_state(torch.float64)).logits(TEXT)
    for part in model.modules():
        if isinstance(part, Linear):
            part.activations = "float"
    plain = model.logits(TEXT)
    together = logits_of_ranks(SPEC, state, format, size, TEXT)
    change = float((alone - dense).abs().max())
    assert (together - dense).abs().max() <= (1 + FLIPPED) * change + allowed(plain, dense)
    assert change > 100 * allowed(plain, dense), "nothing was quantized"
