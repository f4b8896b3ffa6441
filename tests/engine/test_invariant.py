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
from tests.engine.invariant import KINDS, ROW_BUCKETS, SIZE, alone, model_of, other_requests, subject, together
from tests.engine.scribe import Scribe, asked, differing, served
from tests.engine.tiny import runner_of, weights_of
from tests.helpers.events import of
from tests.thorough import THOROUGH, tries
from workbench.engine.load import load
from workbench.executors.programs.rows import RowsProgram
from workbench.executors.step_runner import StepRunner
from workbench.kv_cache.pages import build_cache_groups
from workbench.model.transformer import Transformer
from workbench.trace.events import Preempted

problem = backend_problems()[Backend.MLIR]
pytestmark = pytest.mark.skipif(problem is not None, reason=f"backend mlir: {problem}")


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=tries(5), derandomize=not THOROUGH)
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
    tables = build_cache_groups(shape.cache_groups for shape in model_of(kind).cache_shapes(KINDS[kind][3]))
    orders = tuple(order.sample(range(1, pages + 1), pages) for _ in tables)
    limits = {"max_num_batched_tokens": chunk, "max_num_seqs": min(seqs, chunk)}
    found = together(kind, requests, pages=pages, page_orders=orders, **limits)
    assert differing(found["subject"], alone(kind)) == []


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
    runner = runner_of(model_of(kind), page_size=SIZE, pages=6, cache=KINDS[kind][3], max_num_batched_tokens=50)
    runner.core.executor = StepRunner(RowsProgram(model_of(kind), runner.store, ROW_BUCKETS))
    scribe = Scribe(runner)
    events = list(runner.stream([longer, mine]))
    assert "subject" in [event.request_id for event in of(Preempted, events)]
    assert differing(scribe.rows["subject"], alone(kind)) == []


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_do_not_count(threads: int, two_threads: None) -> None:
    kind = "wide bfloat16"
    expected = alone(kind)
    torch.set_num_threads(threads)
    assert differing(together(kind, [subject(kind), *other_requests(kind, [9, 30])])["subject"], expected) == []


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


def test_auto_takes_the_backend_that_keeps_it() -> None:
    runner = load("shape:tiny", batch_invariant=True)
    backends = runner.core.backends
    assert str(backends) == "mlir" and backends.reason.startswith("batch_invariant: of all backends")
    assert list(runner.core.executor.programs) == ["rows"]
