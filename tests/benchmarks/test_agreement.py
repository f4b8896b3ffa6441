"""The comparison of logits: what must pass passes, and a wrong model does not."""

from __future__ import annotations

import pytest
import torch

from benchmarks.peers.agreement import QUANT_GROUP_COLUMNS, LogitsReference, bound_for, relative_error, round_to_format
from benchmarks.peers.catalog import FORMATS
from benchmarks.peers.scripts import gguf_layout
from tests.benchmarks.fakes import TINY, noise, reference
from workbench.model.hf.weights import random_weights
from workbench.model.transformer import Transformer
from workbench.oracle import naive


def last_logits(state: dict[str, torch.Tensor], dtype: torch.dtype) -> list[float]:
    model = Transformer.from_state(TINY, {name: value.to(dtype) for name, value in state.items()})
    return naive.logits(model, torch.tensor(reference().prompt))[-1].double().tolist()


def state_of(format: str) -> dict[str, torch.Tensor]:
    kind = torch.float32 if format == "float32" else torch.bfloat16
    return {name: value.float() for name, value in random_weights(TINY, kind, 0).items()}


@pytest.mark.parametrize("format", FORMATS)
def test_exact_and_rounded_logits_pass_and_others_do_not(format: str) -> None:
    found = reference(FORMATS)
    exact = found.exact["float32" if format == "float32" else "bfloat16"]
    assert not found.disagreement(format, {"prefill": exact.tolist()})["reason"]
    rounded = {name: round_to_format(format, value) for name, value in state_of(format).items()}
    kind = torch.float32 if format == "float32" else torch.bfloat16
    assert not found.disagreement(format, {"prefill": last_logits(rounded, kind)})["reason"]
    for wrong in ([0.0] * TINY.vocab_size, noise(), exact.flip(0).tolist(), [float("nan")] * TINY.vocab_size):
        verdict = found.disagreement(format, {"prefill": exact.tolist(), "decode": wrong})
        assert verdict["reason"].startswith("decode logits")


@pytest.mark.parametrize("format", ["float32", "bfloat16"])
@pytest.mark.parametrize("damage", ["permuted", "eps", "one layer"])
def test_a_model_that_is_slightly_wrong_does_not_pass(format: str, damage: str) -> None:
    state = state_of(format)
    name = "blocks.0.attention.qkv.weight"
    if damage == "permuted":
        query = state[name][:64].numpy()
        state[name] = torch.cat([torch.from_numpy(gguf_layout.permuted(query, 4)), state[name][64:]])
    elif damage == "eps":
        state["norm.weight"] = state["norm.weight"] * 1.02
    else:
        state["blocks.1.feedforward.down.weight"] = state["blocks.1.feedforward.down.weight"] * 0
    kind = torch.float32 if format == "float32" else torch.bfloat16
    assert reference().disagreement(format, {"prefill": last_logits(state, kind)})["reason"]


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_null_with_its_reason(wrong: float) -> None:
    found = reference()
    logits = [wrong, wrong, *found.exact["bfloat16"].tolist()[2:]]
    verdict = found.disagreement("bfloat16", {"prefill": logits})
    assert verdict["errors"] == {"prefill": None} and verdict["reason"] == "prefill logits: 2 of 257 are not finite"


def test_other_faults_are_reported() -> None:
    found = reference()
    assert "the vocabulary has 257" in found.disagreement("bfloat16", {"prefill": [0.0]})["reason"]
    assert found.disagreement("bfloat16", {})["reason"] == "no logits were given"


def test_bounds_grow_with_coarseness_and_zero_never_passes() -> None:
    bounds = LogitsReference(TINY, 0, FORMATS).bounds
    order = [bounds[format] for format in FORMATS]
    assert order == sorted(order) and order[0] < 1e-4
    assert bound_for(0.0) > 0 and bound_for(5.0) < relative_error(torch.zeros(3), torch.ones(3))


def test_rounding_is_what_it_says() -> None:
    values = torch.randn(6, 2 * QUANT_GROUP_COLUMNS, generator=torch.Generator().manual_seed(0))
    int8, int4 = (round_to_format(format, values) for format in ("int8", "int4"))
    for row in int8:
        assert len((row / row.abs().max() * 127).round(decimals=3).unique()) <= 255
    steps = (
        int4.unflatten(1, (-1, QUANT_GROUP_COLUMNS))
        / values.unflatten(1, (-1, QUANT_GROUP_COLUMNS)).abs().amax(-1, keepdim=True)
        * 7
    )
    torch.testing.assert_close(steps, steps.round(), atol=1e-4, rtol=0)
    assert steps.abs().max() <= 7.001
    assert 0 < relative_error(int8, values) < relative_error(int4, values) < 0.2
    assert torch.equal(round_to_format("int4-head", values), int4)
    assert torch.equal(round_to_format("int4", values[0]), values[0])
