"""A text computed whole has the weights that were served, chunk by chunk as at once, and its last states are right."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.kinds import sharing_models
from tests.engine.tiny import CONTEXT, VOCAB, layer, model_of, own_specs, request, runner_of, spec_of
from tests.thorough import tries
from workbench.errors import WorkbenchError
from workbench.inspect import whole_text
from workbench.inspect.whole_text import TextAttention
from workbench.model.custom import build_mask
from workbench.model.spec import ModelSpec

ids = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=24)


@settings(max_examples=tries(15))
@given(own_specs, ids)
def test_rows_sum_to_one_and_see_what_the_mask_shows(spec: ModelSpec, token_ids: list[int]) -> None:
    text = TextAttention(model_of(spec, dtype=torch.float64), token_ids)
    positions = torch.arange(len(token_ids))
    for number, kind in enumerate(spec.layers):
        attention = kind.attention
        weights = text.weights(number, range(len(token_ids)))
        assert weights.shape == (attention.num_heads, len(token_ids), len(token_ids))
        seen = build_mask(attention)(positions[:, None], positions[None]) & (positions[None] <= positions[:, None])
        assert not weights[:, ~seen].any() and bool((weights >= 0).all())
        total, sees = weights.sum(-1), seen.any(-1)
        assert (total[:, sees] < 1 + 1e-6).all() and not total[:, ~sees].any()
        if not attention.sink_logits:
            assert ((total[:, sees] - 1).abs() < 1e-6).all()


@settings(max_examples=tries(12))
@given(own_specs, ids, st.data())
def test_in_parts_as_at_once(spec: ModelSpec, token_ids: list[int], data: st.DataObject) -> None:
    model = model_of(spec, dtype=torch.float64)
    cut = data.draw(st.integers(0, len(token_ids)))
    parts, whole = TextAttention(model, token_ids[:cut]), TextAttention(model, token_ids)
    parts.extend(token_ids[cut:])
    begin = data.draw(st.integers(0, len(token_ids)))
    end = data.draw(st.integers(begin, len(token_ids)))
    for number in range(len(spec.layers)):
        every = whole.weights(number, range(len(token_ids)))
        some = parts.weights(number, range(begin, end), heads=(0,))
        assert some.shape == (1, end - begin, end)
        assert ((some - every[:1, begin:end, :end]).abs() < 1e-6).all()


def test_blocks_and_chunks_are_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(spec_of(layer(4, 2, sliding_window=5, num_sink_tokens=2), layer(4, 2)), dtype=torch.float64)
    whole = TextAttention(model, range(30))
    monkeypatch.setattr(whole_text, "TOKENS_PER_CHUNK", 7)
    monkeypatch.setattr(whole_text, "ROWS_PER_BLOCK", 3)
    parts = TextAttention(model, range(30))
    for number in range(2):
        assert torch.allclose(parts.weights(number, range(30)), whole.weights(number, range(30)), atol=1e-7)


@settings(max_examples=tries(8))
@given(st.one_of(own_specs, sharing_models()))
def test_it_is_what_was_served(spec: ModelSpec) -> None:
    """Up to the last row, as `inspect` reads it from the pages, also of layers that read another's keys and values."""
    runner = runner_of(model_of(spec), page_size=64)
    runner.submit(request("a", 20, 12))
    while runner.tracker.sequences["a"].num_computed_tokens < 25:
        runner.step()
    found = runner.inspect("a", range(3, 25))
    text = TextAttention(runner.model, found.token_ids)
    for number, weights in found.weights.items():
        assert (text.weights(number, range(3, 25)) - weights).abs().max() < 1e-4


def test_a_mistake_is_reported_and_harms_nothing() -> None:
    text = TextAttention(model_of(spec_of()), (1, 2, 3))
    with pytest.raises(WorkbenchError, match="exceed the model's context"):
        text.extend([0] * CONTEXT)
    with pytest.raises(WorkbenchError, match="the text has 3 tokens"):
        text.weights(0, range(0, 4))
    text.extend((4,))
    assert text.token_ids == (1, 2, 3, 4) and text.weights(1, range(0, 4)).shape == (2, 4, 4)
