"""`batch_invariant`: a request's logits have the same bits in every batch. Nothing here is close: all is equal."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_kernels import Backend, backend_problems
from tests.engine.scribe import Rows, Scribe, asked, differing, served
from tests.engine.tiny import layer, mixture_of, runner_of, spec_of, weights_of
from tests.engine.weight_formats import FORMATS
from tests.thorough import tries
from workbench.engine.load import load
from workbench.errors import WorkbenchError
from workbench.executors.packing import DECODE_BUCKETS
from workbench.executors.token_parallel import TokenParallelExecutor
from workbench.kv_cache.format import CacheFormat
from workbench.model.quantized import WeightFormat
from workbench.model.shapes import named_shape
from workbench.model.spec import LayerSpec, ModelSpec, MoESpec, RouterSpec
from workbench.model.transformer import Transformer
from workbench.request import Request
from workbench.trace.events import Preempted

problem = backend_problems()[Backend.MLIR]
pytestmark = pytest.mark.skipif(problem is not None, reason=f"backend mlir: {problem}")

WIDE = named_shape("tiny")  # wide enough for dot products of bfloat16 pairs
ODD = spec_of(
    layer(6, 2, bias=True), layer(3, 1, 6, sliding_window=9, num_sink_tokens=2, softcap=1.5, qk_norm=True), tied=False
)
SUNK = spec_of(layer(4, 2, sink_logits=True), layer(4, 2, sliding_window=5, position="none")).model_copy(
    update={"final_logit_softcapping": 3.0, "embedding_scale": 2.5}
)
CAPPED = spec_of(layer(4, 2, dim=16), layer(2, 1, dim=16, sliding_window=7))
PACKED = CacheFormat(keys="int4", values="int8", quant_group=8, columns=8, residual_length=9, num_sink_tokens=3)
KINDS: dict[str, tuple[ModelSpec, torch.dtype, WeightFormat, CacheFormat]] = {
    "odd float32": (ODD, torch.float32, WeightFormat(), CacheFormat()),
    "sunk float32": (SUNK, torch.float32, WeightFormat(), CacheFormat()),
    "wide float32": (WIDE, torch.float32, WeightFormat(), CacheFormat()),
    "wide bfloat16": (WIDE, torch.bfloat16, WeightFormat(), CacheFormat()),
    "mixture float32": (mixture_of(5, 2), torch.float32, WeightFormat(), CacheFormat()),
    "mixture bfloat16": (mixture_of(16, 3, RouterSpec(score="sigmoid", softmax_chosen=False, renormalize=True)),
                         torch.bfloat16, WeightFormat(), CacheFormat()),
    "int8 weights": (WIDE, torch.bfloat16, WeightFormat.parse("int8"), CacheFormat()),
    "int8 activations": (WIDE, torch.bfloat16, WeightFormat.parse("int8", activations="int8"), CacheFormat()),
    "int4 weights": (WIDE, torch.float32, WeightFormat.parse("int4", quant_group=32), CacheFormat()),
    "int4 weights with minima": (WIDE, torch.bfloat16, FORMATS["int4 with minima"], CacheFormat()),
    "fp8 weights": (WIDE, torch.float32, FORMATS["fp8 by block"], CacheFormat()),
    "int4 keys, int8 values": (CAPPED, torch.float32, WeightFormat(), PACKED),
    "fp8 cache": (
        CAPPED, torch.float32, WeightFormat(), CacheFormat(format="fp8", quant_group=8, columns=8, residual_length=5),
    ),
    "int4 cache": (
        WIDE, torch.bfloat16, WeightFormat.parse("int8"), CacheFormat(format="int4", quant_group=8, residual_length=1),
    ),
}  # fmt: skip
WHOLE = ("wide float32",)  # kinds that run with the buckets of a real runner
SIZE = 8  # tokens a page
ROW_BUCKETS = (1, 3, 8)  # buckets of rows, for the sake of fewer compilations: alone, in one block, in several


def model_of(kind: str) -> Transformer:
    spec, dtype, format, _ = KINDS[kind]
    model = Transformer.from_state(spec, weights_of(spec, dtype, 0), format=format)
    model.use_expert_panels()
    return model


MODELS = {kind: model_of(kind) for kind in KINDS}


def together(kind: str, *turns: list[Request], **more) -> dict[str, Rows]:
    given: dict[str, Any] = {"page_size": SIZE, "pages": 120, "cache": KINDS[kind][3], "max_num_seqs": 9, **more}
    return served(MODELS[kind], *turns, buckets=DECODE_BUCKETS if kind in WHOLE else ROW_BUCKETS, **given)


def subject(kind: str, shared: int = 0) -> Request:
    return asked("subject", 23 - shared, 6, KINDS[kind][0].vocab_size, shared)


ALONE = {}


def alone(kind: str) -> Rows:
    """The subject's rows, from its first token on, in one chunk and then token by token."""
    if kind not in ALONE:
        ALONE[kind] = together(kind, [subject(kind)], max_num_batched_tokens=64)["subject"]
    return ALONE[kind]


def other_requests(kind: str, lengths: list[int]) -> list[Request]:
    vocab = KINDS[kind][0].vocab_size
    return [asked(f"other {i}", length, 1 + (5 * i + length) % 9, vocab) for i, length in enumerate(lengths)]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=tries(5), deadline=None)
@given(
    lengths=st.lists(st.integers(1, 38), max_size=8), place=st.integers(0, 8), chunk=st.integers(1, 150),
    seqs=st.integers(1, 9), order=st.randoms(use_true_random=False), scarce=st.booleans(),
)  # fmt: skip
def test_batches_chunks_and_pages(
    kind: str, lengths: list[int], place: int, chunk: int, seqs: int, order: random.Random, scarce: bool
) -> None:
    """Others' lengths and order, the chunk, the order of pages, and pages so few that sequences are preempted."""
    pages = 9 if scarce else 120
    requests = other_requests(kind, lengths)
    requests.insert(place, subject(kind))
    tables = 2 * len(KINDS[kind][0].layers)
    orders = tuple(order.sample(range(1, pages + 1), pages) for _ in range(tables))
    limits = {"max_num_batched_tokens": chunk, "max_num_seqs": min(seqs, chunk)}
    found = together(kind, requests, pages=pages, page_orders=orders[: tables_of(kind)], **limits)
    assert differing(found["subject"], alone(kind)) == []


def tables_of(kind: str) -> int:
    from workbench.kv_cache.pages import build_cache_groups

    return len(build_cache_groups(shape.cache_groups for shape in MODELS[kind].cache_shapes(KINDS[kind][3])))


@pytest.mark.parametrize("kind", KINDS)
def test_a_warm_prefix_is_a_cold_one(kind: str) -> None:
    """Pages that others computed, in other chunks, in other batches."""
    shared = 17
    cold = together(kind, [subject(kind, shared)])["subject"]
    others = [asked(f"before {i}", 3 + i, 4, KINDS[kind][0].vocab_size, shared) for i in range(3)]
    turns = others, [subject(kind, shared), *other_requests(kind, [5, 30])]
    warm = together(kind, *turns, prefix="radix", max_num_batched_tokens=21)
    assert min(warm["subject"]) > 0, "nothing was found again"
    assert differing(warm["subject"], cold) == []


@pytest.mark.parametrize("kind", ["wide float32", "int8 weights"])
def test_after_a_preemption(kind: str) -> None:
    """Pages run out while two decode: the later is preempted, and computes all of its text again, as one prefill."""
    longer, mine = asked("longer", 17, 24, KINDS[kind][0].vocab_size), subject(kind)
    runner = runner_of(MODELS[kind], page_size=SIZE, pages=6, cache=KINDS[kind][3], max_num_batched_tokens=50)
    runner.executor = TokenParallelExecutor(MODELS[kind], runner.store, ROW_BUCKETS)
    scribe = Scribe(runner)
    events = list(runner.stream([longer, mine]))
    assert "subject" in [event.request_id for event in events if isinstance(event, Preempted)]
    assert differing(scribe.rows["subject"], alone(kind)) == []


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_do_not_count(threads: int) -> None:
    kind, before = "wide bfloat16", torch.get_num_threads()
    expected = alone(kind)
    torch.set_num_threads(threads)
    try:
        assert differing(together(kind, [subject(kind), *other_requests(kind, [9, 30])])["subject"], expected) == []
    finally:
        torch.set_num_threads(before)


def test_a_broken_row_spoils_no_other() -> None:
    """Tokens whose embedding is not a number, or huge."""
    spec, kind = KINDS["wide float32"][0], "wide float32"
    state = weights_of(spec, torch.float32, 0)
    state["embedding.weight"] = state["embedding.weight"].clone()
    unused = [token for token in range(spec.vocab_size) if token not in subject(kind).prompt_ids]
    for token, value in zip(unused, (torch.nan, torch.inf, 1e30), strict=False):
        state["embedding.weight"][token] = value
    others = [replace(asked(f"bad {i}", 1, 3, spec.vocab_size), prompt_ids=(unused[i],) * 5) for i in range(3)]
    given: dict[str, Any] = {"page_size": SIZE, "pages": 120, "buckets": ROW_BUCKETS, "max_num_batched_tokens": 20}
    found = served(Transformer.from_state(spec, state), [*others, subject(kind)], **given)
    assert found["bad 0"][4].isnan().all()
    assert differing(found["subject"], alone(kind)) == []


@pytest.mark.parametrize("kind", ["odd float32", "wide float32"])
def test_the_mode_off_is_not_so(kind: str) -> None:
    """The negative control: without the mode some batch or chunk changes some bit."""
    model = Transformer.from_state(KINDS[kind][0], weights_of(*KINDS[kind][:2], 0))
    given: dict[str, Any] = {"page_size": SIZE, "pages": 120, "max_num_seqs": 9}
    expected = served(model, [subject(kind)], **given)["subject"]
    for lengths, chunk in (([30] * 7, 64), ([5, 30], 7), ([], 3)):
        rows = served(model, [*other_requests(kind, lengths), subject(kind)], max_num_batched_tokens=chunk, **given)
        if differing(rows["subject"], expected):
            return
    pytest.fail("the mode off gives the same bits everywhere: what is tested above proves nothing")


def test_a_split_by_rows_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: contexts in two parts where rows are few, in one where they are many. Only float32 shows it:
    bfloat16 rounds it away, nearly always."""
    right = TokenParallelExecutor.compile_shape
    monkeypatch.setattr(
        TokenParallelExecutor,
        "compile_shape",
        lambda self, part, rows: replace(right(self, part, rows), chunks=2 if rows < 4 else 1),
    )
    kind = "wide float32"
    mine = together(kind, [subject(kind)])["subject"]
    others = together(kind, [subject(kind), *other_requests(kind, [30] * 6)])["subject"]
    assert differing(others, mine)


@pytest.mark.parametrize(("settings", "message"), [
    ({"backend": "eager"}, "backend 'eager' cannot keep it: linear: torch's matrix product chooses its kernel"),
    ({"backend": "inductor"}, "backend 'inductor' cannot keep it"),
    ({"cache": {"format": "int8", "rotate": True}}, "does not rotate heads"),
    ({"cache": {"dtype": "float32"}}, "bfloat16 weights and a float32 cache: it reads both in one type"),
    ({"dtype": "float16"}, "computed in float32 or bfloat16"),
    ({"evict": {"kind": "heavy_hitters", "budget": 128}}, "what stays of a prompt depends on its chunks"),
    ({"attention": {"layers": {1: {"kv_shared_with": 0}}}}, "layer 1"),
])  # fmt: skip
def test_what_cannot_keep_it_is_refused(settings: dict, message: str) -> None:
    with pytest.raises(WorkbenchError) as refused:
        load("shape:tiny", batch_invariant=True, **settings)
    assert message in str(refused.value) and str(refused.value).startswith("batch_invariant: ")
    assert "\n" not in str(refused.value)


def test_a_mixture_of_experts_of_odd_width_is_refused() -> None:
    mixed = LayerSpec(
        attention=layer().attention, intermediate_size=12, experts=MoESpec(num_experts=3, num_experts_per_tok=2)
    )
    model = Transformer.from_state(spec_of(mixed), weights_of(spec_of(mixed), torch.float32, 0))
    with pytest.raises(WorkbenchError, match="layer 0 has experts"):
        served(model, [], batch_invariant=True)


def test_auto_takes_the_backend_that_keeps_it() -> None:
    runner = load("shape:tiny", batch_invariant=True)
    assert str(runner.backends) == "mlir" and runner.backends.reason.startswith("batch_invariant: of all backends")
    assert isinstance(runner.executor, TokenParallelExecutor)
