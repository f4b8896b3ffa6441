"""Codecs of groups of tokens, of keys and values apart: what is encoded depends on texts and positions alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_kernels import Backend
from compiled_kernels.attention import AttentionParameters, Spans
from compiled_kernels.masks import AndMask, Causal, Mask, SlidingWindow
from tests.engine.guesses import Guesses, drafts, plain, run_checked, tokens
from tests.engine.tiny import model_of, request, runner_of, spec_of, specs
from tests.helpers.refusals import refuses
from tests.thorough import tries
from workbench.batch import TokenBatch
from workbench.custom import register
from workbench.kv_cache.codec import CodecPair, load_codec, stored_bytes, stored_layout
from workbench.kv_cache.codes import affine_codes, affine_numbers
from workbench.kv_cache.format import CacheFormat, KVCacheSpec, build_cache_specs, parse_cache_format
from workbench.kv_cache.page_formats import CodecPages, shown_table
from workbench.kv_cache.store import KVStore
from workbench.model.spec import ModelSpec
from workbench.request import CustomPart, Request
from workbench.testing import check_kv_format, kv_scenarios
from workbench.testing.attention_scenarios import require_equal_logits

HERE = "tests.kv_cache.test_codec_groups"


class Exact:
    """The bytes of each number of a block."""

    def __init__(self, group: int | None = None):
        self.group = group

    def encode(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (rows.double().contiguous().view(torch.uint8),)

    def decode(self, stored: torch.Tensor) -> torch.Tensor:
        return stored.view(torch.float64)


class ByChannel:
    """Three bits a number, with a scale for each channel of a block."""

    def encode(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return affine_codes(rows, 3, dim=1)

    def decode(self, *stored: torch.Tensor) -> torch.Tensor:
        return affine_numbers(*stored)


class Coarse:
    """Keys by channel, values as they are."""

    def __init__(self, group: int = 4):
        self.group, self.keys, self.values = group, ByChannel(), Exact()


class Pair:
    """Keys in half precision, values as they are: rows, without groups."""

    class Half:
        def encode(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return (rows.half(),)

        def decode(self, stored: torch.Tensor) -> torch.Tensor:
            return stored.float()

    def __init__(self) -> None:
        self.keys, self.values = self.Half(), Exact()


def codec(name: str, residual: int = 5, sinks: int = 0, **arguments: Any) -> CacheFormat:
    part = CustomPart(path=f"{HERE}:{name}", arguments=arguments)
    return CacheFormat(codec=part, residual_length=residual, num_sink_tokens=sinks)


def test_every_law_holds() -> None:
    for format, laws in ((codec("Coarse"), 7), (codec("Coarse", residual=1, sinks=3), 7), (codec("Pair"), 7)):
        report = check_kv_format(format, examples=2, backends=())
        assert report.passed and len(report.laws) == laws, str(report)


def test_without_loss_it_is_the_dense_cache() -> None:
    """In few pages too, after preemption and from a prefix."""
    format = codec("Exact", group=4)

    @settings(max_examples=tries(6))
    @given(kv_scenarios.kv_scenarios(format), st.sampled_from([{}, {"prefix": "radix"}, {"offload": "memory"}]))
    def check(scenario: kv_scenarios.KVScenario, extra: dict[str, Any]) -> None:
        lossless, dense = (
            kv_scenarios.sampled_kv_logits(scenario, each, page_size=8, pages=9, **extra)
            for each in (format, CacheFormat())
        )
        require_equal_logits(lossless, dense, "a codec without loss gives other rows", scenario)

    check()


CACHES = [codec("Coarse", residual=1), codec("Coarse", residual=3), codec("Coarse", residual=2, sinks=3, group=2)]


def _speculated(spec: ModelSpec, seed: int, most: int, cache: CacheFormat, prefix: str, pages: int, right: float):
    """Return the tokens of a run with drafts, of which a share is right, and those of one without."""
    model = model_of(spec, seed)
    asked = [request(f"{seed}-{i}", 3 + 4 * i, 5 + 3 * i) for i in range(3)]
    asked.append(Request("again", asked[2].prompt_ids, asked[2].sampling))
    shared = {"cache": cache, "prefix": prefix, "pages": pages, "page_size": 4, "max_num_seqs": 3}
    wanted = plain(model, asked, **{**shared, "pages": 60})
    proposer = Guesses({name: end.token_ids for name, end in wanted.items()}, seed, right)
    runner = runner_of(model, **shared, speculator=drafts(proposer, most))
    return tokens(run_checked(runner, asked)), tokens(wanted)


@settings(max_examples=tries(15))
@given(
    specs, st.integers(0, 2**31), st.integers(1, 5), st.sampled_from(CACHES), st.sampled_from(["off", "radix"]),
    st.integers(20, 40), st.floats(0, 1),
)  # fmt: skip
def test_rejected_drafts_leave_nothing_in_a_code(spec: ModelSpec, seed, most, cache, prefix, pages, right) -> None:
    """Groups that were encoded with a draft in them are encoded again, whatever number of drafts is rejected."""
    found, wanted = _speculated(spec, seed, most, cache, prefix, pages, right)
    assert found == wanted


def test_a_code_with_a_rejected_draft_in_it_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a group is encoded once only."""
    known: set[tuple[int, int]] = set()
    write = CodecPages.write

    def once(self: CodecPages, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, *_: object) -> None:
        fresh = torch.tensor([(id(self), slot) not in known for slot in slots.tolist()])
        known.update((id(self), slot) for slot in slots.tolist())
        write(self, keys[fresh], values[fresh], slots[fresh])

    arguments = spec_of(), 3, 5, CACHES[0], "off", 60, 0.5
    found, wanted = _speculated(*arguments)
    assert found == wanted
    monkeypatch.setattr(CodecPages, "write", once)
    runs = [_speculated(spec_of(), seed, *arguments[2:]) for seed in range(8)]
    assert any(found != wanted for found, wanted in runs)


def _written(format: CacheFormat, tokens: int, page_size: int) -> tuple[Any, Any, torch.Tensor]:
    """Return a layer with `tokens` tokens of one sequence, a batch of its last token, and its query."""
    (shape,) = build_cache_specs([(2, 8, None, 0, None)], format)
    held = -(-tokens // page_size)
    store = KVStore([shape], (held,) * (1 + shape.keeps_residual), page_size, torch.float64)
    generator = torch.Generator().manual_seed(tokens)
    k, v = torch.randn(2, tokens, 2, 8, generator=generator).double()
    table = torch.arange(1, held + 1, dtype=torch.int32)[None]
    slots, at = page_size + torch.arange(tokens), torch.arange(tokens)

    def batch(start: int) -> TokenBatch:
        spans, lengths = torch.tensor([0, tokens - start]), torch.tensor([tokens])
        tables = (table,) * len(store.groups)
        return TokenBatch(at[start:], at[start:], spans, lengths, tables, (slots[start:],) * 2, at[:1], False)

    (layer,) = store.layers
    layer.write(k, v, batch(0))
    return layer, batch(tokens - 1), torch.randn(1, 4, 8, generator=generator).double()


def near_or_first(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return (query - key < 6) | (key < 4)


@pytest.mark.parametrize("format", [codec("Exact"), codec("Exact", group=4)], ids=["rows", "groups"])
def test_only_pages_that_the_mask_shows_are_decoded(format: CacheFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, batch, q = _written(format, 61, 8)
    decoded: list[int] = []
    decode = Exact.decode
    monkeypatch.setattr(Exact, "decode", lambda self, stored: decoded.append(len(stored)) or decode(self, stored))
    parameters = AttentionParameters(scale=0.5, mask=AndMask(Causal(), near_or_first))
    found = layer.attend(q, batch, parameters, Backend.EAGER)
    grouped = layer.group != getattr(layer, "residual_group", layer.group)
    assert decoded == [2 + 2 if grouped else 8 + 8 + 5] * 2, "the first page and those of positions 55 to 60"
    monkeypatch.setattr("workbench.kv_cache.page_formats.shown_table", lambda table, *_: table)
    decoded.clear()
    assert torch.equal(found, layer.attend(q, batch, parameters, Backend.EAGER))
    assert decoded == [56 // 4 if grouped else 61] * 2


@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 8))
def test_shown_pages_of_a_table(context: int, length: int, size: int) -> None:
    """Against the mask, position by position; a page beyond the context is the null page."""
    length, held = min(length, context), -(-context // size) + 1
    table = torch.arange(1, held + 1)[None]
    spans = Spans(torch.tensor([0, length]), torch.tensor([context]), False)
    mask: Mask = AndMask(Causal(), near_or_first)
    found = shown_table(table, spans, mask, size)[0].tolist()
    seen = {key // size for query in range(context - length, context) for key in range(query + 1)
            if query - key < 6 or key < 4}  # fmt: skip
    if len(seen) < held - 1:
        assert found == [page + 1 if page in seen else 0 for page in range(held)]
    for whole in (Causal(), SlidingWindow(3)):
        assert torch.equal(shown_table(table, spans, whole, size), table)


def test_bytes_are_those_of_the_tensors() -> None:
    """Three-bit codes lie in bytes here: 16 x 8 of a block's keys, with 16 halves twice, and the values' own."""
    loaded = load_codec(CustomPart(path=f"{HERE}:Coarse", arguments={"group": 8}))
    layout = stored_layout(loaded, 2, 16, torch.float32)
    assert layout.keys == (((8, 2, 16), torch.uint8), *[((1, 2, 16), torch.float16)] * 2)
    assert layout.values == (((8, 2, 16 * 8), torch.uint8),)
    assert stored_bytes(loaded, 2, 16, torch.float32) == (8 * 32 + 2 * 2 * 32) / 8 + 8 * 32
    format = codec("Coarse", group=8)
    (shape,) = build_cache_specs([(2, 16, None, 0, None)], format)
    store = KVStore([shape], (5, 3), 16, torch.float32)
    assert store.bytes == store.expected_bytes and store.codec_bytes == 0
    assert shape.residual_bytes(torch.float32) == 2 * 2 * 16 * 4 * (5 + 8 - 1)


def test_a_window_within_the_residual_stays_dense() -> None:
    inside, beyond = build_cache_specs([(2, 16, 5, 0, None), (2, 16, 6, 0, None)], codec("Coarse", residual=5))
    assert inside.codec is None and not inside.keeps_residual and beyond.codec is not None
    assert [*KVCacheSpec(2, 16).cache_groups] == [0] and len(beyond.cache_groups) == 2


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (CodecPair(Exact(), object()), r"values: has no encode\(rows\)"),  # type: ignore[arg-type] (the mistake)
        (CodecPair(Exact(), Exact(), group=0), "group must be a number of tokens, 1 or more, not 0"),
    ],
)
def test_a_pair_that_is_none_is_refused(part: CodecPair, message: str) -> None:
    register("a pair")(part)
    refuses(message, lambda: load_codec(CustomPart(path="a pair")))


def test_groups_that_do_not_divide_a_page_are_refused() -> None:
    refuses("groups of 6 tokens do not divide pages of 16", lambda: codec("Coarse", group=6).check(2, 16))
    parse_cache_format({"codec": f"{HERE}:Coarse"}).check(2, 16)
