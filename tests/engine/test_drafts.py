"""Prompt lookup, how many tokens are drafted, and the settings that say so."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.guesses import Guesses, drafts, plain, tokens
from tests.engine.tiny import model_of, request, runner_of, spec_of
from workbench.engine.loaded_model import DEMO_FOLDER
from workbench.engine.runner import generate
from workbench.engine.speculator import check_same_vocabulary
from workbench.errors import WorkbenchError
from workbench.prompt.tokenization.tokenizer import Tokenizer
from workbench.request import FinishReason, Request, Sequence
from workbench.speculative.config import parse_speculation
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
    checks = [e for e in runner.stream([asked]) if isinstance(e, Verified)]
    assert sum(check.drafted for check in checks) <= 4 and tokens(generate(runner, [asked])) == tokens(wanted)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("drafts", "speculate: .*'drafts'.*prompt_lookup"),
        ({"kind": "draft", "num_speculative_tokens": 0}, "num_speculative_tokens: .*greater than or equal to 1"),
        ({"kind": "prompt_lookup", "min_ngram": 5}, "min_ngram 5 is above max_ngram 4"),
        ({"kind": "draft", "tokens": 4}, "tokens: Extra inputs"),
        ({"kind": "draft", "confidence_threshold": 40}, "confidence_threshold: .*less than or equal to 1"),
        ({"kind": "draft", "confidence_threshold": float("nan")}, "confidence_threshold: .*finite"),
        ({"kind": "prompt_lookup", "confidence_threshold": 0.4}, "confidence_threshold: Extra inputs"),
    ],
)
def test_settings_that_cannot_be_are_refused(given, words: str) -> None:
    with pytest.raises(WorkbenchError, match=words) as caught:
        parse_speculation(given)
    assert "\n" not in str(caught.value)


def test_another_tokenizer_is_refused_in_one_line() -> None:
    ours, other = (Tokenizer.from_folder(DEMO_FOLDER / name) for name in ("target", "bytes"))
    spec = spec_of()
    with pytest.raises(
        WorkbenchError, match="a draft must have the target's tokenizer; token .* is .* there"
    ) as caught:
        check_same_vocabulary("bytes", other, spec, ours, spec)
    assert "\n" not in str(caught.value)
    check_same_vocabulary("target", ours, spec, ours, spec)
    with pytest.raises(WorkbenchError, match="it has none at all"):
        check_same_vocabulary("x", None, spec, ours, spec)
    with pytest.raises(WorkbenchError, match="vocabulary has 128256 tokens"):
        check_same_vocabulary("x", None, spec.model_copy(update={"vocab_size": 128256}), ours, spec)
