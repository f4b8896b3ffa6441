"""Samples ranked by a part of the user's own: the ranking's order, and an error that ends them all."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from pydantic import ValidationError

from tests.engine.poison import MODEL
from tests.engine.tiny import request, runner_of
from workbench.custom import temporarily_registered
from workbench.engine.runner import generate
from workbench.request import SamplingParameters
from workbench.trace.events import Finished

DRAWN = {"temperature": 0.9, "seed": 5}



def test_it_is_given_the_texts_and_their_log_probabilities() -> None:
    seen: list[Finished] = []

    def note(samples: Sequence[Finished]) -> list[float]:
        seen.extend(samples)
        return [0.0] * len(samples)

    plain = generate(runner_of(MODEL), [request("a", 4, 5, best_of=3, **DRAWN)])
    with temporarily_registered(note) as path:
        done = generate(runner_of(MODEL), [request("a", 4, 5, best_of=3, ranking={"path": path}, **DRAWN)])
    assert [each.token_ids for each in seen] == [done[name].token_ids for name in ("a", "a#1", "a#2")]
    assert sorted(each.score or 0 for each in seen) == pytest.approx(sorted(end.score or 0 for end in plain.values()))


@pytest.mark.parametrize(
    ("ranking", "words"),
    [
        (lambda samples: [1.0], r"must return 3 finite numbers, one a sample, not \[1.0\]"),
        (lambda samples: [float("nan")] * 3, "must return 3 finite numbers"),
        (lambda samples: 1 / 0, "raised ZeroDivisionError"),
    ],
)
def test_one_that_fails_ends_its_samples_and_no_others(ranking, words: str) -> None:
    runner = runner_of(MODEL)
    with temporarily_registered(ranking) as path:
        asked = [request("a", 4, 5, best_of=3, ranking={"path": path}, **DRAWN), request("b", 4, 5)]
        done = generate(runner, asked)
    assert done["b"].reason == "length"
    for name in ("a", "a#1", "a#2"):
        assert done[name].reason == "error"
        with pytest.raises(AssertionError, match=words):
            raise AssertionError(done[name].error)


def test_what_cannot_rank_is_refused() -> None:
    with temporarily_registered(lambda: None) as path:
        done = generate(runner_of(MODEL), [request("a", 4, 5, best_of=2, ranking={"path": path})])
    assert {end.reason for end in done.values()} == {"refused"} and "must take (samples)" in done["a"].error
    for wrong in ({}, {"best_of": 1}, {"n": 2}, {"n": 2, "best_of": 2}):
        with pytest.raises(ValidationError, match="set best_of above n"):
            SamplingParameters.model_validate({**wrong, "ranking": {"path": "x"}})
