"""Memory by formula, held against tensors: allocated ones where they fit, torch's meta device where they do not."""

from __future__ import annotations

import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.engine.tiny import layer, model_of, runner_of, spec_of
from tests.model.strategies import llama_specs
from tests.thorough import tries
from workbench.engine.config import CacheConfig
from workbench.kv_cache.pages import pages_for
from workbench.memory.capacity import bytes_by_table, meta_kv_store
from workbench.model.attention_spec import AttentionSpec
from workbench.model.memory import activation_bytes, estimate_memory, weight_bytes
from workbench.model.quantized import WeightFormat
from workbench.model.shapes import SHAPES, named_shape
from workbench.model.spec import LayerSpec, ModelSpec
from workbench.model.transformer import Transformer

KINDS = st.tuples(
    st.integers(1, 2), st.integers(1, 2), st.sampled_from([2, 6]), st.sampled_from([None, 3, 9])
)  # groups, share, dim, window
DTYPES = st.sampled_from(["float32", "bfloat16", "float64"])


def tensor_bytes(model: Transformer) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


@given(llama_specs(), DTYPES)
def test_weights_are_the_models_tensors(spec: ModelSpec, dtype: str) -> None:
    number = getattr(torch, dtype)
    assert weight_bytes(spec, number.itemsize) == tensor_bytes(model_of(spec, dtype=number))


@settings(max_examples=tries(30))
@given(
    st.sampled_from(["dense", "int8", "int4"]),
    st.sampled_from(["dense", "int8", "int4"]),
    st.booleans(),
    st.integers(1, 3),
)
def test_quantized_weights_are_the_models_tensors(blocks: str, head: str, tied: bool, layers: int) -> None:
    kind = LayerSpec(attention=AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8), intermediate_size=64)
    spec = ModelSpec(
        name="x",
        vocab_size=48,
        hidden_size=32,
        layers=(kind,) * layers,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    format = WeightFormat.parse(blocks, head, 16)
    with torch.device("meta"):
        model = Transformer(spec, format=format).to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if name.endswith(
            "scales"
        ):  # of float32 for a row in INT8, of float16 for a group in INT4: whatever the model's
            wide = (head if name.startswith("head") else blocks) == "int8"
            parameter.data = parameter.data.to(torch.float32 if wide else torch.float16)
    assert weight_bytes(spec, 2, format) == tensor_bytes(model)


@pytest.mark.parametrize("name", SHAPES)
def test_named_shapes_on_the_meta_device(name: str) -> None:
    spec = named_shape(name)
    with torch.device("meta"):
        model = Transformer(spec).to(torch.bfloat16)
    assert weight_bytes(spec, 2) == tensor_bytes(model) == 2 * spec.num_parameters


@settings(max_examples=tries(40))
@given(st.lists(KINDS, min_size=1, max_size=3), DTYPES, st.integers(1, 6), st.integers(1, 47))
def test_the_cache_is_the_pages_a_sequence_holds(kinds: list, dtype: str, page: int, tokens: int) -> None:
    """Allocated pages, times what a page of the real tensors takes, for a sequence that the scheduler serves."""
    spec = spec_of(*(layer(groups * share, groups, dim, window) for groups, share, dim, window in kinds))
    number = getattr(torch, dtype)
    cache = CacheConfig(page_size=page)
    parts = bytes_by_table(meta_kv_store(spec, cache, dtype))
    runner = runner_of(model_of(spec, dtype=number), page_size=page, pages=60)
    real = bytes_by_table(runner.store)
    assert parts == real
    found = estimate_memory(spec, parts, tokens, 3, number.itemsize, page_size=page)
    closed = sum(2 * groups * dim * number.itemsize * _positions(window, tokens, page)
                 for groups, _, dim, window in kinds)  # fmt: skip
    assert (found.sequence_bytes, found.cache_bytes) == (closed, 3 * closed)
    assert runner.store.bytes == sum(
        (count + 1) * page * part.bytes_per_token for count, part in zip(runner.store.num_pages, real, strict=True)
    )


def _positions(window: int | None, tokens: int, page: int) -> int:
    """Positions in the pages that hold the last `window` of `tokens`."""
    begin = 0 if window is None else max(0, tokens - window)
    return (pages_for(tokens, page) - begin // page) * page


class Live(TorchDispatchMode):
    """The most bytes of tensors made under it that lived at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        old = {
            each.untyped_storage().data_ptr() for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)
        }
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and (key := tensor.untyped_storage().data_ptr()) not in old | self.seen:
                size = tensor.untyped_storage().nbytes()
                self.now += size
                self.seen.add(key)
                self.most = max(self.most, self.now)
                weakref.finalize(tensor.untyped_storage(), self._gone, key, size)
        return out

    def _gone(self, key: int, size: int) -> None:
        self.now -= size
        self.seen.discard(key)


@pytest.mark.parametrize(("width", "hidden", "heads"), [(64, 1024, 2), (256, 256, 4), (32, 64, 16)])
def test_activations_are_what_a_step_has_alive(width: int, hidden: int, heads: int) -> None:
    """The formula counts what must be there at once; the modules as written need a little more (a norm's own steps)."""
    kind = LayerSpec(
        attention=AttentionSpec(num_heads=heads, num_kv_heads=heads, head_dim=32), intermediate_size=hidden
    )
    spec = ModelSpec(
        name="x",
        vocab_size=64,
        hidden_size=width,
        layers=(kind,) * 3,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    model = model_of(spec)
    ids = torch.arange(48) % 64
    with torch.inference_mode(), Live() as live:
        model.logits(ids)
    cache = 2 * 3 * (48 + 16 + 64) * heads * 32 * 4
    scores = 4 * heads * 48 * 48 * 4
    formula = activation_bytes(spec, 48, 4)
    assert 0.5 * formula < live.most - cache < 2 * formula + scores


@given(st.integers(1, 9), st.integers(1, 9))
def test_a_step_has_its_most_tokens_or_one_of_each_sequence(tokens: int, batch: int) -> None:
    spec = named_shape("tiny")
    found = estimate_memory(spec, (), 1, batch, 4, step_tokens=tokens)
    assert found.activation_bytes == activation_bytes(spec, max(tokens, batch), 4, samples=batch)
