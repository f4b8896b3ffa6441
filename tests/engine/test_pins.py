"""Pins of requests: what the engine says of them, and that they change no answer and stop no request."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.tiny import VOCAB, finals, model_of, runner_of, spec_of, specs
from tests.helpers.events import of
from tests.thorough import tries
from workbench.engine.runner import generate
from workbench.request import PrefixPin, Request, SamplingParameters, random_token_ids
from workbench.trace.events import Finished, PinnedPrefix, Prefilled

PAGE = 4


def pinning(name: str, ids: tuple[int, ...], *pins: tuple[int, float], most: int = 3, **values) -> Request:
    sampling = SamplingParameters(max_tokens=most, ignore_eos=True, temperature=0, **values)
    return Request(name, ids, sampling, pins=tuple(PrefixPin(*pin) for pin in pins))


def test_what_is_kept_comes_before_the_first_token() -> None:
    runner = runner_of(model_of(spec_of()), prefix="radix", max_num_batched_tokens=6)
    ids = random_token_ids(random.Random(1), VOCAB, 22)
    events = list(runner.stream([pinning("a", ids, (3, 9.0), (10, 60.0), (22, 5.0), n=2)]))
    pinned = [each for event in of(Prefilled, events) for each in event.pinned]
    assert pinned == [PinnedPrefix(3, 9.0, 0), PinnedPrefix(10, 60.0, 8), PinnedPrefix(22, 5.0, 20)]
    ends = of(Finished, events)
    assert [end.pinned for end in sorted(ends, key=lambda end: end.sample)] == [tuple(pinned), ()]
    (again,) = of(Finished, runner.stream([pinning("b", ids, (22, 5.0))]))
    assert again.cached_tokens == 20 and again.pinned == (PinnedPrefix(22, 5.0, 20),)


def test_no_cache_keeps_nothing() -> None:
    runner = runner_of(model_of(spec_of()), prefix="off")
    (end,) = generate(runner, [pinning("a", (1, 2, 3, 4, 5), (5, 1.0))]).values()
    assert end.reason == "length" and end.pinned == ()


@settings(max_examples=tries(16))
@given(
    spec=specs,
    seed=st.integers(0, 10**6),
    share=st.sampled_from([0.0, 0.5, 1.0]),
    offload=st.sampled_from(["none", "memory"]),
    ttl=st.sampled_from([None, 3.0]),
)
def test_pins_change_no_answer(spec, seed: int, share: float, offload: str, ttl: float | None) -> None:
    """A replay agrees: test_replay.py."""
    draw, model = random.Random(seed), model_of(spec, seed)
    base = random_token_ids(draw, VOCAB, 24)
    requests = []
    for number in range(8):
        ids = base[: draw.randrange(24)] + random_token_ids(draw, VOCAB, draw.randrange(1, 10))
        pins = sorted((draw.randrange(len(ids) + 1), draw.choice([1.0, 4.0, 100.0])) for _ in range(draw.randrange(3)))
        requests.append(pinning(str(number), ids, *pins, most=draw.randrange(1, 10)))
    ticks = iter(range(10**6))
    runner = runner_of(
        model, pages=13, max_num_batched_tokens=9, prefix={"kind": "radix", "pinned_share": share, "ttl": ttl},
        offload=offload, clock=lambda: next(ticks) / 10,
    )  # fmt: skip
    found = finals(runner, requests)
    assert all(len(found[each.request_id]) == each.sampling.max_tokens for each in requests)
    plain = [replace(each, pins=()) for each in requests]
    assert found == finals(runner_of(model, pages=13, max_num_batched_tokens=9), plain)
    assert runner.scheduler.pages_in_use == 0
