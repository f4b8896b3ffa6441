"""Weights in panels: when they are taken, what stays, and what is compiled for them. Their rows are tests/laws'."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from compiled_kernels import Backend, backend_problems
from compiled_kernels.blocked import in_panels
from compiled_kernels.result_cache import ResultCache
from tests.engine.kinds import WIDE
from tests.engine.tiny import layer, request, runner_of, spec_of, weights_of
from tests.helpers.events import of
from workbench.engine.runner import generate
from workbench.executors import layout
from workbench.executors.layout import choose_weight_layout
from workbench.executors.programs.decode_step import DecodeProgram
from workbench.executors.programs.prefill import PrefillProgram
from workbench.executors.reference import CacheLayout
from workbench.executors.select import Backends
from workbench.model.linear import Linear
from workbench.model.quantized import WeightFormat
from workbench.model.spec import ModelSpec
from workbench.model.transformer import Transformer
from workbench.units import format_seconds

problem = backend_problems()[Backend.MLIR]
pytestmark = pytest.mark.skipif(problem is not None, reason=f"backend mlir: {problem}")

MLIR = Backends.uniform(Backend.MLIR, "asked for")
AUTO = Backends(Backend.MLIR, Backend.EAGER, Backend.MLIR, "auto")
NARROW = spec_of(layer(4, 2, 16))


def model_of(spec: ModelSpec, dtype: torch.dtype, format: str = "dense") -> Transformer:
    stored = WeightFormat.parse(format, quant_group=32)
    return Transformer.from_state(spec, weights_of(spec, dtype, 5), Backend.MLIR, stored)


def in_panels_all(model: Transformer) -> bool:
    (found,) = {in_panels(part.weight) for part in of(Linear, model.blocks.modules())}
    return found


def held(model: Transformer) -> CacheLayout:
    return CacheLayout(model.cache_shapes(), 4, model.dtype)


def test_what_was_compiled_is_counted_on_after_a_change() -> None:
    model = model_of(WIDE, torch.float32)
    choose_weight_layout(model, MLIR, held(model), auto=False)
    ours = runner_of(model, backends=MLIR)
    programs = ours.core.executor.programs
    programs["rows"].max_tokens, prefills = 0, programs["prefill"]  # type: ignore[attr-defined]
    generate(ours, [request("a", 9, 1)])
    before = prefills.made
    assert before == len(prefills.artifacts) > 0
    part = next(part for part in model.modules() if part._parameters.get("weight") is not None)
    copied = part._parameters["weight"].detach().clone()  # pyright: ignore[reportOptionalMemberAccess]
    part.weight = torch.nn.Parameter(copied, requires_grad=False)
    generate(ours, [request("b", 9, 1)])
    assert prefills.made == 2 * before == 2 * len(prefills.artifacts)


def test_the_plain_weights_are_still_there() -> None:
    plain, ours = model_of(WIDE, torch.bfloat16), model_of(WIDE, torch.bfloat16)
    backends = choose_weight_layout(ours, MLIR, held(ours), auto=False)
    assert backends.blocks is backends.attention is Backend.MLIR
    assert in_panels_all(ours)
    before, after = (model.dense_state(torch.float32) for model in (plain, ours))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert sum(map(torch.Tensor.numel, ours.parameters())) == sum(map(torch.Tensor.numel, plain.parameters()))
    assert (plain.weight_bytes, plain.bytes_per_weight) == (ours.weight_bytes, ours.bytes_per_weight)
    for panels in (True, False, False):
        ours.use_panels(panels)
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs), "they do not go back row by row"


@pytest.mark.parametrize(("spec", "format"), [
    (NARROW.model_copy(update={"hidden_size": 48}), "dense"), (NARROW.model_copy(update={"hidden_size": 64}), "dense"),
])  # fmt: skip
def test_what_does_not_fit_stays_row_by_row(spec: ModelSpec, format: str) -> None:
    model = model_of(spec, torch.float32, format)
    assert choose_weight_layout(model, MLIR, held(model), auto=False) is MLIR
    assert not in_panels_all(model)


@pytest.mark.parametrize(("panels", "torchs"), [(1.0, 2.0), (1.0, 0.9), (2.0, 1.0)])
def test_auto_takes_panels_unless_torchs_product_is_clearly_quicker(
    panels: float, torchs: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(layout, "_seconds", lambda linear, dtype: (panels, torchs, True))
    taken = torchs > 0.8 * panels
    for _ in range(2):  # tried, then as it is remembered
        model, kept = model_of(WIDE, torch.float32), ResultCache(tmp_path / "layouts.json")
        backends = choose_weight_layout(model, AUTO, held(model), auto=True, remembered=kept)
        assert backends.blocks is (Backend.MLIR if taken else Backend.EAGER)
        assert f"{format_seconds(panels)} from panels, {format_seconds(torchs)} by torch" in backends.reason
        assert in_panels_all(model) is taken
        monkeypatch.setattr(layout, "_seconds", None)


def test_auto_checks_what_panels_give(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(layout, "_seconds", lambda linear, dtype: (1.0, 2.0, True))
    for at, program in (("decode", DecodeProgram), ("prefill", PrefillProgram)):
        model, kept = model_of(WIDE, torch.float32), ResultCache(tmp_path / f"{at}.json")
        spoiled = lambda self, batch, _, call=program.__call__: call(self, batch) + 0.1  # noqa: E731
        with monkeypatch.context() as patch:
            patch.setattr(program, "__call__", spoiled)
            backends = choose_weight_layout(model, AUTO, held(model), auto=True, remembered=kept)
        assert backends.blocks is Backend.EAGER and not in_panels_all(model)
        assert "row by row: a product of 512 tokens" in backends.reason
        assert f"logits of a {at} are 0.1 away" in backends.reason


def test_auto_leaves_a_backend_that_was_refused() -> None:
    model = model_of(WIDE, torch.float32)
    refused = replace(AUTO, attention=Backend.EAGER)
    assert choose_weight_layout(model, refused, held(model), auto=True) is refused and not in_panels_all(model)


@pytest.mark.parametrize("format", ["dense", "int8"])
def test_the_largest_product_is_timed(format: str) -> None:
    model = model_of(WIDE, torch.bfloat16, format)
    linear = of(Linear, model.blocks.modules())[0]
    ours, torchs, _ = layout._seconds(linear, model.dtype)
    assert ours > 0 and torchs > 0


def test_a_damaged_memory_is_none() -> None:
    assert layout._sound({"panels": 1.0, "torch": "x", "problem": ""}) is None
    assert layout._sound({"panels": 1.0}) is None and layout._sound(None) is None
    assert layout._sound(layout.PanelTrial(1.0, 2.0, "why")._asdict()) == layout.PanelTrial(1.0, 2.0, "why")
