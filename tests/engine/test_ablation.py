"""With nothing off a text is the engine's; with heads and layers off, a plain forward pass without them."""

from __future__ import annotations

from collections.abc import Collection

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.engine.tiny import VOCAB, finals, layer, model_of, own_specs, request, runner_of, spec_of, specs
from tests.thorough import tries
from workbench.errors import WorkbenchError
from workbench.inspect.ablation import Ablation, continue_text
from workbench.inspect.whole_text import TextAttention
from workbench.model.spec import ModelSpec
from workbench.model.transformer import Transformer
from workbench.oracle import naive
from workbench.request import SamplingParameters

GREEDY = SamplingParameters(max_tokens=6, temperature=0, ignore_eos=True)


@settings(max_examples=tries(60))
@given(specs, st.integers(2, 12), st.integers(0, 9), st.sampled_from([0.0, 0.7, 4.0]), st.sampled_from([0.0, 1.5]))
def test_with_nothing_off_it_is_the_engine_s_text(
    spec: ModelSpec, length: int, seed: int, temperature: float, penalty: float
) -> None:
    model = model_of(spec)
    asked = request("x", length, 8, seed=seed, temperature=temperature, top_p=0.9, presence_penalty=penalty)
    (whole,) = finals(runner_of(model), [asked]).values()
    assert continue_text(model, asked.prompt_ids, asked.sampling, Ablation()) == whole


def without(model: Transformer, ids: list[int], heads: Collection[tuple[int, int]], layers: Collection[int]) -> Tensor:
    """Compute logits by the oracle: a head is off when its columns of the output matrix are zero, a layer when all that
    it adds is."""
    state = {name: values.clone() for name, values in model.dense_state(torch.float64).items()}
    for number, kind in enumerate(model.spec.layers):
        output, dim = state[f"blocks.{number}.attention.output.weight"], kind.attention.head_dim
        for at, head in heads:
            if at == number:
                output[:, head * dim : (head + 1) * dim] = 0
        if number in layers:
            for name in ("attention.output", "feedforward.down"):
                for part in ("weight", "bias"):
                    if f"blocks.{number}.{name}.{part}" in state:
                        state[f"blocks.{number}.{name}.{part}"].zero_()
    return naive.logits(Transformer.from_state(model.spec, state), torch.tensor(ids))


@settings(max_examples=tries(80))
@given(own_specs, st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8), st.data())
def test_what_is_off_is_a_plain_pass_without_it(spec: ModelSpec, ids: list[int], data: st.DataObject) -> None:
    model = model_of(spec, dtype=torch.float64)
    every = [(n, head) for n, kind in enumerate(spec.layers) for head in range(kind.attention.num_heads)]
    heads = data.draw(st.sets(st.sampled_from(every), min_size=1, max_size=3))
    layers = data.draw(st.sets(st.integers(0, len(spec.layers) - 1), max_size=1))
    off = Ablation(frozenset(heads), frozenset(layers))
    with torch.inference_mode():
        found = model.compute_logits(TextAttention(model, ids, off.run_blocks(model)).hidden_states)
    assert torch.allclose(found, without(model, ids, heads, layers), atol=1e-9)
    made = continue_text(model, ids, GREEDY, off)
    for count, token in enumerate(made):
        row = without(model, [*ids, *made[:count]], heads, layers)[-1]
        assert row.max() - row[token] < 1e-9


def test_nothing_stays_off() -> None:
    model = model_of(spec_of(layer(4, 2), layer(4, 4)))
    before = continue_text(model, (1, 2, 3), GREEDY, Ablation())
    every = frozenset((number, head) for number in range(2) for head in range(4))
    assert Ablation(every) and not Ablation()
    continue_text(model, (1, 2, 3), GREEDY, Ablation(every, frozenset({0, 1})))
    assert continue_text(model, (1, 2, 3), GREEDY, Ablation()) == before


def test_it_ends_where_a_request_ends() -> None:
    model = model_of(spec_of(eos_token_ids=tuple(range(0, VOCAB, 2))))
    for settings_ in ({"ignore_eos": False}, {"stop_token_ids": tuple(range(1, VOCAB, 2)), "ignore_eos": False}):
        asked = request("x", 5, 12, **{"temperature": 1.0, "seed": 3}).sampling.model_copy(update=settings_)
        made = continue_text(model, (1, 2, 3), asked, Ablation())
        ends = {*asked.stop_token_ids, *model.spec.eos_token_ids}
        assert made[-1] in ends and not ends & set(made[:-1])
    room = model.spec.max_position_embeddings
    assert len(continue_text(model, [1] * (room - 2), GREEDY, Ablation())) == 2


@pytest.mark.parametrize(
    ("ablation", "sampling", "why"),
    [
        (Ablation(layers=frozenset({2})), GREEDY, "no layer 2 to switch off; the model has 0 to 1"),
        (Ablation(frozenset({(1, 2)})), GREEDY, "layer 1 has no head 2 to switch off; it has 0 to 1"),
        (Ablation(), GREEDY.model_copy(update={"n": 2}), "only one text can be continued"),
        (Ablation(), GREEDY.model_copy(update={"stop": ("x",)}), "stop: has no effect on a text"),
    ],
)
def test_what_cannot_be_done_is_refused(ablation: Ablation, sampling: SamplingParameters, why: str) -> None:
    with pytest.raises(WorkbenchError, match=why):
        continue_text(model_of(spec_of()), (1, 2), sampling, ablation)
