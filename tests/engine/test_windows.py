"""Pages that no query can reach any more are given back."""

from __future__ import annotations

import pytest

from tests.engine.poison import WINDOW, poisoned
from tests.engine.tiny import layer, model_of, request, runner_of, spec_of
from tests.helpers.events import of
from workbench.engine.runner import generate
from workbench.model.attention_spec import AttentionSpec
from workbench.model.spec import LayerSpec
from workbench.trace.events import Stepped

SINKS = LayerSpec(
    attention=AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=4, sliding_window=6, num_sink_tokens=3),
    intermediate_size=12,
)


@pytest.mark.parametrize("length", [WINDOW - 1, WINDOW, WINDOW + 1])
@pytest.mark.parametrize(("kind", "most"), [(layer(4, 2, sliding_window=WINDOW), 4), (SINKS, 6)])
def test_a_window_bounds_memory(length: int, kind: LayerSpec, most: int) -> None:
    """Twenty times the window: no more pages at the end than soon after its beginning."""
    model = model_of(spec_of(kind, kind).model_copy(update={"max_position_embeddings": 160}))
    runner = runner_of(model, pages=8, page_size=2, max_num_batched_tokens=4)
    poisoned(runner)
    used = [step.pages_used for step in of(Stepped, runner.stream([request("a", length, 20 * WINDOW + 10)]))]
    assert len(used) >= 20 * WINDOW and max(used[-WINDOW:]) <= max(used[: 2 * WINDOW]) <= most
    assert generate(runner, [request("b", 20 * WINDOW, 3)])["b"].reason == "length"


def test_a_refusal_counts_what_is_needed_at_once() -> None:
    spec = spec_of(layer(4, 2, sliding_window=WINDOW)).model_copy(update={"max_position_embeddings": 400})
    runner = runner_of(model_of(spec), pages=4, page_size=2, max_num_batched_tokens=4)
    refused = generate(runner, [request("a", 100, 100)])["a"]
    # Positions t - 4 .. t + 3 are touched at once: eight, which meet five pages of two.
    assert refused.reason == "refused" and "need 5 pages of 2 tokens at once in layers that see 5" in refused.error
    enough = runner_of(model_of(spec), pages=5, page_size=2, max_num_batched_tokens=4)
    assert generate(enough, [request("a", 100, 9)])["a"].reason == "length"
