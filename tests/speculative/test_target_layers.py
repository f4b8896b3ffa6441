"""A draft model of the target's own layers, and rules of the user's own that end drafts."""

from __future__ import annotations

import pytest
import torch

import workbench
from tests.engine.tiny import layer, mixture_of, model_of, request, runner_of, spec_of
from workbench.engine.config import EngineConfig
from workbench.engine.loaded_model import LoadedModel
from workbench.engine.runner import generate
from workbench.engine.shared_layers import share_layers
from workbench.engine.speculator import build_speculator
from workbench.errors import WorkbenchError
from workbench.model.transformer import Transformer
from workbench.speculative.config import parse_speculation
from workbench.speculative.draft_model import DraftModelProposer
from workbench.trace.events import Finished, Verified

HERE = "tests.speculative.test_target_layers:"


def at_once(probabilities, request_ids):
    return torch.ones(len(request_ids), dtype=torch.bool)


def never(probabilities, request_ids):
    assert probabilities.shape[0] == len(request_ids)
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(len(request_ids), dtype=torch.float64))
    return torch.zeros(len(request_ids), dtype=torch.bool)


def wrong_shape(probabilities, request_ids):
    return probabilities > 0.5


def one_argument(probabilities):
    return None


def speculating(model, requests, **draft) -> tuple[dict, list[Verified]]:
    settings: dict = {"page_size": 4, "pages": 40, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    config = EngineConfig.build(speculate={"kind": "draft", "model": "target", **draft}, **settings)
    runner = runner_of(model, **settings)
    runner.set_speculator(build_speculator(config, LoadedModel(model), workbench.Runner))
    events = list(runner.stream(requests))
    ends = {e.request_id: e.token_ids for e in events if isinstance(e, Finished)}
    assert ends == {name: end.token_ids for name, end in generate(runner_of(model), requests).items()}
    return ends, [e for e in events if isinstance(e, Verified)]


@pytest.mark.parametrize(
    "spec",
    [
        spec_of(layer(), layer(sliding_window=5), layer(4, 2)),
        spec_of(layer(position="none"), layer(), layer(position="alibi")),
        mixture_of(layers=3),
    ],
    ids=["windows", "positions", "mixture"],
)
def test_a_model_of_some_layers_is_the_model_of_their_weights(spec) -> None:
    model = model_of(spec)
    for kept in ((0, 2), (1,), (0, 1, 2)):
        shared = share_layers(LoadedModel(model), kept).transformer
        state = {name: value for name, value in model.state_dict().items() if not name.startswith("blocks.")}
        for new, old in enumerate(kept):
            mine = f"blocks.{old}."
            state |= {
                f"blocks.{new}.{n.removeprefix(mine)}": v for n, v in model.state_dict().items() if n.startswith(mine)
            }
        own = spec.model_copy(update={"layers": tuple(spec.layers[i] for i in kept)})
        ids = torch.tensor([3, 1, 4, 1, 5, 9])
        torch.testing.assert_close(shared.logits(ids), Transformer.from_state(own, state).logits(ids))
        places = {parameter.data_ptr() for parameter in model.parameters()}
        assert {parameter.data_ptr() for parameter in shared.parameters()} <= places  # no weight twice


def test_all_layers_agree_with_the_target_and_some_do_not_change_its_text() -> None:
    model, asked = (
        model_of(spec_of(layer(), layer(sliding_window=9), layer())),
        [request("a", 5, 12), request("b", 9, 9)],
    )
    _, checks = speculating(model, asked)
    assert checks and all(check.accepted == check.drafted for check in checks)
    _, checks = speculating(model, asked, layers=(0, 2), num_speculative_tokens=3)
    assert checks
    assert speculating(model, asked, stop={"path": HERE + "at_once"})[1] == []
    assert speculating(model, asked, stop={"path": HERE + "never"})[1]


def test_a_draft_of_the_target_has_a_cache_of_its_own() -> None:
    runner = workbench.load("demo-draft", backend="eager", pages=16, speculate={"kind": "draft", "model": "target"})
    assert runner.speculator is not None
    proposer = runner.speculator.proposer
    assert isinstance(proposer, DraftModelProposer)
    assert proposer.kv_cache_manager is not runner.kv_cache.manager


@pytest.mark.parametrize(
    ("draft", "words"),
    [
        ({"model": "demo-draft", "layers": [0]}, "set model: target"),
        ({"model": "target", "layers": [0, 0]}, r"layers must ascend, each named once, not \[0, 0\]"),
        ({"model": "target", "layers": []}, "layers"),
        ({"model": "target", "layers": [0, 9]}, "layer 9 of .*, whose layers are 0 to 2"),
        ({"model": "target", "dtype": "float32"}, "leave dtype and backend out"),
        ({"confidence_threshold": 0.5, "stop": {"path": HERE + "never"}}, "leave one out"),
        ({"stop": {"path": HERE + "missing"}}, "has no 'missing'"),
        ({"stop": {"path": HERE + "one_argument"}}, r"must take \(probabilities, request_ids\)"),
    ],
)
def test_what_cannot_be_is_one_error(draft, words: str) -> None:
    with pytest.raises(WorkbenchError, match=words) as caught:
        workbench.load("demo-draft", backend="eager", pages=16, speculate={"kind": "draft", **draft})
    assert "\n" not in str(caught.value)


def test_a_rule_that_returns_something_else_ends_the_request_with_its_shape() -> None:
    speculate = {"kind": "draft", "model": "target", "stop": {"path": HERE + "wrong_shape"}}
    runner = workbench.load("demo-draft", backend="eager", pages=16, speculate=speculate)
    (end,) = [e for e in runner.stream("import os\n", max_tokens=4, temperature=0) if isinstance(e, Finished)]
    assert end.reason == "error" and "must be [row] of torch.bool" in end.error


def test_settings_survive_yaml() -> None:
    wanted = parse_speculation({"kind": "draft", "model": "target", "layers": [0, 2], "stop": {"path": HERE + "never"}})
    config = EngineConfig.build("demo", speculate=wanted)
    assert EngineConfig.model_validate(config.model_dump(mode="json")).speculate == wanted
