"""Inside requests that are being served: weights and hidden states are those of Hugging Face's own Llama, on requests
in the midst of chunked, batched, paged serving; and looking changes nothing."""

from __future__ import annotations

import random
from collections import deque
from pathlib import Path
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_kernels.quantized_attention import QuantizedKV, hadamard_rotate
from tests.engine.tiny import VOCAB, finals, layer, model_of, request, runner_of, spec_of, specs
from tests.thorough import tries
from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError
from workbench.kv_cache.attention_layers import GroupedLayer
from workbench.kv_cache.format import CacheFormat
from workbench.kv_cache.page_formats import QuantizedPages
from workbench.model.attention_spec import AttentionSpec
from workbench.model.hf.save import save_folder
from workbench.model.hf.weights import random_weights
from workbench.model.layers import TransformerBlock
from workbench.model.spec import LayerSpec, ModelSpec
from workbench.model.transformer import Transformer
from workbench.oracle import naive
from workbench.trace.events import Decoded, Event

MODEL = model_of(spec_of(layer(4, 2), layer(4, 2), layer(4, 2)))


def serving(runner: Runner, tokens: int = 3) -> None:
    """Three requests under way, each with at least `tokens` output tokens."""
    box: deque[Event] = deque()
    for i in range(3):
        runner.submit(request(f"r{i}", 7 + 5 * i, 12), box)
    decoded: dict[str, int] = dict.fromkeys(("r0", "r1", "r2"), 0)
    while min(decoded.values()) < tokens:
        runner.step(box)
        while box:
            if isinstance(event := box.popleft(), Decoded):
                decoded[event.request_id] += 1


def test_it_is_hugging_faces_attention(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    folder = tmp_path / "model"
    save_folder(folder, MODEL.spec, random_weights(MODEL.spec, torch.float32, 0), torch.float32)
    theirs = transformers.LlamaForCausalLM.from_pretrained(folder, attn_implementation="eager").double()
    ours = Transformer.from_state(MODEL.spec, random_weights(MODEL.spec, torch.float32, 0)).double()
    runner = runner_of(ours)
    serving(runner)
    for name in ("r0", "r1", "r2"):
        found = runner.inspect(name, range(0, 9), hidden_states=range(4))
        ids = torch.tensor([found.token_ids])
        with torch.no_grad():
            exact = theirs.model(ids, output_attentions=True, output_hidden_states=True)
        assert found.positions == tuple(range(9))
        for number in range(3):
            weights = exact.attentions[number][0][:, list(found.positions)]
            assert (found.weights[number] - weights).abs().max() < 1e-5  # theirs norms in float32, whatever the model
            hidden = exact.hidden_states[number][0][list(found.positions)]
            assert (found.hidden_states[number] - hidden).abs().max() < 1e-5


@settings(max_examples=tries(25))
@given(specs, st.integers(1, 6), st.randoms())
def test_what_leaves_the_last_block_gives_the_oracles_logits(spec: ModelSpec, page: int, draw: random.Random) -> None:
    """Random models, windows among them: hidden states through norm and head are what the oracle says of each row."""
    model = model_of(spec, draw.randrange(9), dtype=torch.float64)
    runner = runner_of(model, page_size=page, pages=60)
    serving(runner, 1)
    name, last = draw.choice(["r0", "r1", "r2"]), len(spec.layers)
    row = runner.tracker.sequences[name].num_computed_tokens - 1
    attentions = [cast(AttentionSpec, kind.attention) for kind in spec.layers]  # `specs` draws no latent ones
    if any(_given_back(a, row, page) for a in attentions):
        with pytest.raises(WorkbenchError, match="cannot be inspected any more"):
            runner.inspect(name)
        return
    found = runner.inspect(name, (-1,), hidden_states=(0, last))
    assert found.positions == (row,)
    ids = torch.tensor(found.token_ids)
    exact = naive.logits(model, ids)[[row]]
    assert (model.compute_logits(found.hidden_states[last]) - exact).abs().max() < 1e-9
    assert torch.equal(found.hidden_states[0], model.embed(ids[[row]]))
    for number, attention in enumerate(attentions):
        weights = found.weights[number]
        assert weights.shape == (attention.num_heads, 1, row + 1) and bool((weights >= 0).all())
        total = weights.sum(-1)
        assert (total < 1).all() if attention.sink_logits else (total - 1).abs().max() < 1e-5
        if attention.sliding_window is not None:
            assert not weights[..., attention.num_sink_tokens : max(0, row + 1 - attention.sliding_window)].any()


def _given_back(attention: AttentionSpec, row: int, page: int) -> bool:
    """Return True if the oldest page in the last row's window was freed when that row was computed; one with sinks is
    kept."""
    if attention.sliding_window is None:
        return False
    oldest = row + 1 - attention.sliding_window
    return oldest + 1 - page >= attention.num_sink_tokens and (oldest + 1) % page == 0


@pytest.mark.parametrize("cache", ["int8", {"format": "int4", "rotate": True, "num_sink_tokens": 3}, {"keys": "fp8"}])
def test_quantized_keys_weigh_as_the_cache_reads_them(cache: str | dict) -> None:
    """Weights times the values that the cache gives for them are what its own attention read."""
    kind = LayerSpec(attention=AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8), intermediate_size=12)
    spec = ModelSpec(name="x", vocab_size=VOCAB, hidden_size=16, layers=(kind, kind), max_position_embeddings=96)
    values = {"format": cache} if isinstance(cache, str) else cache
    format = CacheFormat(**{"quant_group": 8, "columns": 8, "residual_length": 8, **values})
    runner = runner_of(model_of(spec), page_size=8, cache=format)
    box: deque[Event] = deque()
    runner.submit(request("a", 50, 9), box)
    while runner.tracker.sequences["a"].num_computed_tokens < 53:
        runner.step(box)
    found = runner.inspect("a", (-1,), hidden_states=(0, 1, 2))
    (row,) = found.positions
    for number, block in enumerate(cast(list[TransformerBlock], list(runner.model.blocks))):
        layer = runner.store.layers[number]
        assert isinstance(layer, GroupedLayer) and isinstance(layer.encoded, QuantizedPages)
        weights = found.weights[number]
        assert (weights.sum(-1) - 1).abs().max() < 1e-5
        tables = [
            torch.tensor(runner.tracker.sequences["a"].pages[table])[None]
            for table in (layer.group, layer.residual_group)
        ]
        pages = *layer.encoded.sides, layer.residual.keys, layer.residual.values
        context = QuantizedKV(*pages, *tables, rule=layer.quantization_rule).gather(0, row + 1, slice(0, 1))
        assert context.readable is not None
        kept = context.v * context.readable[0, :, None, None]
        values = torch.zeros(row + 1, 2, 8).index_add_(0, context.positions, kept)
        mixed = torch.einsum("hc,chd->hd", weights[:, 0], values.repeat_interleave(2, dim=1))
        mixed = hadamard_rotate(mixed[None]) if layer.shape.format.rotate else mixed[None]
        assert (
            block.after_attention(found.hidden_states[number], mixed) - found.hidden_states[number + 1]
        ).abs().max() < 1e-5


def test_only_what_was_asked_for() -> None:
    runner = runner_of(MODEL)
    serving(runner)
    every = runner.inspect("r1", (3, -1))
    some = runner.inspect("r1", (3, -1), layers=(-1,), heads=(2, 0))
    assert list(some.weights) == [2] and some.hidden_states == {}
    assert torch.equal(some.weights[2], every.weights[2][[2, 0]])
    none = runner.inspect("r1", (3,), layers=(), hidden_states=(1,))
    assert none.weights == {} and list(none.hidden_states) == [1]


def test_looking_changes_nothing() -> None:
    requests = [request(f"r{i}", 7 + 5 * i, 12, temperature=0.8, seed=i) for i in range(3)]
    plain = finals(runner_of(MODEL), requests)
    runner, done = runner_of(MODEL), {}
    pages = [tensor.clone() for tensor in runner.store.page_tensors(0)]
    for event in runner.stream(requests):
        for name, sequence in list(runner.tracker.sequences.items()):
            if sequence.num_computed_tokens:
                pages = [tensor.clone() for tensor in runner.store.page_tensors(0)]
                runner.inspect(name, (0, -1), hidden_states=(0, 3))
                now = runner.store.page_tensors(0)
                assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(pages, now, strict=True))
        if event.kind == "finished":
            done[event.request_id] = event.token_ids  # type: ignore[attr-defined]
    assert done == plain


def test_nothing_is_computed_without_an_inspection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.engine.runner.inspect", lambda *_: pytest.fail("an inspection ran"))
    serving(runner_of(MODEL))


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"request_id": "r9"}, "request 'r9' is not being served; served now: r0, r1, r2"),
        ({"positions": (99,)}, "row 99: .* tokens are computed"),
        ({"positions": ()}, "no rows to inspect"),
        ({"layers": (3,)}, "layer 3: the model has 3"),
        ({"heads": (4,)}, "head 4: there are 4"),
        ({"hidden_states": (4,)}, "hidden state 4: there are 4"),
    ],
)
def test_an_absent_part_is_reported(asked: dict, words: str) -> None:
    runner = runner_of(MODEL)
    serving(runner)
    with pytest.raises(WorkbenchError, match=words):
        runner.inspect(**{"request_id": "r0", **asked})


def test_a_row_behind_the_window_is_gone() -> None:
    runner = runner_of(model_of(spec_of(layer(sliding_window=5))), page_size=2)
    serving(runner)
    last = runner.tracker.sequences["r2"].num_computed_tokens - 1
    assert runner.inspect("r2", (last,)).weights[0].shape[-1] == last + 1
    with pytest.raises(WorkbenchError, match="row 6 cannot be inspected any more; .* window of 5 tokens"):
        runner.inspect("r2", (6,))
