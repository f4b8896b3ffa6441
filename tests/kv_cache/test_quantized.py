"""A packed layer: what a query reads is a function of its position alone, however a text is cut, batched, paged."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from compiled_kernels import Backend
from compiled_kernels.attention import AttentionParameters
from compiled_kernels.masks import Causal, SlidingWindow
from tests.helpers.kernels import needs_mlir
from tests.helpers.refusals import refuses
from tests.kv_cache.quantized_oracle import attended
from tests.thorough import tries
from workbench.batch import TokenBatch
from workbench.kv_cache import format as cache_format
from workbench.kv_cache.format import CacheFormat, KVCacheSpec, LayerFormat, build_cache_specs, parse_cache_format
from workbench.kv_cache.store import KVStore

Text = tuple[Tensor, Tensor, Tensor]  # queries, keys, values
KINDS = st.sampled_from(["dense", "int8", "int4", "fp8"])
INTEGERS = st.sampled_from(["int8", "int4"])


def formats(kinds: st.SearchStrategy = KINDS) -> st.SearchStrategy[LayerFormat]:
    made: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
        {
            "keys": kinds,
            "values": kinds,
            "quant_group": st.sampled_from([8, 16]),
            "columns": st.sampled_from([8, 64]),
            "residual_length": st.integers(1, 20),
            "num_sink_tokens": st.sampled_from([0, 0, 3, 18]),
            "rotate": st.booleans(),
        }
    )
    packed = made.filter(lambda values: {values["keys"], values["values"]} != {"dense"})
    return packed.map(lambda values: LayerFormat(**values))


@st.composite
def shapes(draw: st.DrawFn, kinds: st.SearchStrategy = KINDS) -> KVCacheSpec:
    format = draw(formats(kinds))
    window = draw(st.sampled_from([None, None, format.residual_length + 3, format.residual_length + 20]))
    sinks = draw(st.sampled_from([0, 2])) if window else 0
    return KVCacheSpec(draw(st.integers(1, 2)), 16, 0, window, sinks, format, 1)


def text(seed: int, tokens: int, shape: KVCacheSpec, share: int = 2) -> Text:
    generator = torch.Generator().manual_seed(seed)
    heads = shape.num_kv_heads * share
    return tuple(
        torch.randn(tokens, n, shape.head_dim, generator=generator)
        for n in (heads, shape.num_kv_heads, shape.num_kv_heads)
    )  # type: ignore[return-value]


class Cache:
    """A poisoned packed layer and the pages that each text holds, handed out in a shuffled order."""

    def __init__(self, shape: KVCacheSpec, texts: list[Text], size: int, shuffle: random.Random, backend: Backend):
        self.texts, self.size, self.backend, self.shape = texts, size, backend, shape
        each = max(len(q) for q, _, _ in texts) // size + 1
        pages = each * len(texts)
        (self.layer,) = KVStore([shape], (pages, pages), size, torch.float32).layers
        for table in (0, 1):
            for tensor in self.layer.page_tensors(table):
                tensor.view(torch.uint8).fill_(255)  # NaN, whatever the type of float
        orders = [shuffle.sample(range(1, pages + 1), pages) for _ in range(2)]
        self.tables = [[order[i * each : (i + 1) * each] for i in range(len(texts))] for order in orders]
        self.mask = (
            Causal() if shape.sliding_window is None else SlidingWindow(shape.sliding_window, shape.num_sink_tokens)
        )
        self.done = [0] * len(texts)
        self.spans: list[list[int]] = [[] for _ in texts]  # tokens of each, in the order of steps
        self.out = [torch.full_like(q, torch.nan) for q, _, _ in texts]

    def step(self, spans: dict[int, int]) -> None:
        """Compute the next `spans[text]` tokens of some texts in one batch; single tokens stand first."""
        order = sorted(spans, key=lambda i: spans[i] != 1)
        rows = [slice(self.done[i], self.done[i] + spans[i]) for i in order]
        lengths = torch.tensor([row.stop for row in rows], dtype=torch.int32)
        positions = torch.cat([torch.arange(row.start, row.stop) for row in rows])
        starts = torch.tensor([0, *torch.tensor([spans[i] for i in order]).cumsum(0).tolist()], dtype=torch.int32)
        tables = tuple(torch.tensor([table[i] for i in order], dtype=torch.int32) for table in self.tables)
        owners = torch.repeat_interleave(torch.arange(len(order)), starts[1:] - starts[:-1])
        slots = tuple(
            table[owners, positions // self.size].long() * self.size + positions % self.size for table in tables
        )
        only = all(spans[i] == 1 for i in order)
        batch = TokenBatch(positions, positions, starts, lengths, tables, slots, positions, only)
        mine = list(zip(order, rows, strict=True))
        q, k, v = (torch.cat([self.texts[i][part][row] for i, row in mine]) for part in range(3))
        self.layer.write(k, v, batch, Backend.EAGER)
        out = self.layer.attend(q, batch, AttentionParameters(0.3, self.mask), self.backend)
        for i, row, found in zip(order, rows, out.split([spans[i] for i in order]), strict=True):
            self.out[i][row] = found
            self.done[i] = row.stop
            self.spans[i].append(spans[i])

    def play(self, shuffle: random.Random, most: int) -> list[Tensor]:
        """All texts to their ends in random steps of random spans."""
        while left := {i: len(q) - self.done[i] for i, (q, _, _) in enumerate(self.texts) if self.done[i] < len(q)}:
            chosen = shuffle.sample(sorted(left), shuffle.randint(1, len(left)))
            self.step({i: shuffle.randint(1, min(most, left[i])) for i in chosen})
        return self.out


@settings(max_examples=tries(60))
@given(shapes(), st.lists(st.integers(1, 60), min_size=1, max_size=3), st.integers(1, 40), st.randoms())
def test_every_read_is_the_oracles(shape: KVCacheSpec, lengths: list[int], most: int, shuffle: random.Random) -> None:
    """Whatever the format, the chunks, the neighbours and the order of pages."""
    texts = [text(shuffle.randrange(999), length, shape) for length in lengths]
    size = shape.format.quant_group * shuffle.choice([1, 2])
    cache = Cache(shape, texts, size, shuffle, Backend.EAGER)
    for found, (q, k, v) in zip(cache.play(shuffle, most), texts, strict=True):
        exact = attended(q, k, v, shape, 0.3)
        assert (found.double() - exact).abs().max() < 2e-5 * (1 + exact.abs().max())


@needs_mlir
@settings(max_examples=tries(10))
@given(INTEGERS, INTEGERS, st.sampled_from([0, 3]), st.sampled_from([None, 40]), st.booleans(), st.randoms())
def test_the_kernel_reads_as_the_oracle_and_the_same_alone_or_among_others(
    keys: str, values: str, sinks: int, window: int | None, rotate: bool, shuffle: random.Random
) -> None:
    """Chunked and decoded one by one; and in the same spans alone or among others, bit for bit."""
    sizes = {"quant_group": 16, "residual_length": 9, "num_sink_tokens": sinks}
    made = {"keys": keys, "values": values, "rotate": rotate, **sizes}
    shape = KVCacheSpec(2, 16, 0, window, 0, LayerFormat(**made), 1)  # type: ignore[arg-type]
    texts = [text(shuffle.randrange(999), length, shape) for length in (70, 41, 9)]
    mixed = Cache(shape, texts, 32, shuffle, Backend.MLIR)
    mixed.play(shuffle, 30)
    for each, spans, found in zip(texts, mixed.spans, mixed.out, strict=True):
        exact = attended(*each, shape, 0.3)
        for own in (spans, [1] * len(each[0])):
            alone = Cache(shape, [each], 32, shuffle, Backend.MLIR)
            for tokens in own:
                alone.step({0: tokens})
            assert (alone.out[0].double() - exact).abs().max() < 2e-5 * (1 + exact.abs().max())
            assert own is not spans or torch.equal(alone.out[0], found)


@given(st.lists(st.tuples(st.integers(1, 3), st.sampled_from([None, 9, 300]), formats()), min_size=1, max_size=3),
       st.integers(1, 4), st.sampled_from([16, 48]), st.sampled_from([torch.float32, torch.bfloat16]))  # fmt: skip
def test_bytes_equal_the_formula(layers: list, pages: int, size: int, dtype: torch.dtype) -> None:
    made, taken = [], 0
    for groups, window, format in layers:
        made.append(KVCacheSpec(groups, 16, taken, window, 0, format, taken + 1))
        taken += 2
    store = KVStore(made, tuple(range(pages, pages + taken)), size, dtype)
    assert store.bytes == store.expected_bytes
    by_hand = 0.0
    for groups, _, format in layers:
        for kind, run in zip(format.key_value_formats, (format.quant_group, min(format.columns, 16)), strict=True):
            shared = {"dense": 0.0, "fp8": 2 / run}.get(kind, 4 / run)
            code = {"dense": float(dtype.itemsize), "int8": 1.0, "int4": 0.5, "fp8": 1.0}[kind]
            by_hand += groups * 16 * (code + shared)
    assert store.bytes_per_token == by_hand


@pytest.mark.parametrize(
    ("shapes", "tensors"),
    [([KVCacheSpec(1, 8, 0, None, 0, LayerFormat(format="int4", quant_group=8), 1)], 6),
     ([KVCacheSpec(1, 8, 0), KVCacheSpec(1, 8, 1)], 2)],
)  # fmt: skip
def test_scrubbing_and_copying_reach_every_tensor_of_a_page(shapes: list[KVCacheSpec], tensors: int) -> None:
    """Of one group of layers, and no other's."""
    store = KVStore(shapes, (3, 3), 8, torch.float32)
    for table in (0, 1):
        for tensor in store.page_tensors(table):
            tensor.view(torch.uint8).fill_(255)
    store.zero_pages(0, [2])
    assert all(not part[2].any() and part[1].view(torch.uint8).eq(255).all() for part in store.page_tensors(0))
    assert len(store.page_tensors(0)) == tensors and all(part.isnan().all() for part in store.page_tensors(1))
    store.copy_pages(0, [2], [3])
    assert all(not part[3].any() for part in store.page_tensors(0))


def test_layers_alike_share_tables_and_a_window_within_the_residual_stays_dense() -> None:
    format = parse_cache_format({"format": "int4", "layers": {2: {"format": "dense"}, 3: {"residual_length": 32}}})
    made = build_cache_specs([(2, 16, None, 0, None)] * 4 + [(2, 16, 50, 4, None)], format)
    assert [(s.group, s.residual_group) for s in made] == [(0, 1), (0, 1), (2, 2), (3, 4), (5, 5)]
    assert [str(s.format) for s in made] == ["int4", "int4", "dense", "int4", "dense"]
    tables = KVStore(made, (1,) * 6, 64, torch.float32).groups
    assert (tables[0].residual_length, tables[0].quant_group, tables[0].layers) == (64, 64, (0, 1))
    assert (
        tables[1].sliding_window == 128
        and tables[3].residual_length == 32
        and (tables[5].sliding_window, tables[5].num_sink_tokens) == (50, 4)
    )


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("int5", "unknown cache format 'int5'; did you mean 'int8'|unknown cache format 'int5'; did you mean 'int4'"),
        ({"format": "int4", "quant_grup": 32}, "cache: quant_grup: unknown key; did you mean 'quant_group'"),
        ({"format": "int4", "quant_group": 12}, "cache: quant_group: .*multiple of 8"),
        ({"format": "int4", "residual_length": 0}, "cache: residual_length: .*greater than or equal to 1"),
        ({"rotate": True}, "rotate without a quantized format"),
        ({"format": "int8", "layers": {0: {"fromat": "dense"}}}, "cache: layers.0.fromat: unknown key"),
    ],
)
def test_settings_that_cannot_be(wrong, message: str) -> None:
    refuses(message, parse_cache_format, wrong)


def test_what_a_model_or_its_pages_do_not_fit_is_refused() -> None:
    refuses(
        "cache.layers: no layer 7; the model has layers 0..1",
        lambda: parse_cache_format({"format": "int8", "layers": {7: {}}}).check(2, 64),
    )
    refuses("groups of 64 tokens do not divide pages of 96", lambda: CacheFormat(format="int8").check(2, 96))
    odd = KVCacheSpec(1, 12, 0, None, 0, LayerFormat(format="int4"), 1)
    refuses("int4 keys are quantized 8 columns at a time; heads have 12", odd.page_formats, 64)
    refuses(
        "a power of two, not 24",
        lambda: replace(odd, head_dim=24, format=LayerFormat(format="int4", rotate=True, columns=8)).page_formats(64),
    )


def test_a_group_is_whole_words_of_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_format, "codes_per_word", lambda _: 16)  # as a format of two bits has
    assert LayerFormat(format="int4", quant_group=16).quantized
    with pytest.raises(ValidationError, match="quant_group 24: int4 needs a multiple of 16"):
        LayerFormat(format="int4", quant_group=24)
