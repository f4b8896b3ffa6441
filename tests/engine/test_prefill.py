"""Prefill over weights in panels: the oracle's rows, mixed with decodes, over every kind of layer that a step knows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from compiled_kernels import Backend, backend_problems
from compiled_kernels.blocked import in_panels
from compiled_kernels.result_cache import ResultCache
from tests.engine.tiny import CONTEXT, VOCAB, Oracle, finals, request, runner_of, weights_of
from workbench.engine.runner import Runner, generate
from workbench.executors import layout
from workbench.executors.base import MlirExecutor
from workbench.executors.layout import choose_weight_layout
from workbench.executors.prefill import PrefillExecutor
from workbench.executors.reference import CacheLayout
from workbench.executors.select import Backends
from workbench.kv_cache.format import CacheFormat
from workbench.model.attention_spec import AttentionSpec, RotaryConfig
from workbench.model.linear import Linear
from workbench.model.quantized import WeightFormat
from workbench.model.spec import LayerSpec, ModelSpec
from workbench.model.transformer import Transformer
from workbench.request import Request

problem = backend_problems()[Backend.MLIR]
pytestmark = pytest.mark.skipif(problem is not None, reason=f"backend mlir: {problem}")

MLIR = Backends.uniform(Backend.MLIR, "asked for")
AUTO = Backends(Backend.MLIR, Backend.EAGER, Backend.MLIR, "auto")


def layer(hidden: int = 64, bias: bool = False, **slots) -> LayerSpec:
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "qkv_bias": bias, "o_proj_bias": bias}
    return LayerSpec(attention=AttentionSpec(**sizes, **slots), intermediate_size=hidden, mlp_bias=bias)


def spec_of(*layers: LayerSpec, width: int = 64) -> ModelSpec:
    return ModelSpec(
        name="panels",
        vocab_size=VOCAB,
        hidden_size=width,
        layers=layers,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        eos_token_ids=(),
    )


SPEC = spec_of(
    layer(bias=True, qk_norm=True),
    layer(hidden=96, sliding_window=9, num_sink_tokens=2, rotary=RotaryConfig(rope_theta=50.0)),
    layer(position="none", sink_logits=True, softcap=1.5),
)


def model_of(
    spec: ModelSpec,
    dtype: torch.dtype,
    format: str = "dense",
    activations: str = "float",
    backend: Backend = Backend.MLIR,
) -> Transformer:
    stored = WeightFormat.parse(format, quant_group=32, activations=activations)
    return Transformer.from_state(spec, weights_of(spec, dtype, 5), backend, stored)


def held(model: Transformer) -> CacheLayout:
    return CacheLayout(model.cache_shapes(), 4, model.dtype)


def runner(model: Transformer, **settings) -> Runner:
    ours = runner_of(model, backends=MLIR, **settings)
    assert isinstance(ours.executor.prefill_executor, PrefillExecutor)  # type: ignore[attr-defined]
    ours.executor.max_token_parallel_tokens = 0  # type: ignore[attr-defined]
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
    choose_weight_layout(model, MLIR, held(model), auto=False)
    ours = runner(model)
    Oracle(ours)
    generate(ours, requests())


def test_what_was_compiled_is_counted_on_after_a_change() -> None:
    model = model_of(SPEC, torch.float32)
    choose_weight_layout(model, MLIR, held(model), auto=False)
    ours = runner(model)
    prefills = ours.executor.prefill_executor  # type: ignore[attr-defined]
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
    kept = CacheFormat(format="int8", quant_group=8, columns=8, residual_length=16)
    settings = {"cache": kept, "page_size": 8}
    plain, ours = model_of(SPEC, torch.float32), model_of(SPEC, torch.float32)
    choose_weight_layout(ours, MLIR, held(ours), auto=False)
    modules = runner_of(plain, backends=MLIR, **settings)
    modules.executor.max_token_parallel_tokens = 0  # type: ignore[attr-defined]
    assert finals(modules, requests()) == finals(runner(ours, **settings), requests())


def test_the_plain_weights_are_still_there() -> None:
    plain, ours = model_of(SPEC, torch.bfloat16), model_of(SPEC, torch.bfloat16)
    backends = choose_weight_layout(ours, MLIR, held(ours), auto=False)
    assert backends.blocks is backends.attention is Backend.MLIR
    products = [part for part in ours.blocks.modules() if isinstance(part, Linear)]
    assert all(in_panels(part.weight) for part in products)
    before, after = (model.dense_state(torch.float32) for model in (plain, ours))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert sum(map(torch.Tensor.numel, ours.parameters())) == sum(map(torch.Tensor.numel, plain.parameters()))
    assert (plain.weight_bytes, plain.bytes_per_weight) == (ours.weight_bytes, ours.bytes_per_weight)
    for model in (plain, ours):
        model.set_backend(Backend.EAGER)
    ids = list(range(20))
    assert torch.equal(plain.logits(ids), ours.logits(ids))


@pytest.mark.parametrize(
    ("spec", "format"), [(spec_of(layer(), width=48), "dense"), (spec_of(layer(hidden=40)), "dense"), (SPEC, "int4")]
)
def test_what_does_not_fit_stays_row_by_row(spec: ModelSpec, format: str) -> None:
    model = model_of(spec, torch.float32, format if format == "dense" else "int4")
    assert choose_weight_layout(model, MLIR, held(model), auto=False) is MLIR
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
        model, kept = model_of(SPEC, torch.float32), ResultCache(tmp_path / "layouts.json")
        backends = choose_weight_layout(model, AUTO, held(model), auto=True, remembered=kept)
        assert backends.blocks is (Backend.MLIR if taken else Backend.EAGER)
        assert f"{1000 * panels:.2f} ms from panels, {1000 * torchs:.2f} by torch" in backends.reason
        assert in_panels_all(model) is taken
        monkeypatch.setattr(layout, "_seconds", None)


def test_auto_checks_what_panels_give(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(layout, "_seconds", lambda linear, dtype: (1.0, 2.0, True))
    for at in ("decode", "prefill"):
        model, kept = model_of(SPEC, torch.float32), ResultCache(tmp_path / f"{at}.json")
        forward = MlirExecutor.forward if at == "decode" else PrefillExecutor.forward
        spoiled = lambda self, plan, forward=forward: forward(self, plan) + 0.1  # noqa: E731
        with monkeypatch.context() as patch:
            patch.setattr(MlirExecutor if at == "decode" else PrefillExecutor, "forward", spoiled)
            backends = choose_weight_layout(model, AUTO, held(model), auto=True, remembered=kept)
        assert backends.blocks is Backend.EAGER and not in_panels_all(model)
        assert "row by row: a product of 512 tokens" in backends.reason
        assert f"logits of a {at} are 0.1 away" in backends.reason


def test_auto_leaves_a_backend_that_was_refused() -> None:
    model = model_of(SPEC, torch.float32)
    refused = replace(AUTO, attention=Backend.EAGER)
    assert choose_weight_layout(model, refused, held(model), auto=True) is refused and not in_panels_all(model)


@pytest.mark.parametrize("format", ["dense", "int8"])
def test_the_largest_product_is_timed(format: str) -> None:
    model = model_of(SPEC, torch.bfloat16, format)
    linear = next(part for part in model.blocks.modules() if isinstance(part, Linear))
    ours, torchs, _ = layout._seconds(linear, model.dtype)
    assert ours > 0 and torchs > 0


def test_a_damaged_memory_is_none() -> None:
    assert layout._sound({"panels": 1.0, "torch": "x", "problem": ""}) is None
    assert layout._sound({"panels": 1.0}) is None and layout._sound(None) is None
    assert layout._sound(layout.PanelTrial(1.0, 2.0, "why")._asdict()) == layout.PanelTrial(1.0, 2.0, "why")


def test_weights_go_back_row_by_row() -> None:
    plain, ours = model_of(SPEC, torch.bfloat16), model_of(SPEC, torch.bfloat16)
    for panels in (True, True, False, False):
        ours.use_panels(panels)
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)
