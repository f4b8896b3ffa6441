"""Prompt lookup, how many tokens are drafted, and the settings that say so."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.engine.guesses import Guesses, drafts, plain, tokens
from tests.engine.tiny import model_of, request, runner_of, spec_of
from tests.helpers.events import of
from workbench.engine.runner import generate
from workbench.request import FinishReason, Request, Sequence
from workbench.speculative.proposers import PromptLookupProposer
from workbench.trace.events import Verified


@given(st.lists(st.integers(0, 3), min_size=2, max_size=40), st.integers(1, 3), st.integers(0, 2), st.integers(1, 6))
def test_lookup_copies_what_followed_the_latest_longest_match(ids, least, more, count) -> None:
    proposer = PromptLookupProposer(least, least + more)
    sequence = Sequence.from_request(Request("a", tuple(ids[:1])), 0)
    for end in range(2, len(ids) + 1):  # as it grows, whatever is entered on the way
        sequence.token_ids = ids[:end]
        found = proposer.propose([sequence], [count])[0].token_ids
    for length in range(least + more, least - 1, -1):
        places = [p for p in range(length, len(ids)) if ids[p - length : p] == ids[-length:] and length <= len(ids)]
        if places:
            copied = list(ids)
            for _ in range(count):
                copied.append(copied[places[-1] + len(copied) - len(ids)])
            assert list(found) == copied[len(ids) :]
            return
    assert found == ()


def test_adaptive_lengths_grow_by_two_and_shrink_by_one() -> None:
    ours = drafts(Guesses({"a": tuple(range(30))}, right=1.0), 5, length="adaptive")
    own = Sequence.from_request(request("a", 4, 40), 0)
    own.token_ids.append(0)
    own.num_computed_tokens = 4
    seen = []
    for accepted in ("none", "none", "none", "none", "none", "all", "all", "none"):
        drafted = ours._count(own)
        seen.append(drafted)
        ours.record_acceptance("a", drafted, drafted if accepted == "all" else 0)
    assert seen == [5, 4, 3, 2, 1, 1, 3, 5]
    assert len(ours.propose([own])["a"]) <= ours._count(own) == 4
    own.finish_reason = FinishReason.STOP
    again = Sequence.from_request(request("a", 4, 40), 1)
    again.token_ids.append(0)
    again.num_computed_tokens = 4
    ours.propose([])
    assert ours._count(again) == 5, "another request of that id starts anew"


def test_no_more_is_drafted_than_the_request_can_use() -> None:
    asked = request("a", 4, 6)
    wanted = plain(model_of(spec_of()), [asked])
    runner = runner_of(model_of(spec_of()), speculator=drafts(Guesses({"a": wanted["a"].token_ids}, right=1.0), 9))
    checks = of(Verified, runner.stream([asked]))
    assert sum(check.drafted for check in checks) <= 4 and tokens(generate(runner, [asked])) == tokens(wanted)
