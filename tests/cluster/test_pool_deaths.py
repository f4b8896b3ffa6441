"""Pools whose engines die at any message: each token is emitted once, texts are those of one engine, and every page is
free at home in the end."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cluster.ends import end_of, until_home
from tests.cluster.handovers import FORMATS, WINDOWS, drawn_requests
from tests.cluster.pool_threads import StartThreads
from tests.engine.recurrent_models import HYBRID
from tests.engine.tiny import finals, layer, model_of, request, runner_of, spec_of
from tests.helpers.events import of
from tests.patience import until
from tests.thorough import tries
from workbench.cluster.apart.lending import shared_pools
from workbench.cluster.apart.pool_messages import Transfer
from workbench.cluster.pools import PrefillDecodePools
from workbench.engine.config import EngineConfig
from workbench.engine.loaded_model import LoadedModel
from workbench.engine.runner import Runner, generate
from workbench.request import Request
from workbench.trace.events import Decoded, Finished, Moved

SPECS = (WINDOWS, spec_of(layer(2, 1, 8), layer(2, 1, 8)), HYBRID)
DEATHS = st.lists(st.tuples(st.integers(2, 16), st.booleans()), max_size=1)  # none before it is ready


def run(pools: PrefillDecodePools, asked: list[Request]) -> dict[str, tuple[int, ...]]:
    found, emitted = {}, Counter((each.request_id, *token) for each in asked for token in enumerate(each.generated_ids))
    for event in pools.stream(asked):
        if isinstance(event, Decoded):
            emitted[event.request_id, event.index, event.token_id] += 1
        elif isinstance(event, Moved):
            assert event.generated_tokens == sum(name == event.request_id for name, *_ in emitted)
            assert event.reason.startswith("its process ended: ") and event.source
        elif isinstance(event, Finished):
            assert not event.error and event.reason == "length"
            found[event.request_id] = event.token_ids
    assert emitted == Counter({(name, at, token): 1 for name, ids in found.items() for at, token in enumerate(ids)})
    return found


def check_no_page_leaks(pools: PrefillDecodePools, started: StartThreads) -> None:
    started.spare()
    until(
        lambda: all(
            slot.state == "gone" or (slot.state == "ready" and not started.living[slot.name].mortal.is_dying)
            for slot in pools.slots
        )
    )
    until_home(pools)
    until(lambda: pools.pages.used == 0)  # the ledger knows that a loan has ended before the page's home does
    pools.close()
    for slot in pools.slots:
        if slot.state != "gone":
            engine = started.living[slot.name].engine
            assert engine is not None
            for pool in engine.runner.scheduler.pools:
                assert pool.num_available == pool.num_pages
            for pool in shared_pools(engine.runner.kv_cache.manager):
                assert not (pool.num_lent or pool.num_borrowed or pool.idle)


@settings(max_examples=tries(60))
@given(st.data())
def test_texts_and_pages_survive_any_deaths(data: st.DataObject) -> None:
    draw: Any = data.draw
    spec = draw(st.sampled_from(SPECS))
    cache = dict(draw(st.sampled_from(FORMATS[:1] if spec is HYBRID else FORMATS)))
    cache["prefix"] = draw(st.sampled_from(["off", "radix"]))
    chosen = {"cache": cache, "page_size": 8, "max_num_batched_tokens": draw(st.sampled_from([5, 16]))}
    chosen |= {"pages": draw(st.sampled_from([9, 20])), "max_num_seqs": 4, "backend": "eager"}
    loaded = LoadedModel(model_of(spec), None, None)
    asked = drawn_requests(data, f"{draw(st.integers(0, 99))}-")
    alone = finals(runner_of(loaded.transformer, **chosen), asked)
    counts = draw(st.integers(1, 2)), draw(st.integers(0, 2))
    first = "prefill" if counts[1] else "engine"
    names = [f"{first if number < counts[0] else 'decode'} {number}" for number in range(sum(counts))]
    started = StartThreads(lambda config: loaded, {name: draw(DEATHS) for name in names})
    config = EngineConfig.build(**chosen)
    transfer: Transfer = draw(st.sampled_from(get_args(Transfer)))
    with PrefillDecodePools(config, *counts, transfer=transfer, processes=started) as pools:
        assert run(pools, asked) == alone
        kept = {name: ids[: draw(st.integers(0, len(ids) - 1))] for name, ids in alone.items()}
        again = [
            replace(each, request_id=f"{each.request_id} again", generated_ids=kept[each.request_id]) for each in asked
        ]
        assert run(pools, again) == {f"{name} again": ids for name, ids in alone.items()}
        check_no_page_leaks(pools, started)


def test_a_request_whose_engines_always_die_ends_with_an_error() -> None:
    loaded = LoadedModel(model_of(spec_of()), None, None)
    deadly = [(3, False)] * 9
    started = StartThreads(lambda config: loaded, {"prefill 0": list(deadly), "decode 1": list(deadly)})
    config = EngineConfig.build(page_size=4, pages=20, backend="eager")
    with PrefillDecodePools(config, processes=started) as pools:
        (end,) = of(Finished, pools.stream([request("r", 9, 40)]))
        assert end.error.startswith("4 replicas ended while they served it, the last one: its process ended")


NEVER = (1, False)  # it dies before it serves
CHOSEN = {"page_size": 4, "pages": 20, "backend": "eager"}


def test_a_place_is_empty_for_a_pause_after_three_starts_that_never_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that serves is none of them."""
    monkeypatch.setattr("workbench.cluster.launcher.FIRST_PAUSE", float("inf"))
    monkeypatch.setattr("workbench.cluster.launcher.MAX_PAUSE", float("inf"))
    loaded = LoadedModel(model_of(spec_of()), None, None)
    deaths, asked = [(2, False), NEVER, NEVER, (2, False), NEVER, NEVER, NEVER], [request("r", 9, 12)]
    started = StartThreads(lambda config: loaded, {"decode 1": deaths})
    with PrefillDecodePools(EngineConfig.build(**CHOSEN), processes=started) as pools:
        assert run(pools, asked) == finals(runner_of(loaded.transformer, page_size=4, pages=20), asked)
        slot = pools.slots[1]
        until(lambda: not deaths and slot.state in ("gone", "ready"))
        assert slot.state == "gone"
        pools.call(lambda: setattr(slot, "starts_at", 0.0))
        until(lambda: slot.state == "ready")
        assert slot.failed_starts == 0 and run(pools, asked) and pools.counts["handed over"]


@pytest.mark.parametrize(("count", "pause", "given_up"), [(1, 1e6, 1), (2, 1e6, 0), (2, float("inf"), 1)])
def test_no_successor_follows_three_failed_starts_where_nothing_else_will_serve(
    monkeypatch: pytest.MonkeyPatch, count: int, pause: float, given_up: int
) -> None:
    """Another engine will, after any pause but the longest, and requests wait for it."""
    monkeypatch.setattr("workbench.cluster.launcher.FIRST_PAUSE", pause)
    monkeypatch.setattr("workbench.cluster.launcher.MAX_PAUSE", float("inf"))
    loaded = LoadedModel(model_of(spec_of()), None, None)
    deaths = [(2, False), *(NEVER,) * (3 + given_up)]
    started = StartThreads(lambda config: loaded, {f"engine {number}": [*deaths] for number in range(count)})
    with PrefillDecodePools(EngineConfig.build(**CHOSEN), count, 0, processes=started) as pools:
        handle = pools.submit(request("r", 9, 12))
        until(lambda: all(slot.state == "gone" for slot in pools.slots))
        left = [slot for slot in pools.slots if slot.starts_at is not None]
        assert len(left) == count - given_up and started.num_started == 4 * count
        pools.call(lambda: [setattr(slot, "starts_at", 0.0) for slot in left])
        until(lambda: handle.done)
    assert end_of(handle.events).error.startswith("no engine is left") == given_up


def test_no_successor_starts_when_pools_close() -> None:
    loaded = LoadedModel(model_of(spec_of()), None, None)
    started, is_busy, goes_on = StartThreads(lambda config: loaded), threading.Event(), threading.Event()
    pools = PrefillDecodePools(EngineConfig.build(**CHOSEN), processes=started)
    pools._put(lambda: (is_busy.set(), goes_on.wait()))
    is_busy.wait()
    pools._put(lambda: pools._died(pools.slots[1], "planted"))
    pools._thread.close(pools._stop)
    goes_on.set()
    pools.close()
    pools._thread.join()
    for each in pools._slots._starts:
        each.join()
    assert started.num_started == 2


@pytest.mark.parametrize("transfer", ["shared", "gloo"])
def test_usage_adds_up_over_the_engines_of_a_request(transfer: Transfer) -> None:
    loaded = LoadedModel(model_of(spec_of()), None, None)
    config = EngineConfig.build(page_size=4, pages=20, backend="eager", prefix="radix")
    asked = request("r", 17, 9)
    with PrefillDecodePools(config, transfer=transfer, processes=StartThreads(lambda config: loaded)) as pools:
        again = replace(asked, request_id="again")
        first, second = (end_of(pools.stream([each])) for each in (asked, again))
    alone = generate(Runner(config, loaded), [asked])["r"]
    assert (first.prompt_tokens, first.cached_tokens, first.computed_tokens) == (17, 0, 17 + 8)
    assert (second.prompt_tokens, second.cached_tokens, second.computed_tokens) == (17, 16, 1 + 8)
    assert (first.written_tokens, second.written_tokens) == (alone.written_tokens, 0)
    assert first.token_ids == second.token_ids and pools.counts["handed over"] == 2
