"""A short soak of a tiny model, and that a soak sees what it is for."""

from __future__ import annotations

import itertools

import pytest

from tests.engine.tiny import CONTEXT, VOCAB, layer, model_of, runner_of, spec_of
from tests.long import flat_memory
from tests.long.soak import Soak, summarize
from tests.long.soak_requests import random_requests
from workbench.engine.outputs import OutputProcessor
from workbench.kv_cache.manager import KVCacheManager
from workbench.trace.events import Finished

MODEL = model_of(spec_of(layer(), layer(sliding_window=9), eos_token_ids=(3,)))


def soak(requests: int = 60, **settings) -> dict:
    given = {"pages": 12, "prefix": "radix", "policy": "priority", "max_num_seqs": 8, **settings}
    return Soak(runner_of(MODEL, **given), 1).run(random_requests(requests, VOCAB, CONTEXT, 1, text=False), requests)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("policy", ["priority", "fair"])
def test_a_short_soak(policy: str) -> None:
    record = soak(policy=policy)
    assert record["faults"] == [] and record["requests"] == 60, summarize(record)
    assert {"stop", "length", "cancelled", "refused", "not_chosen"} <= record["reasons"].keys()
    assert sum(record["reasons"].values()) == record["sequences"] > 60
    assert record["num_preemptions"] and record["cached_tokens"] and record["output_tokens"]


def test_pages_that_stay_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: every tenth sequence that ends keeps what it holds."""
    free, count = KVCacheManager.free, itertools.count(1)

    def kept(self, sequence):
        for pool, pages in zip(self.pools, sequence.pages, strict=False):
            if next(count) % 10 == 0 and any(pages):
                pool.acquire([next(page for page in pages if page)])
        return free(self, sequence)

    monkeypatch.setattr(KVCacheManager, "free", kept)
    assert any("neither free nor in the prefix index" in fault for fault in soak(40, pages=80)["faults"])


def test_a_second_end_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    emit = OutputProcessor.emit

    def twice(self, event):
        emit(self, event)
        if isinstance(event, Finished) and event.request_id == "r7":
            self._emit(event)

    monkeypatch.setattr(OutputProcessor, "emit", twice)
    assert any(fault.startswith("r7 has a finished after its end") for fault in soak(20)["faults"])


@pytest.mark.parametrize(("kilobytes", "flat"), [(0, True), (2, False)])
def test_a_kilobyte_or_two_a_request_are_no_flat_memory(kilobytes: int, flat: bool) -> None:
    """After the warm-up; the noise of an allocator is half a megabyte."""
    samples = [(ended, 300 + min(ended, 900) / 10 + kilobytes * ended / 1024 + 0.5 * (ended % 3 == 0))
               for ended in range(80, 5001, 80)]  # fmt: skip
    assert flat_memory.judge(samples, 5000).flat is flat
    assert flat_memory.judge(samples[:9], 5000).flat is None
