"""Requests that are wrong, or that break: each ends with its reason, and the others are what they would have been."""

from __future__ import annotations

import torch

from tests.engine.tiny import CONTEXT, VOCAB, every_tensor, finals, layer, model_of, runner_of, spec_of
from tests.helpers.events import of
from workbench.engine.runner import generate
from workbench.model.transformer import Transformer
from workbench.oracle import naive
from workbench.request import Request, SamplingParameters
from workbench.trace.events import Finished, Submitted

MODEL = model_of(spec_of(layer(4, 2), layer(4, 2, sliding_window=5)))
GREEDY = SamplingParameters(temperature=0, max_tokens=6, ignore_eos=True)


def test_a_nan_weight_ends_those_who_meet_it() -> None:
    """A real NaN, from an embedding row into the cache: its owner ends, its pages are clean, the other goes on."""
    state = {name: value.clone() for name, value in MODEL.state_dict().items()}
    spec = MODEL.spec.model_copy(update={"tie_word_embeddings": False})
    state["head.weight"] = state["embedding.weight"].clone()
    alone = finals(runner_of(Transformer.from_state(spec, dict(state))), [Request("good", (1, 2, 3), GREEDY)])
    state["embedding.weight"][7] = torch.nan
    bad, good = Request("bad", (5, 7, 9), GREEDY), Request("good", (1, 2, 3), GREEDY)
    done = generate(runner_of(Transformer.from_state(spec, dict(state))), [bad, good])
    assert done["bad"].reason == "error"
    assert 7 not in alone["good"] and done["good"].token_ids == alone["good"]
    runner = runner_of(Transformer.from_state(spec, state))
    for tensor in every_tensor(runner.store):
        tensor.zero_()
    assert generate(runner, [bad])["bad"].reason == "error"  # no later request could write over its pages
    assert not any(tensor.isnan().any() for tensor in every_tensor(runner.store))


def test_cut_oldest_keeps_the_newest_and_says_so() -> None:
    runner = runner_of(MODEL, overflow="cut_oldest")
    long = Request("x", tuple(i % VOCAB for i in range(70)), SamplingParameters(max_tokens=8, temperature=0))
    events = list(runner.stream(long))
    kept = CONTEXT - 8
    assert isinstance(events[0], Submitted) and events[0].cut_tokens == 70 - kept
    short = Request("y", long.prompt_ids[-kept:], long.sampling)
    end = of(Finished, events)[0]
    assert end.token_ids == finals(runner, [short])["y"]


def test_logits_of_a_text() -> None:
    ids = [3, 1, 4, 1, 5]
    assert torch.allclose(MODEL.logits(ids), naive.logits(MODEL, torch.tensor(ids)), atol=1e-4)
