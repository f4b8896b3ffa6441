"""Embeddings: the mean of the oracle's states, the same alone and among others, and no matter to a runner at work."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.tiny import VOCAB, layer, request, runner_of, spec_of, specs, weights_of
from tests.helpers.events import of
from tests.thorough import tries
from workbench.engine import embeddings
from workbench.engine.embeddings import embed_texts, text_states
from workbench.engine.runner import generate
from workbench.engine.runner_thread import RunnerThread
from workbench.errors import WorkbenchError
from workbench.model.transformer import Transformer
from workbench.oracle import naive
from workbench.request import random_token_ids
from workbench.trace.events import Finished


def seen_through(spec, seed: int) -> Transformer:
    """A model whose logits are its hidden states, and zeros after them."""
    spec = spec.model_copy(update={"tie_word_embeddings": False, "final_logit_softcapping": 0.0})
    state = weights_of(spec, torch.float32, seed)
    state["head.weight"] = torch.eye(spec.vocab_size, spec.hidden_size)
    return Transformer.from_state(spec, state)


@settings(max_examples=tries(40))
@given(spec=specs, seed=st.integers(0, 10**6), count=st.integers(1, 30), size=st.sampled_from([3, 16, 256]))
def test_the_last_layers_are_the_oracles(spec, seed: int, count: int, size: int) -> None:
    model = seen_through(spec, seed)
    ids, hidden = random_token_ids(random.Random(seed), VOCAB, count), spec.hidden_size
    exact = naive.logits(model, torch.tensor(ids), torch.float64)[:, :hidden]
    plain = naive.logits(model, torch.tensor(ids))[:, :hidden].double()
    rounding = 8 * torch.finfo(torch.float32).eps * (1 + exact.abs().max().item())
    bound = 4 * (plain - exact).abs().max().item() + rounding
    before, embeddings.TOKENS_PER_CHUNK = embeddings.TOKENS_PER_CHUNK, size
    try:
        found = torch.cat(list(text_states(model, ids, len(spec.layers)))).double()
        (embedded,) = embed_texts(runner_of(model), [ids])
    finally:
        embeddings.TOKENS_PER_CHUNK = before
    assert (found - exact).abs().max().item() <= 4 * bound
    mean, norm = exact.mean(0), exact.mean(0).norm().item()
    vector = torch.tensor(embedded.vector, dtype=torch.float64)
    assert embedded.num_tokens == count and abs(vector.norm().item() - 1) < 1e-12
    assert (vector - mean / norm).abs().max().item() <= 8 * bound * hidden**0.5 / norm


def test_a_layer_is_the_end_of_a_shorter_model() -> None:
    spec = spec_of(layer(), layer(sliding_window=5), layer(), tied=False)
    model, ids = seen_through(spec, 3), random_token_ids(random.Random(1), VOCAB, 20)
    state = {name: values for name, values in weights_of(spec, torch.float32, 3).items() if "blocks.2" not in name}
    state["head.weight"] = torch.eye(VOCAB, spec.hidden_size)
    shorter = Transformer.from_state(
        spec.model_copy(update={"layers": spec.layers[:2], "tie_word_embeddings": False}), state
    )
    raw = torch.cat(list(text_states(model, ids, 2)))
    assert torch.equal(model.norm(raw), torch.cat(list(text_states(shorter, ids, 2))))
    first = torch.cat(list(text_states(model, ids, 0)))
    assert torch.equal(first, model.embed(torch.tensor(ids)))


def test_alone_and_among_others_and_beside_work_they_have_the_same_bits() -> None:
    runner = runner_of(seen_through(spec_of(), 1), prefix="radix")
    draw = random.Random(2)
    texts = [random_token_ids(draw, VOCAB, draw.randrange(1, 40)) for _ in range(5)]
    alone = [embed_texts(runner, [text])[0] for text in texts]
    assert embed_texts(runner, texts) == alone == embed_texts(runner, texts[::-1])[::-1]
    expected = {
        name: end.token_ids for name, end in generate(runner, [request("a", 9, 30), request("b", 5, 30)]).items()
    }
    thread = RunnerThread.attach(runner)
    handle = thread.submit([request("a", 9, 30), request("b", 5, 30)])
    assert embed_texts(runner, texts) == alone
    ends = {event.request_id: event.token_ids for event in of(Finished, handle)}
    assert ends == expected


def test_as_many_tokens_as_may_be_embedded_are() -> None:
    runner = runner_of(seen_through(spec_of(), 1))
    assert [each.num_tokens for each in embed_texts(runner, [[1, 2], [3, 4]], max_tokens=4)] == [2, 2]
    assert embed_texts(runner, [[1]], layer=2) == embed_texts(runner, [[1]]), "the last layer is that of two"


def test_what_cannot_be_embedded_is_refused_before_anything_is_computed() -> None:
    runner = runner_of(seen_through(spec_of(), 1))
    runner.model.embed = None  # type: ignore[assignment] (nothing may be computed)
    for texts, options, words in (
        ([[1], []], {}, "texts.1"),
        ([[1], [VOCAB]], {}, "texts.1"),
        (["a text"], {}, "no tokenizer"),
        ([[1] * 500], {}, "texts.0"),
        ([[1, 2], [3, 4]], {"max_tokens": 3}, "4 tokens, and 3 may be embedded"),
        ([[1]], {"layer": 3}, "give 0 to 2"),
    ):
        with pytest.raises(WorkbenchError, match=words):
            embed_texts(runner, texts, **options)
