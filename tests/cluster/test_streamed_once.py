"""The account of a request: planned and unplanned moves in any order, and the client has each thing once, in order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.events import of
from tests.thorough import tries
from workbench.cluster.fleet_request import FleetRequest
from workbench.request import FinishReason, Request, SamplingParameters
from workbench.trace.events import Decoded, Event, Finished, Prefilled, Submitted


class Engine:
    """One sample in an engine, which samples token 100 + place. `has_pages`: those of the engine that had it before, if
    it was handed over (None: it was not)."""

    def __init__(self, request: Request, hits: int, has_pages: bool | None = None):
        self.request, self.token_ids = request, [*request.generated_ids]
        known = len(request.prompt_ids) + len(self.token_ids)
        self.places, self.has_pages = range(min(hits, known - 1), known), bool(has_pages)
        self.cached = self.places.start * (has_pages is None)  # pages that came with a move are no hit
        self.computed, self.events = 0, self.serve()

    def serve(self) -> Iterator[Event]:
        yield Submitted(0.0, "r")
        for place in () if self.has_pages else self.places:
            self.computed += 1
            brought: Any = (place,) if place > self.places.start else tuple(range(place + 1))
            yield Prefilled(0.0, "r", tokens=1, computed=place + 1, logprobs=brought, pinned=brought)
        while (index := len(self.token_ids)) < (self.request.sampling.max_tokens or 0):
            self.computed += self.has_pages or index > len(self.request.generated_ids)
            self.token_ids.append(100 + index)
            yield Decoded(0.0, "r", index=index, token_id=100 + index)
        yield self.end(FinishReason.LENGTH)

    def end(self, reason: FinishReason) -> Finished:
        ids, hits = tuple(self.token_ids), self.places.start
        return Finished(0.0, "r", reason=str(reason), token_ids=ids, cached_tokens=hits, computed_tokens=self.computed)


MOVES = ("step", "step", "step", "hand over", "lose")


@settings(max_examples=tries(300))
@given(
    moves=st.lists(st.tuples(st.sampled_from(MOVES), st.integers(0, 5)), max_size=20),
    prompt=st.integers(1, 4), length=st.integers(1, 4), max_losses=st.integers(0, 3),
    is_silent=st.booleans(),
)  # fmt: skip
def test_a_client_has_each_thing_once_whatever_moves(
    moves: list[tuple[str, int]], prompt: int, length: int, max_losses: int, is_silent: bool
) -> None:
    """Planned moves, with their pages or without, and unplanned ones. `is_silent`: without events of its tokens."""
    text = [100 + place for place in range(length)]
    asked = Request("r", tuple(range(prompt)), SamplingParameters(max_tokens=length))
    account, stream, engines, losses = FleetRequest(asked, 0.0), list[Event](), list[Engine](), 0
    (sample,), is_placed = account.samples, False
    for move, size in [*moves, *[("step", 5)] * 4]:
        if not is_placed:
            (request,), is_placed = account.attempt().requests, True
            engines.append(Engine(request, size))
        engine = engines[-1]
        events = list(islice(engine.events, size + 1)) if move == "step" else []
        if move == "hand over" and len(engine.token_ids) > len(engine.request.generated_ids):
            events = [engine.end(FinishReason.MOVED)]
            request = replace(engine.request, generated_ids=tuple(engine.token_ids))
            engines.append(Engine(request, size // 2, size % 2 > 0))
        heard = (each for each in events if not (is_silent and isinstance(each, Decoded)))
        stream += filter(None, map(sample.take, heard))
        if move == "lose" and not sample.is_finished:
            account.lose("killed", is_planned=size > 2)
            losses, is_placed = losses + (size <= 2), False
            engine.cached *= engine.computed > 0  # no event has named it
            why = f"{losses} replicas ended while they served it, the last one: killed" * (losses > max_losses)
            assert account.why_given_up(max_losses) == why
            stream += [account.end(sample, 0.0, FinishReason.ERROR, why)] if why else []
        if sample.is_finished:
            break
    assert [*filter(None, map(sample.take, stream))] == [], "nothing comes after an end"
    tokens, end = [each.token_id for each in of(Decoded, stream)], stream[-1]
    assert isinstance(end, Finished)
    assert [each.kind for each in stream].count("submitted") == isinstance(stream[0], Submitted) == (len(stream) > 1)
    assert tokens == text[: len(tokens)] and [*end.token_ids] == (text if not end.error else sample.token_ids)
    brought = [one for each in of(Prefilled, stream) for one in zip(each.logprobs, each.pinned, strict=True)]
    assert brought == [(place, place) for place in range(len(brought))]
    if not is_silent:  # what is lost of such a request is unknown
        counts = sum(each.cached for each in engines), sum(each.computed for each in engines)
        assert (tokens, end.cached_tokens, end.computed_tokens) == ([*end.token_ids], *counts)
