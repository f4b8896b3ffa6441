"""A mistake is refused in one line that says what is wrong and what would be right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import workbench
from compiled_kernels import Backend
from tests.engine.tiny import layer, model_of, request, runner_of, spec_of, weights_of
from tests.tensor_parallel.in_threads import runner_of_ranks
from workbench import widgets
from workbench.engine.load import load
from workbench.errors import WorkbenchError
from workbench.experiment.experiment import Experiment
from workbench.model.quantized import WeightFormat
from workbench.prompt.conversation import Conversation
from workbench.trace.events import ExpertsUsed, Stepped
from workbench.widgets.live_bench.traffic import LoadSettings

IDS = (3, 1, 4, 1, 5)
TALK = Conversation(system="Be brief.", turns=["What is 2 + 2?"])
WEIGHTS = np.ones((1, 3, 2, 2))
LOGITS = torch.zeros(4)
PLAYED: dict[str, Any] = {"question": "q", "backend": "eager", "workload": {"kind": "prompts", "prompts": ["a"]}}


def used(*layers: tuple[int, tuple[int, ...]], step: int = 3) -> ExpertsUsed:
    return ExpertsUsed(0.0, step=step, layers=layers)


def text_file(folder: Path) -> Path:
    (folder / "a.txt").write_text("x")
    return folder / "a.txt"


def set_trait(view: Any, **traits: Any) -> None:
    for name, value in traits.items():
        setattr(view, name, value)


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """The demo, a tiny model without a tokenizer, one that drafts, one of two ranks, an empty folder."""
    spec = spec_of(layer(4, 2), layer(4, 4))
    state = weights_of(spec, torch.float32, 0)
    with runner_of_ranks(spec, state, WeightFormat(), 2, Backend.EAGER) as ranks:
        yield SimpleNamespace(
            demo=load("demo", backend="eager"), tiny=runner_of(model_of(spec)), ranks=ranks,
            folder=tmp_path_factory.mktemp("none"),
            small=load("demo", backend="eager", max_num_seqs=6, max_num_batched_tokens=128),
            drafts=load("demo", backend="eager", speculate={"kind": "prompt_lookup", "num_speculative_tokens": 3}),
        )  # fmt: skip


ROWS: tuple[tuple[str, tuple[Any, ...], dict[str, Any], str], ...] = (  # "<name>": what the fixture has so called
    ("AttentionView", ("<tiny>",), {}, "a prompt is missing: text, token ids, an Inspection or a Request"),
    ("AttentionView", ("<tiny>", "text"), {}, "no tokenizer"),
    ("AttentionView", ("<tiny>", ()), {}, "the prompt is empty"),
    ("AttentionView", ("<tiny>", IDS), {"max_tokens": 0, "layer": 2}, "no layer 2; known: 0, 1"),
    ("AttentionView", ("<tiny>", IDS), {"max_tokens": 0, "head": 4}, "no head 4; layer 0 has 0 to 3"),
    ("AttentionView", (np.ones((1, 2, 3, 2, 2)),), {}, "weights are [layer, head, row, context]"),
    ("AttentionView", (WEIGHTS,), {"groups": 2}, "cannot share 2 groups"),
    ("AttentionView", (WEIGHTS, "text"), {}, "a prompt needs a runner"),
    ("AttentionView", ("<tiny>", IDS), {"n": 2}, "follows one text"),
    ("Chat", ("demo",), {}, "give a runner or an agent"),
    ("Chat", ("<demo>",), {"conversation": "a"}, "give a workbench.Conversation"),
    ("Claims", (), {"claim": "kv-gqq"}, "did you mean"),
    ("Compare", (), {}, "give two runs or more"),
    ("Course", ("<folder>",), {}, "describes itself"),
    ("Exercise", ("How many?", "three"), {}, "is no number"),
    ("Exercise", ("How many?", float("nan")), {}, "is no number"),
    ("Exercise", ("Which?", "d"), {"choices": ["a", "b"]}, "none of the choices"),
    ("FleetView", (3,), {}, "FleetView: give a cluster"),
    ("FleetView", (["x"],), {}, "FleetView: give a cluster"),
    ("FleetView", (None,), {}, "FleetView: give a cluster"),
    ("KernelView", (), {"operator": "add_norm"}, "unknown operator 'add_norm'"),
    ("KernelView", (), {"case": "1x1 int3"}, "unknown case of add_rms_norm"),
    ("KernelView", (), {"backends": ("mlri",)}, "did you mean 'mlir'"),
    ("KernelView", (), {"stage": "ptx"}, "unknown stage of add_rms_norm on eager 'ptx'"),
    ("LiveBench", ("<demo>",), {"max_waiting": 0}, "max_waiting"),
    ("LiveBench", ("<demo>",), {"speed": 3}, "no setting 'speed'"),
    ("LiveBench", ("<demo>",), {"chunk_token": 8}, "did you mean 'chunk_tokens'"),
    ("LiveBench", ("<demo>",), {"rate": float("nan")}, "rate must be"),
    ("LiveBench", ("<tiny>",), {}, "context is 48"),
    ("MemoryCalculator", (), {"model": "no-such"}, "no-such"),
    ("MemoryCalculator", (), {"memory": "much"}, "such as 80GB"),
    ("MemoryCalculator", (), {"contxt": 3}, "contxt"),
    ("MemoryCalculator", (), {"cache": "int5"}, "int5"),
    ("MemoryCalculator", (), {"dtype": "float17"}, "float17"),
    ("ModelGraph", ("<tiny>",), {"tokens": 0}, "tokens 0: the model has a context of 1 to 48"),
    ("ModelGraph", ("<tiny>",), {"tokens": 999}, "tokens 999: the model has a context of 1 to 48"),
    ("ModelGraph", ("<tiny>",), {"kind": "verify"}, "verify"),
    ("ModelGraph", ("<tiny>",), {"tab": "experts"}, "tab 'experts': this graph has the tabs graph, roofline"),
    ("ModelGraph", ([Stepped(0.0)],), {}, "call runner.record_experts() before the run"),
    ("ModelGraph", ([used((0, (1,))), used((0, (1,)), (1, (1,)))],), {}, "other layers"),
    ("ModelGraph", (3,), {}, "a roofline of int: give a runner"),
    ("ModelGraph", ({"rows": [{}]},), {}, "rows of work"),
    ("ModelGraph", ({"x": 1},), {}, "rows of work"),
    ("ModelGraph", ("no-such.json",), {}, "no-such.json"),
    ("ModelGraph", ("no-such-run",), {}, "no-such-run"),
    ("ModelGraph", (["text"],), {}, "a roofline of list: give a runner"),
    ("ModelGraph", ("<tiny>",), {"functions": "upside down"}, "upside down"),
    ("PageMap", ("runs/mine",), {}, "give a runner, or the snapshots"),
    ("PageMap", ([],), {}, "give a runner, or the snapshots"),
    ("PageMap", ([1],), {}, "give a runner, or the snapshots"),
    ("Playground", (3,), {}, "pass an Experiment, a YAML file"),
    ("Playground", (Experiment.from_values({**PLAYED, "executor": {"kind": "simulated"}}),), {}, "computes no tokens"),
    ("PromptView", (3, TALK), {}, "has no tokenizer"),
    ("PromptView", ("demo", TALK), {}, "has no tokenizer"),
    ("PromptView", ("<demo>", 3), {}, "give a Conversation, a text, or messages"),
    ("PromptView", ("<demo>", Conversation(system="x")), {}, "has no turns"),
    ("PromptView", ("<demo>", [{"role": "user", "content": 3}]), {}, "messages.0.content"),
    ("PromptView", ("<demo>", Conversation(turns=["a"], template="nowhere")), {}, "no chat template is"),
    ("PromptView", ("<demo>", TALK), {"templates": {"bad": "{% if %}"}}, "not a Jinja template"),
    ("PromptView", ("<demo>", TALK), {"templates": {"bad": 3}}, "give a Jinja text"),
    ("SamplingExplorer", ("no numbers",), {}, "give an array"),
    ("SamplingExplorer", (torch.zeros(2, 3, 4),), {}, "[vocab] or [token vocab]"),
    ("SamplingExplorer", (LOGITS,), {"prompt": "text"}, "texts need a runner"),
    ("SamplingExplorer", (LOGITS,), {"prompt": [9]}, "token id 9 is outside"),
    ("SamplingExplorer", (LOGITS,), {"top_p": -0.1}, "top_p: Input should be greater than or equal to 0"),
    ("SamplingExplorer", (LOGITS,), {"top": 1}, "top: "),
    ("SamplingExplorer", (LOGITS,), {"n": 3}, "one sample"),
    ("SamplingExplorer", (LOGITS,), {"position": 7}, "has 1 to 1"),
    ("SamplingExplorer", (torch.zeros(3, 4),), {"prompt": [1]}, "3 rows for 1 tokens"),
    ("ServerView", (7,), {}, "ServerView: give a server"),
    ("SpeculationView", ("<demo>",), {"prompt": "a"}, "it drafts nothing"),
    ("SpeculationView", ("<drafts>",), {}, "a prompt is missing"),
    ("SpeculationView", ("<drafts>",), {"prompt": "a", "n": 2}, "follows one text"),
    ("SpeculationView", ("<drafts>",), {"prompt": "a", "speculate": "none"}, "none drafts nothing"),
    ("SpeculationView", ("<drafts>",), {"prompt": "a", "speculate": "lookup"}, "speculate: "),
    ("SpeculationView", ([],), {"prompt": "a"}, "go with a runner"),
    ("SpeculationView", (["no event"],), {}, "events: give what a runner streams"),
    ("Timeline", ("runs/mine",), {}, "give a runner, a record"),
    ("Timeline", ([1],), {}, "give a runner, a record"),
    ("Timeline", (7,), {}, "give a runner, a record"),
    ("TokenPath", ("<tiny>", ()), {}, "the prompt is empty"),
    ("TokenPath", ("<tiny>", IDS), {"n": 2}, "follows one text"),
    ("TokenPath", ("<tiny>", request("mine", 5, 4)), {"top_k": 3}, "top_k: a Request brings its own sampling"),
    ("TokenPath", ("<ranks>", IDS), {}, "spread over 2 ranks"),
    ("TokenView", ("a", "shape:llama-3.2-1b"), {}, "has no tokenizer"),
    ("TokenView", ("a", 3), {}, "has no tokenizer"),
    ("TokenView", ("a", "nowhere"), {}, "no model 'nowhere'"),
)  # fmt: skip


def closed(view: Any) -> Any:
    view.close()
    return view


CALLS: tuple[tuple[Callable[[Any], object], str], ...] = (
    (lambda it: widgets.Chat(workbench.agent(it.demo), system="a", max_tokens=3), "an agent has its own system, max_"),
    (lambda it: widgets.Chat(it.demo).edit(3, "a"), "there is no message 3"),
    (lambda it: widgets.Claims().measure(), "choose a claim first"),
    (lambda it: widgets.FleetView(text_file(it.folder)), "a.txt: no file of events"),
    (lambda it: LoadSettings(long_share=1.5), "long_share must be"),
    (lambda it: widgets.ServerView(it.folder / "none.json"), "none.json"),
    (lambda it: set_trait(widgets.Playground(it.demo, "a"), preset="INT8 KV cache"), "is a pair; give beside"),
    (lambda it: widgets.Playground(it.demo, "a", beside="nothing"), "no preset 'nothing'"),
    (lambda it: widgets.Playground(it.demo, "a", beside={"cache.nothing": 1}), "beside: cache.nothing: unknown"),
    (lambda it: widgets.Playground(it.demo, "a").restore(0), "no play 0"),
    (lambda it: widgets.SpeculationView(it.folder / "nothing"), "nothing"),
    (lambda it: set_trait(widgets.TokenPath(it.tiny, IDS), position=8), "position 8: there are 0 to 4"),
    (lambda it: set_trait(widgets.TokenPath(it.tiny, IDS), layers_off=(5,)), "there is no layer 5"),
    (lambda it: closed(widgets.ModelGraph(it.tiny, tokens=9)).picture(), "closed"),
    (lambda it: closed(widgets.TokenPath(it.tiny, IDS)).picture(), "it was closed"),
)  # fmt: skip


# A value that a view refuses leaves the one before.
TRAITS = (
    ("LiveBench", "max_num_seqs", 7, "made for 6"),
    ("LiveBench", "chunk_tokens", 129, "from 1 to"),
    ("LiveBench", "policy", "fcsf", "did you mean 'fcfs'"),
    ("LiveBench", "rate", -1.0, "must be"),
    ("LiveBench", "long_share", 2.0, "must be"),
    ("LiveBench", "span", 0.0, "must be"),
    ("ModelGraph", "tokens", 0, "tokens 0: the model has a context of 1 to"),
    ("ModelGraph", "tokens", 1_000_000, "tokens 1000000: the model has a context of 1 to"),
)


def says(message: str, call: Callable[[], object]) -> None:
    with pytest.raises(WorkbenchError) as refused:
        call()
    assert message in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(("widget", "values", "named", "message"), ROWS, ids=[f"{row[0]}: {row[3]}" for row in ROWS])
def test_a_widget_is_refused_in_one_line(
    there: SimpleNamespace, widget: str, values: tuple[Any, ...], named: dict[str, Any], message: str
) -> None:
    given = [vars(there).get(each[1:-1], each) if isinstance(each, str) else each for each in values]
    says(message, lambda: getattr(widgets, widget)(*given, **named))


@pytest.mark.parametrize("widget", ["AttentionView", "SpeculationView", "TokenPath"])
def test_a_request_of_ones_own_has_its_own_sampling(there: SimpleNamespace, widget: str) -> None:
    getattr(widgets, widget)(there.drafts, request("mine", 5, 4)).close()


@pytest.mark.parametrize(("call", "message"), CALLS, ids=[message for _, message in CALLS])
def test_a_change_is_refused_in_one_line(there: SimpleNamespace, call: Callable[[Any], object], message: str) -> None:
    says(message, lambda: call(there))


@pytest.mark.parametrize(("widget", "trait", "value", "message"), TRAITS)
def test_a_refused_value_leaves_the_one_before(
    there: SimpleNamespace, widget: str, trait: str, value: Any, message: str
) -> None:
    view = getattr(widgets, widget)(there.small)
    before = getattr(view, trait)
    says(message, lambda: setattr(view, trait, value))
    assert getattr(view, trait) == before
    view.close()
