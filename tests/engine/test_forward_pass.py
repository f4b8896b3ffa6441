"""A recorded pass is what the engine computes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.kinds import LATENT
from tests.engine.tiny import VOCAB, finals, layer, mixture_of, model_of, own_specs, runner_of, spec_of
from tests.thorough import tries
from workbench.inspect.forward_pass import STAGES, record_forward_pass
from workbench.model.spec import LayerSpec, ModelSpec, NormSpec
from workbench.oracle import naive
from workbench.request import Request, SamplingParameters
from workbench.trace.events import Finished

ids = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20)
SCALED = spec_of(layer(2, 1), layer(2, 2)).model_copy(
    update={"embedding_scale": 2.0, "residual_scale": 0.5, "logit_scale": 0.25, "final_logit_softcapping": 3.0}
)
POST = spec_of(*[layer(2, 1).model_copy(update={"norms": "both"})] * 2)
PARALLEL = spec_of(
    layer(2, 1).model_copy(update={"parallel": "one_norm"}), layer(2, 1).model_copy(update={"parallel": "two_norms"})
).model_copy(update={"norm": NormSpec(kind="layer", bias=True)})
LATENTS = spec_of(LayerSpec(attention=LATENT, intermediate_size=12))
KINDS = {
    "scaled": SCALED, "norms on both sides": POST, "parallel": PARALLEL, "mixture": mixture_of(), "latent": LATENTS,
}  # fmt: skip


@settings(max_examples=tries(60))
@given(own_specs, ids)
def test_its_logits_are_the_oracle_s(spec: ModelSpec, token_ids: list[int]) -> None:
    model = model_of(spec, dtype=torch.float64)
    found = record_forward_pass(model, token_ids)
    expected = naive.logits(model, torch.tensor(token_ids))
    assert torch.allclose(found.values("logits"), expected, atol=1e-9)
    assert torch.allclose(found.logit_lens(-1)[-1], expected[-1].softmax(-1), atol=1e-9)


def test_the_lens_calls_the_head_once_for_all_that_is_new_and_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quantized head is widened whole by each call, which takes seconds."""
    found = record_forward_pass(model_of(SCALED, dtype=torch.float64), [1, 2, 3, 4])
    head, rows = type(found.model).compute_logits, []
    monkeypatch.setattr(type(found.model), "compute_logits", lambda model, x: (rows.append(len(x)), head(model, x))[1])
    first = found.lens_rows([3, 1, 3])
    found.lens_rows(range(1, 4))
    found.lens_rows([2])
    layers = len(found.model.blocks) + 1
    assert rows == [2 * layers, layers]
    assert torch.allclose(first[0].here, found.logit_lens(3).topk(5).values) and first[0] is first[2]
    assert torch.allclose(first[1].at_end, found.logit_lens(1)[-1][first[1].ids])


@pytest.mark.parametrize("spec", KINDS.values(), ids=KINDS)
def test_other_blocks_are_followed_too(spec: ModelSpec) -> None:
    model = model_of(spec, dtype=torch.float64)
    found = record_forward_pass(model, range(9))
    assert torch.allclose(found.values("logits"), naive.logits(model, torch.arange(9)), atol=1e-6)
    assert {stage.name for stage in found.stages} <= set(STAGES)


def test_scores_become_weights() -> None:
    model = model_of(spec_of(layer(4, 2, sliding_window=3)), dtype=torch.float64)
    found = record_forward_pass(model, range(8))
    scores, weights = found.values("scores", 0), found.values("weights", 0)
    assert torch.allclose(scores.masked_fill(scores.isnan(), -torch.inf).softmax(-1).float(), weights, atol=1e-6)
    assert bool(scores[:, 5, :3].isnan().all()) and not bool(scores[:, 5, 3:6].isnan().any())


def test_a_request_beside_it_is_undisturbed() -> None:
    """It reads the weights alone: a request under way goes on as if nothing had been recorded."""
    model = model_of(spec_of(layer(2, 1), layer(2, 2)))
    asked = Request("a", (1, 2, 3), SamplingParameters(max_tokens=8, temperature=0, ignore_eos=True))
    (alone,) = finals(runner_of(model), [asked]).values()
    runner = runner_of(model)
    made = []
    for event in runner.stream([asked]):
        record_forward_pass(model, (5, 6, 7))
        made += [event.token_ids] if isinstance(event, Finished) else []
    assert made == [alone]
