"""The keys that the last position of each context sees, which backend inductor asks for once in a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from compiled_kernels import Backend
from compiled_kernels.masks import AndMask, Causal, HeadMask, Mask, SlidingWindow
from compiled_kernels.paged_attention import inductor
from compiled_kernels.paged_attention.api import PagedKV
from compiled_kernels.torch_compile import compile_once
from tests.helpers.kernels import needs
from tests.thorough import tries


@dataclass(frozen=True)
class Every:
    """Every n-th key."""

    step: int

    def __call__(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return key % self.step == query % self.step


MASKS: tuple[Mask, ...] = (
    AndMask(Causal(), Every(3)),
    AndMask(Causal(), Every(7)),
    AndMask(Causal(), HeadMask(lambda query, key, head: key % 2 == head % 2, heads=4)),
    SlidingWindow(5, num_sink_tokens=1),
)
QUESTIONS = st.tuples(st.integers(0, len(MASKS) - 1), st.tuples(*[st.integers(1, 20)] * 2), st.integers(0, 3))
CALLS = st.lists(QUESTIONS, min_size=1, max_size=2).flatmap(  # asked again and again, of pages of either size
    lambda asked: st.lists(st.tuples(st.sampled_from(asked), st.booleans()), min_size=2, max_size=8)
)


def pages_of(seed: int, size: int) -> PagedKV:
    """Return two sequences of up to 20 positions, in pages of `size` that are mixed up by `seed`: the same tables for
    any size."""
    held = 10
    order = torch.randperm(2 * held, generator=torch.Generator().manual_seed(seed)).int() + 1
    pool = torch.zeros(2 * held + 1, 1, size, 2)
    return PagedKV(pool, pool, order.view(2, held))


@pytest.fixture(scope="module", autouse=True)
def uncompiled() -> Iterator[None]:
    """Leave the masks uncompiled: what is remembered does not depend on it, and the last test of this file holds that
    they are right compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inductor, "compile_once", lambda function, dynamic: function)
        yield


@settings(max_examples=tries(60))
@given(calls=CALLS)
def test_answer_is_that_of_its_own_question(calls: list[tuple[tuple[int, tuple[int, int], int], bool]]) -> None:
    """Whatever was asked before; and every key that is shown is listed, with the page that holds it."""
    for (which, ends, seed), small in calls:
        size, mask, lengths = (2 if small else 4), MASKS[which], torch.tensor(ends, dtype=torch.int32)
        kv = pages_of(seed, size)
        pages, places, keys = inductor.shown_keys(kv, lengths, mask, remember=True)
        for seq, length in enumerate(ends):
            positions = torch.arange(length)
            seen = positions[mask(torch.tensor([length - 1]), positions).expand(length)].tolist()
            held = {int(place): int(page) for place, page in zip(places[seq], pages[seq], strict=True) if page}
            assert sorted(held) == sorted({position // size for position in seen})
            assert all(int(kv.page_table[seq, place]) == page for place, page in held.items())
            if isinstance(mask, SlidingWindow) or (isinstance(mask, AndMask) and isinstance(mask.second, HeadMask)):
                assert keys is None
                continue
            assert keys is not None
            (block,) = keys
            found = (places[seq][:, None] * size + torch.arange(size))[block[seq]]
            assert sorted(found.tolist()) == seen


def test_layers_of_one_step_ask_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kv, lengths = pages_of(0, 4), torch.tensor([9, 20], dtype=torch.int32)
    first = inductor.shown_keys(kv, lengths, MASKS[0], remember=True)
    monkeypatch.setattr(inductor, "compile_once", None)
    again = inductor.shown_keys(kv._replace(keys=kv.keys + 1), lengths.clone(), MASKS[0], remember=True)
    assert again is first
    with pytest.raises(TypeError):
        inductor.shown_keys(kv, lengths - 1, MASKS[0], remember=True)


@needs(Backend.INDUCTOR)
def test_compiled_mask_that_may_change_is_asked_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    class Changing:
        step = 3

        def __call__(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return (key <= query) & (key % self.step == 0)

    monkeypatch.setattr(inductor, "compile_once", compile_once)
    mask, kv, lengths = Changing(), pages_of(0, 4), torch.tensor([20, 20], dtype=torch.int32)
    for step, count in ((3, 7), (1, 20)):
        mask.step = step
        keys = inductor.shown_keys(kv, lengths, mask).keys
        assert keys is not None and int(keys[0][0].sum()) == count
