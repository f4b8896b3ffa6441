"""A draft model of the target's own layers, and rules of the user's own that end drafts."""

from __future__ import annotations

import pytest
import torch

import workbench
from tests.engine.tiny import layer, mixture_of, model_of, request, runner_of, spec_of
from tests.speculative.parts import HERE
from workbench.engine.config import EngineConfig
from workbench.engine.loaded_model import LoadedModel
from workbench.engine.runner import generate
from workbench.engine.shared_layers import share_layers
from workbench.engine.speculator import build_speculator
from workbench.model.transformer import Transformer
from workbench.speculative.draft_model import DraftModelProposer
from workbench.trace.events import Finished, Verified


def speculating(model, requests, **draft) -> tuple[dict, list[Verified]]:
    settings: dict = {"page_size": 4, "pages": 40, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    config = EngineConfig.build(speculate={"kind": "draft", "model": "target", **draft}, **settings)
    runner = runner_of(model, **settings)
    runner.core.set_speculator(build_speculator(config, LoadedModel(model), workbench.Runner))
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
    assert runner.core.speculator is not None
    proposer = runner.core.speculator.proposer
    assert isinstance(proposer, DraftModelProposer)
    assert proposer.kv_cache_manager is not runner.kv_cache.manager
