"""The model as a graph: costs add up to the cost model's, each operator is in one function, and nothing is invented."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_kernels import Backend
from tests.engine.tiny import layer, mixture_of, model_of, runner_of, spec_of, specs, weights_of
from tests.helpers.widgets import marks
from tests.tensor_parallel.in_threads import runner_of_ranks
from tests.thorough import tries
from workbench.engine.load import load
from workbench.executors.programs.kernels import STEP_SIDES, StepKernels, as_written
from workbench.model.attention_spec import MLASpec
from workbench.model.cost import StepCostModel
from workbench.model.quantized import WeightFormat
from workbench.model.recurrent.spec import DeltaNetSpec, Mamba2Spec, ParallelRecurrentSpec, ShortConvSpec
from workbench.model.shapes import SHAPES
from workbench.model.spec import LayerSpec, ModelSpec, MoESpec, RouterSpec
from workbench.trace.events import Stepped
from workbench.widgets import ModelGraph, RunnerThread
from workbench.widgets.model_graph import view as view_module
from workbench.widgets.model_graph.data import GraphStep, ValueBytes, equal_layers, model_operators
from workbench.widgets.model_graph.graph import OperatorGraph, total_cost
from workbench.widgets.model_graph.kernels import capabilities, group_by_kernel, step_kernels
from workbench.widgets.model_graph.picture import draw_graph
from workbench.widgets.model_graph.roofline import Roof, Roofs
from workbench.widgets.model_graph.timing import CallTimers, functions_problem, time_functions

SVG = "{http://www.w3.org/2000/svg}"
ROOFS = Roofs((Roof("memory", 1e10, 1e6),), (Roof("float32", 1e11),))
LATENT = MLASpec(num_heads=2, kv_lora_rank=6, qk_rope_head_dim=2, qk_nope_head_dim=4, v_head_dim=3, q_lora_rank=5)
MAMBA = Mamba2Spec(heads=2, head_width=4, state=4)
MIXTURE = MoESpec(num_experts=4, num_experts_per_tok=2, shared_intermediate_size=5, shared_gate=True)
ODD_LAYERS = {
    "latent": LayerSpec(attention=LATENT, intermediate_size=7),
    "latent without a query latent": LayerSpec(attention=LATENT.model_copy(update={"q_lora_rank": None}),
                                               intermediate_size=7),
    "convolution": LayerSpec(attention=ShortConvSpec(channels=8), intermediate_size=7),
    "delta net": LayerSpec(attention=DeltaNetSpec(num_key_heads=1, num_value_heads=2, key_dim=4, value_dim=4),
                           intermediate_size=7),
    "mamba alone": LayerSpec(attention=MAMBA, intermediate_size=0),
    "mamba beside": layer().model_copy(update={"beside": ParallelRecurrentSpec(recurrent=MAMBA)}),
    "shared expert": layer().model_copy(update={"experts": MIXTURE}),
    "sigmoid router": layer().model_copy(update={"experts": MIXTURE.model_copy(
        update={"router": RouterSpec(score="sigmoid", softmax_chosen=False)})}),
    "norms after": layer().model_copy(update={"norms": "post"}),
    "norms around": layer().model_copy(update={"norms": "both"}),
    "parallel": layer().model_copy(update={"parallel": "one_norm"}),
    "parallel, two norms": layer().model_copy(update={"parallel": "two_norms"}),
}  # fmt: skip
VARIED = st.lists(st.sampled_from([*ODD_LAYERS.values(), layer(), layer(heads=4, groups=2, sliding_window=5)]),
                  min_size=1, max_size=5).map(lambda kinds: spec_of(*kinds))  # fmt: skip
MIXTURES = st.builds(mixture_of, st.integers(2, 6), st.integers(1, 2))
SPECS = st.one_of(specs, VARIED, MIXTURES)
STEPS = st.builds(GraphStep, st.sampled_from(["prefill", "decode"]), st.integers(1, 40))
VALUES = st.builds(ValueBytes, *[st.sampled_from([0.53125, 1.0625, 2.0, 4.0])] * 3)
# Every way in which an executor groups operators.
WAYS = (
    as_written(),
    StepKernels("one function", {}, dict.fromkeys(STEP_SIDES, "whole step")),
    StepKernels("rows", {}, {**dict.fromkeys(STEP_SIDES, "all blocks"), "head": "head"}),
    StepKernels("blocks", {}, {**dict.fromkeys(STEP_SIDES, "block {layer}"), "head": "head"}),
    StepKernels("sides", {}, {"before": "before {layer}", "after": "after {layer}", "head": "head"}),
    StepKernels("one graph", {}, dict.fromkeys((*STEP_SIDES, "embed"), "whole step")),
)


@settings(max_examples=tries(400))
@given(SPECS | st.sampled_from([*SHAPES.values()]), STEPS, VALUES)
def test_costs_add_up_to_those_of_the_cost_model(spec: ModelSpec, step: GraphStep, values: ValueBytes) -> None:
    predicted = StepCostModel(spec, values.block, values.head, values.cache)([step.span], sampled=1)
    found = total_cost(model_operators(spec, step, values))
    assert found.flops == pytest.approx(predicted.flops, rel=1e-12)
    assert found.bytes == pytest.approx(predicted.bytes, rel=1e-12)


@settings(max_examples=tries(120))
@given(SPECS, STEPS, st.sampled_from(WAYS))
def test_every_operator_is_in_exactly_one_function(spec: ModelSpec, step: GraphStep, way: StepKernels) -> None:
    operators = model_operators(spec, step, ValueBytes(4, 4, 4))
    assert len({each.key for each in operators}) == len(operators)
    found = list(itertools.chain.from_iterable(group_by_kernel(way, operators).values()))
    assert sorted(each.key for each in found) == sorted(each.key for each in operators)
    if not any(one.beside or not one.intermediate_size or one.recurrent for one in spec.layers):
        assert [each.key for each in found] == [each.key for each in operators], "a function's operators are adjacent"
    assert sorted(itertools.chain.from_iterable(equal_layers(spec))) == list(range(len(spec.layers)))


@pytest.mark.parametrize("name", [*ODD_LAYERS, "mixture"])
def test_every_operator_of_an_unfolded_layer_is_drawn_once(name: str) -> None:
    spec = mixture_of() if name == "mixture" else spec_of(ODD_LAYERS[name], layer())
    step = GraphStep("prefill", 9)
    operators = model_operators(spec, step, ValueBytes(4, 4, 4))
    graph = OperatorGraph(spec, step, operators, WAYS[0], ROOFS.reads[0], ROOFS.gemms[0])
    keys = [each["data-key"] for each in marks(draw_graph(graph, tuple(range(len(spec.layers))), 960))]
    assert sorted(key for key in keys if "operator:" in key) == sorted(f"operator:{each.key}" for each in operators)


@pytest.mark.parametrize("name", [*ODD_LAYERS, "plain", "window", "mixture"])
@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_every_operator_is_timed_and_the_runner_is_left_as_it_was(name: str, kind: str) -> None:
    spec = {"plain": spec_of(), "window": spec_of(layer(sliding_window=5)), "mixture": mixture_of()}.get(name)
    runner = runner_of(model_of(spec or spec_of(ODD_LAYERS[name], ODD_LAYERS[name])))
    view = ModelGraph(runner, kind=kind, tokens=11, ceilings=ROOFS)
    assert {view.graph.measured(each).remark for each in view.graph.operators} == {"not measured"}
    view.measure()
    graph = view.graph
    assert {each.timer for each in graph.operators} <= set(graph.timers)
    for operator in graph.operators:
        found = graph.measured(operator)
        assert found.seconds is not None or found.remark.startswith("within ")
    known = [found.seconds for each in graph.operators if (found := graph.measured(each)).seconds is not None]
    assert graph.whole.seconds is not None and sum(known) <= graph.whole.seconds * (1 + 1e-9)
    assert not [part for part in runner.model.modules() if {"forward", "attend", "write"} & set(vars(part))]
    view.close()


def test_times_of_nested_calls_add_up_to_the_outermost() -> None:
    clock = itertools.count(0.0, 1.0)
    timers = CallTimers(lambda: next(clock))

    class Inner:
        def run(self) -> None: ...

    class Outer:
        inner = Inner()

        def run(self) -> None:
            self.inner.run()
            self.inner.run()

    outer = Outer()
    timers.wrap(outer.inner, "run", "inner")
    timers.wrap(outer, "run", "outer")
    timers.wrap(outer, "no_such_method", "none")
    outer.run()
    assert timers.seconds == {"inner": 2.0, "outer": 3.0} and sum(timers.seconds.values()) == 5.0


def test_a_graph_of_the_demo_predicts_what_its_steps_do() -> None:
    runner = load("demo", backend="eager")
    view = ModelGraph(runner, ceilings=ROOFS)
    steps: list[Stepped] = []
    RunnerThread.attach(runner).listen(lambda event: steps.append(event) if isinstance(event, Stepped) else None)
    list(runner.stream("def fib(n):", max_tokens=4, temperature=0))
    assert {each.phase for each in steps} == {"prefill", "decode"}
    for step in steps:
        view.kind, view.tokens = step.phase, step.context_tokens
        assert view.graph.whole.seconds is not None and view.graph.functions == {}
    measured = view.graph.whole
    view.measure()
    assert view.graph.timers and view.graph.whole == measured, "the runner's own steps, not a sum of timed calls"
    view.functions = "as written"
    assert view.graph.whole.remark == "the sum of all calls"
    view.close()


def test_functions_are_those_that_the_executor_has_compiled() -> None:
    runner = load("demo", backend="mlir")
    view = ModelGraph(runner, kind="prefill", tokens=300, ceilings=ROOFS)
    assert set(view.graph.kernels.functions.values()) == {
        "before attention {layer}", "after attention {layer}", "head",
    }  # fmt: skip
    text = "def fib(n):\n    return n\n" * 60
    list(runner.stream(text, max_tokens=3, temperature=0))
    names = {name.rstrip("0123456789 ") for name in runner.core.executor.artifacts}
    assert {"before attention", "after attention", "head", "decode"} <= names
    view.kind, view.tokens = "decode", 40
    graph = view.graph
    assert list(graph.functions) == ["whole step"] and len(graph.groups) == 3  # the embedding and the angles beside it
    first, *others = graph.groups["whole step"]
    assert graph.measured(first).seconds == graph.functions["whole step"]
    assert {graph.measured(each).remark for each in others} == {"within A"}
    view.functions = "as written"
    assert {view.graph.measured(each).remark for each in view.graph.operators} == {"not measured"}
    view.kind, view.tokens, view.functions = "prefill", 64, "as it runs"
    assert set(view.graph.kernels.functions.values()) == {"all blocks", "head"}
    view.close()


def test_compiled_functions_are_timed_where_python_calls_them() -> None:
    runner = load("demo", backend="mlir")
    view = ModelGraph(runner, kind="prefill", tokens=300, ceilings=ROOFS)
    for kind, tokens, names in (("prefill", 300, {"before attention", "after attention", "head"}),
                                ("prefill", 64, {"all blocks", "head"}), ("decode", 64, {"whole step"})):  # fmt: skip
        view.kind, view.tokens = kind, tokens
        view.measure()
        graph = view.graph
        assert {name.rstrip("0123456789 ") for name in graph.functions} == names
        assert all(seconds > 0 for seconds in graph.functions.values())
        found = {each.key: graph.measured(each) for each in graph.operators}
        remarks = {each.remark for each in found.values() if each.seconds is None}
        assert all(remark.startswith("within ") or remark == "beside the compiled functions" for remark in remarks)
        reads = {found[each.key].seconds is not None for each in graph.operators if each.side in ("write", "attend")}
        assert reads == {tokens == 300}, "the cache is written and read from Python between two functions"
        assert graph.whole.seconds == pytest.approx(sum((*graph.functions.values(), *graph.timers.values())))
    assert vars(runner.model).keys() >= {"spec"} and "embed" not in vars(runner.model)
    view.close()


def test_what_cannot_be_timed_says_why(tiny: ModelGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_module, "functions_problem", lambda runner: "its ranks compute together")
    assert tiny._unmeasured(as_written=False, timed=False) == "not measured: its ranks compute together"
    shared = spec_of(layer(4, 2))
    with runner_of_ranks(shared, weights_of(shared, torch.float32, 0), WeightFormat(), 2, Backend.EAGER) as runner:
        assert functions_problem(runner) == "its ranks compute together: their functions are not timed one by one"
        assert time_functions(runner, GraphStep("decode", 4)) == ({}, {})
    assert functions_problem(tiny.runner) == ""


def test_inductor_groups_by_block_and_by_the_sides_of_attention() -> None:
    runner = load("shape:tiny", backend="inductor", dtype="float32")
    decode, prefill = (step_kernels(runner, GraphStep(kind, 20)) for kind in ("decode", "prefill"))
    assert set(decode.functions.values()) == {"block {layer}", "head"}
    assert set(prefill.functions.values()) == {"before attention {layer}", "after attention {layer}", "head"}
    able = dict(capabilities(runner))
    assert able["inductor"] == "" and "CUDA" in able["triton"]


def test_equal_layers_are_folded_and_unfolded(tiny: ModelGraph) -> None:
    def heads() -> list[tuple[str, str]]:
        found = marks(draw_graph(tiny.graph, tiny.unfolded), "aria-expanded")
        return [(each["data-key"].removeprefix("fold:"), each["aria-expanded"]) for each in found]

    assert heads() == [("0:0", "false"), ("1:1", "false")]
    for picked, unfolded in (("0:0", (0,)), ("1:1", (0, 1)), ("0:2", (1,))):
        tiny.shown.picked = f"fold:{picked}"
        assert tiny.unfolded == unfolded and tiny.shown.picked == ""
        assert len(heads()) == 2 + len(unfolded)
    tiny.shown.picked = "operator:head"
    assert tiny.unfolded == (1,)


@pytest.fixture
def tiny() -> Any:
    near, far = layer(sliding_window=5), layer()
    view = ModelGraph(runner_of(model_of(spec_of(near, far, near, far))), tokens=9, ceilings=ROOFS)
    yield view
    view.close()


def test_what_is_not_known_says_so(tiny: ModelGraph) -> None:
    tiny.ceilings = Roofs()
    picture = tiny.picture()
    assert "no roofs" in picture and "not known yet" in picture and "not measured" in picture
    tiny.ceilings = ROOFS
    assert "no roofs" not in tiny.picture()
