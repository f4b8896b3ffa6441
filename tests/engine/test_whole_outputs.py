"""A request with `final_only` ends as any other does, and none of its tokens is emitted before."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.events import of
from tests.offline.batches import runner
from tests.prompt.samples import byte_level
from tests.thorough import tries
from workbench.request import Request, SamplingParameters
from workbench.trace.events import Decoded, Event, Finished

SAMPLINGS = st.builds(
    SamplingParameters,
    temperature=st.sampled_from([0.0, 1.0]), max_tokens=st.integers(1, 14), n=st.integers(1, 2),
    stop=st.sampled_from([(), ("e",), ("a", "b")]), stop_token_ids=st.sampled_from([(), (40, 41, 42)]),
    logprobs=st.sampled_from([None, None, 1]), seed=st.integers(0, 5),
)  # fmt: skip


def ended(event: Event) -> tuple | None:
    if not isinstance(event, Finished):
        return None
    return event.request_id, event.sample, event.reason, event.token_ids, event.output_text


@settings(max_examples=tries(40))
@given(SAMPLINGS, st.text("abc x", min_size=1, max_size=6))
def test_it_ends_as_any_other(sampling: SamplingParameters, text: str) -> None:
    plain = Request("r", tuple(byte_level().encode(text)), sampling)
    streamed = list(runner().stream([plain]))
    mine = list(runner().stream([replace(plain, final_only=True)]))
    assert {ended(event) for event in mine} == {ended(event) for event in streamed}
    tokens = of(Decoded, mine)
    assert bool(tokens) == (sampling.logprobs is not None)
    for end in of(Finished, mine):
        shown = "".join(event.text for event in mine if event.sample == end.sample)
        assert shown == end.output_text


@pytest.mark.parametrize("asked", [{"n": 1, "best_of": 3}, {"n": 2, "beams": 3}])
def test_the_best_are_chosen_all_the_same(asked: dict) -> None:
    sampling = SamplingParameters(max_tokens=5, **asked)
    plain = Request("r", tuple(byte_level().encode("abc")), sampling)
    streamed, mine = (list(runner().stream([replace(plain, final_only=whole)])) for whole in (False, True))
    assert {ended(event) for event in mine} == {ended(event) for event in streamed}
