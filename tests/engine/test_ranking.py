"""Samples ranked by a part of the user's own: the ranking's order, and an error that ends them all."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.engine.poison import MODEL
from tests.engine.tiny import request, runner_of
from workbench.custom import temporarily_registered
from workbench.engine.runner import generate
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
