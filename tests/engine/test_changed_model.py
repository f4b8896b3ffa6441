"""A model changed in place runs as it is now, on every backend; what is compiled is shared only by blocks alike."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from typing import cast

import pytest
import torch
from torch import nn

from compiled_kernels import Backend, backend_problems
from compiled_kernels.masks import SlidingWindow
from tests.engine.tiny import in_eights, layer, model_of, request, runner_of, spec_of
from tests.helpers import recorded
from tests.thorough import THOROUGH
from workbench.engine.runner import Runner, generate
from workbench.executors.guards import compile_key
from workbench.executors.select import Backends
from workbench.model.feedforward import GatedMLP
from workbench.model.hf.weights import random_weights
from workbench.model.layers import Attention, TransformerBlock, attention_of
from workbench.model.quantized import WeightFormat
from workbench.model.spec import ModelSpec
from workbench.model.transformer import Transformer
from workbench.request import Request

problem = backend_problems()[Backend.INDUCTOR]


def rows_of(runner: Runner, asked: Request) -> torch.Tensor:
    """Every sampled row of a request, in order: [token, vocab]."""
    return torch.stack([*recorded.rows_of(runner, [asked]).values()])


class Halved(Attention):
    def attend(self, *arguments) -> torch.Tensor:
        return super().attend(*arguments) / 2


FACTOR = 2.0


class Scaled(nn.Module):
    """Third-party code, which reads a global."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * FACTOR


def windowed(model: Transformer) -> None:
    attention_of(model.blocks[0]).mask = SlidingWindow(5)


def halved(model: Transformer) -> None:
    block = cast(TransformerBlock, model.blocks[1])
    assert isinstance(block.attention, Attention)
    made = Halved(block.attention.spec, model.spec.hidden_size, model.backend, model.format)
    made.load_state_dict(block.attention.state_dict())
    block.attention = made.requires_grad_(False)


def scaled(model: Transformer) -> None:
    block = cast(TransformerBlock, model.blocks[1])
    block.feedforward = Scaled(block.feedforward)  # type: ignore[assignment]


def colder(model: Transformer) -> None:
    attention_of(model.blocks[1]).scale *= 3


def other_weights(model: Transformer) -> None:
    down = cast(GatedMLP, cast(TransformerBlock, model.blocks[0]).feedforward).down
    down.weight = nn.Parameter(-down.weight, requires_grad=False)


CHANGES = {
    # One after the other: a change costs graphs.
    Backend.INDUCTOR: [windowed, *([halved] if THOROUGH else []), scaled, other_weights],
    Backend.MLIR: [windowed, colder, other_weights],
}


@pytest.mark.parametrize("backend", CHANGES)
def test_a_block_changed_in_place_runs_as_it_is_now(backend: Backend) -> None:
    """After its graphs were compiled and used; the block beside it shares the old ones."""
    if found := backend_problems()[backend]:
        pytest.skip(f"backend {backend}: {found}")
    spec, asked = spec_of(layer(4, 2), layer(4, 2)), request("a", 19, 4)
    blocks = Backend.EAGER if backend is Backend.MLIR else backend
    model, plain = model_of(spec, backend=blocks), model_of(spec)
    runner, exact = runner_of(model, backends=Backends(backend, blocks, blocks, "as it is tested")), runner_of(plain)
    before = rows_of(runner, asked)
    for change in CHANGES[backend]:
        change(model)
        change(plain)
        now, expected = rows_of(runner, asked), rows_of(exact, asked)
        assert not torch.allclose(before[0], expected[0], atol=1e-4), "the change must be one"
        torch.testing.assert_close(now, expected, rtol=1e-4, atol=1e-5)
        before = now


@pytest.mark.skipif(
    backend_problems()[Backend.MLIR] is not None, reason=f"backend mlir: {backend_problems()[Backend.MLIR]}"
)
@pytest.mark.parametrize("change", [halved, scaled])
def test_mlir_refuses_parts_that_it_does_not_know(change: Callable[[Transformer], None]) -> None:
    model = model_of(spec_of())
    runner = runner_of(model, backends=Backends(Backend.MLIR, Backend.EAGER, Backend.EAGER, "as it is tested"))
    rows_of(runner, request("a", 5, 3))
    change(model)
    done = generate(runner, [request("a", 5, 3)])["a"]
    assert done.reason == "error" and f"to decode with a {change.__name__.title()}; load" in done.error


@pytest.mark.skipif(problem is not None, reason=f"inductor backend: {problem}; install a compiler to run this")
def test_guards_stay_on_the_code_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(spec_of(), backend=Backend.INDUCTOR)
    scaled(model)
    runner = runner_of(model)
    first = rows_of(runner, request("a", 5, 1))
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 3.0)
    assert not torch.equal(first, rows_of(runner, request("a", 5, 1)))


def test_what_may_share_a_graph() -> None:
    """Blocks alike are equal; another format, window, width, type or place of the weights is not."""

    def kind(spec: ModelSpec, format: str = "dense", dtype: torch.dtype = torch.float32) -> Hashable:
        model = Transformer.from_state(
            in_eights(spec), random_weights(in_eights(spec), dtype), format=WeightFormat.parse(format, quant_group=8)
        )
        found = compile_key(model.blocks[0])
        hash(found)
        return found

    spec = spec_of(layer(4, 2))
    assert kind(spec) == kind(spec_of(layer(4, 2), tied=False)) is not None
    others = [
        kind(spec), kind(spec, "int8"), kind(spec, "int4"), kind(spec, dtype=torch.bfloat16),
        kind(spec_of(layer(4, 2, sliding_window=5))), kind(spec_of(layer(4, 2, sliding_window=6))),
        kind(spec_of(layer(4, 1))), kind(spec_of(layer(4, 2, bias=True))),
    ]  # fmt: skip
    assert None not in others and len(set(others)) == len(others)
    for change in (halved, scaled):
        model = model_of(spec_of())
        change(model)
        assert compile_key(model.blocks[0]) is not None and compile_key(model.blocks[1]) is None
    model = model_of(spec_of())
    cast(TransformerBlock, model.blocks[0]).attention.mask = lambda query, key: key <= query  # type: ignore[assignment]
    assert compile_key(model.blocks[0]) is None
