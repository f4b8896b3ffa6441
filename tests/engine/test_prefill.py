"""Prefill over weights in panels: the oracle's rows, mixed with decodes, over every kind of layer that a step knows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from compiled_kernels import Lane, lane_problems
from compiled_kernels.blocked import in_panels
from compiled_kernels.remembered import Remembered
from tests.engine.tiny import CONTEXT, VOCAB, Oracle, finals, request, runner_of, weights_of
from workbench.cache.format import CacheFormat
from workbench.engine import layout
from workbench.engine.exact import Held
from workbench.engine.executors import MlirExecutor
from workbench.engine.lanes import Lanes
from workbench.engine.layout import lay_out
from workbench.engine.prefill import PrefillExecutor
from workbench.engine.runner import Runner, generate
from workbench.model.parts import Linear
from workbench.model.quantized import WeightFormat
from workbench.model.spec import Attention, LayerKind, ModelSpec, Rotary
from workbench.model.transformer import Transformer
from workbench.request import Request

problem = lane_problems()[Lane.MLIR]
pytestmark = pytest.mark.skipif(problem is not None, reason=f"lane mlir: {problem}")

MLIR = Lanes.one(Lane.MLIR, "asked for")
AUTO = Lanes(Lane.MLIR, Lane.EAGER, Lane.MLIR, "auto")


def layer(hidden: int = 64, bias: bool = False, **slots) -> LayerKind:
    sizes = {"heads": 4, "groups": 2, "dim": 16, "input_bias": bias, "output_bias": bias}
    return LayerKind(attention=Attention(**sizes, **slots), hidden=hidden, feedforward_bias=bias)


def spec_of(*layers: LayerKind, width: int = 64) -> ModelSpec:
    return ModelSpec(name="panels", vocab=VOCAB, width=width, layers=layers, context=CONTEXT, tied=True, end_ids=())


SPEC = spec_of(
    layer(bias=True, qk_norm=True),
    layer(hidden=96, window=9, sinks=2, rotary=Rotary(base=50.0)),
    layer(position="none", sink_logits=True, softcap=1.5),
)


def model_of(
    spec: ModelSpec, dtype: torch.dtype, format: str = "dense", activations: str = "float", lane: Lane = Lane.MLIR
) -> Transformer:
    stored = WeightFormat.of(format, group=32, activations=activations)
    return Transformer.from_state(spec, weights_of(spec, dtype, 5), lane, stored)


def held(model: Transformer) -> Held:
    return Held(model.cache_shapes(), 4, model.dtype)


def runner(model: Transformer, **settings) -> Runner:
    ours = runner_of(model, lanes=MLIR, **settings)
    assert isinstance(ours.executor.rest, PrefillExecutor)  # type: ignore[attr-defined]
    ours.executor.few_tokens = 0  # type: ignore[attr-defined]
    return ours


PROMPTS = {"a": (5, 6), "b": (39, 4), "c": (17, 3), "d": (1, 2)}  # tokens of the prompt, and after it


def requests() -> list[Request]:
    return [request(name, prompt, most) for name, (prompt, most) in PROMPTS.items()]


@pytest.mark.parametrize(
    ("dtype", "format", "activations"),
    [(torch.float32, "dense", "float"), (torch.bfloat16, "dense", "float"), (torch.bfloat16, "int8", "float"),
     (torch.float32, "int8", "int8"), (torch.bfloat16, "int8", "int8")],
)  # fmt: skip
def test_prefills_and_decodes_are_the_oracles(dtype: torch.dtype, format: str, activations: str) -> None:
    """Prompts in chunks, beside decodes and beside one another; unwritten pages are NaN."""
    model = model_of(SPEC, dtype, format, activations)
    lay_out(model, MLIR, held(model), auto=False)
    ours = runner(model)
    Oracle(ours)
    generate(ours, requests())


def test_what_was_compiled_is_counted_on_after_a_change() -> None:
    model = model_of(SPEC, torch.float32)
    lay_out(model, MLIR, held(model), auto=False)
    ours = runner(model)
    prefills = ours.executor.rest  # type: ignore[attr-defined]
    generate(ours, [request("a", 9, 1)])
    before = prefills.compiles
    assert before == len(prefills.artifacts) > 0
    part = next(part for part in model.modules() if part._parameters.get("weight") is not None)
    copied = part._parameters["weight"].detach().clone()  # pyright: ignore[reportOptionalMemberAccess]
    part.weight = torch.nn.Parameter(copied, requires_grad=False)
    generate(ours, [request("b", 9, 1)])
    assert prefills.compiles == 2 * before == 2 * len(prefills.artifacts)


def test_a_packed_cache_is_prefilled_as_by_the_modules() -> None:
    """The cache's layers write and read as ever: the same tokens as from blocks that run module by module."""
    kept = CacheFormat(format="int8", group=8, columns=8, residual=16)
    settings = {"cache": kept, "page_size": 8}
    plain, ours = model_of(SPEC, torch.float32), model_of(SPEC, torch.float32)
    lay_out(ours, MLIR, held(ours), auto=False)
    modules = runner_of(plain, lanes=MLIR, **settings)
    modules.executor.few_tokens = 0  # type: ignore[attr-defined]
    assert finals(modules, requests()) == finals(runner(ours, **settings), requests())


def test_the_plain_weights_are_still_there() -> None:
    plain, ours = model_of(SPEC, torch.bfloat16), model_of(SPEC, torch.bfloat16)
    lanes = lay_out(ours, MLIR, held(ours), auto=False)
    assert lanes.blocks is lanes.reads is Lane.MLIR
    products = [part for part in ours.blocks.modules() if isinstance(part, Linear)]
    assert all(in_panels(part.weight) for part in products)
    before, after = (model.dense_state(torch.float32) for model in (plain, ours))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert sum(map(torch.Tensor.numel, ours.parameters())) == sum(map(torch.Tensor.numel, plain.parameters()))
    assert (plain.weight_bytes, plain.value_bytes) == (ours.weight_bytes, ours.value_bytes)
    for model in (plain, ours):
        model.run_on(Lane.EAGER)
    ids = list(range(20))
    assert torch.equal(plain.logits(ids), ours.logits(ids))


@pytest.mark.parametrize(
    ("spec", "format"), [(spec_of(layer(), width=48), "dense"), (spec_of(layer(hidden=40)), "dense"), (SPEC, "int4")]
)
def test_what_does_not_fit_stays_row_by_row(spec: ModelSpec, format: str) -> None:
    model = model_of(spec, torch.float32, format if format == "dense" else "int4")
    assert lay_out(model, MLIR, held(model), auto=False) is MLIR
    assert not any(in_panels(part.weight) for part in model.blocks.modules() if isinstance(part, Linear))


def in_panels_all(model: Transformer) -> bool:
    found = {in_panels(part.weight) for part in model.blocks.modules() if isinstance(part, Linear)}
    assert len(found) == 1
    return found.pop()


@pytest.mark.parametrize(("panels", "torchs"), [(1.0, 2.0), (1.0, 0.9), (2.0, 1.0)])
def test_auto_takes_panels_unless_torchs_product_is_clearly_quicker(
    panels: float, torchs: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(layout, "_seconds", lambda linear, dtype: (panels, torchs, True))
    taken = torchs > 0.8 * panels
    for _ in range(2):  # tried, then as it is remembered
        model, kept = model_of(SPEC, torch.float32), Remembered(tmp_path / "layouts.json")
        lanes = lay_out(model, AUTO, held(model), auto=True, kept=kept)
        assert lanes.blocks is (Lane.MLIR if taken else Lane.EAGER)
        assert f"{1000 * panels:.2f} ms from panels, {1000 * torchs:.2f} by torch" in lanes.reason
        assert in_panels_all(model) is taken
        monkeypatch.setattr(layout, "_seconds", None)


def test_auto_checks_what_panels_give(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(layout, "_seconds", lambda linear, dtype: (1.0, 2.0, True))
    for at in ("decode", "prefill"):
        model, kept = model_of(SPEC, torch.float32), Remembered(tmp_path / f"{at}.json")
        forward = MlirExecutor.forward if at == "decode" else PrefillExecutor.forward
        spoiled = lambda self, plan, forward=forward: forward(self, plan) + 0.1  # noqa: E731
        with monkeypatch.context() as patch:
            patch.setattr(MlirExecutor if at == "decode" else PrefillExecutor, "forward", spoiled)
            lanes = lay_out(model, AUTO, held(model), auto=True, kept=kept)
        assert lanes.blocks is Lane.EAGER and not in_panels_all(model)
        assert "row by row: a product of 512 tokens" in lanes.reason
        assert f"logits of a {at} are 0.1 away" in lanes.reason


def test_auto_leaves_a_lane_that_was_refused() -> None:
    model = model_of(SPEC, torch.float32)
    refused = replace(AUTO, reads=Lane.EAGER)
    assert lay_out(model, refused, held(model), auto=True) is refused and not in_panels_all(model)


@pytest.mark.parametrize("format", ["dense", "int8"])
def test_the_largest_product_is_timed(format: str) -> None:
    model = model_of(SPEC, torch.bfloat16, format)
    linear = next(part for part in model.blocks.modules() if isinstance(part, Linear))
    ours, torchs, _ = layout._seconds(linear, model.dtype)
    assert ours > 0 and torchs > 0


def test_a_damaged_memory_is_none() -> None:
    assert layout._sound({"panels": 1.0, "torch": "x", "problem": ""}) is None
    assert layout._sound({"panels": 1.0}) is None and layout._sound(None) is None
    assert layout._sound(layout.Found(1.0, 2.0, "why")._asdict()) == layout.Found(1.0, 2.0, "why")


def test_weights_go_back_row_by_row() -> None:
    plain, ours = model_of(SPEC, torch.bfloat16), model_of(SPEC, torch.bfloat16)
    for panels in (True, True, False, False):
        ours.lay_out(panels)
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)
