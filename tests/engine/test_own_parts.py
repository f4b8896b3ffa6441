"""A part of the user's own that fails ends its request and no other; what cannot be one is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.engine.poison import MODEL
from tests.engine.tiny import request, runner_of
from workbench.custom import temporarily_registered
from workbench.engine.runner import generate


class Search:
    def __init__(self, advance: Callable[[Any], Any]):
        self.advance = advance


def combiner(combine: Callable[..., Any], *layers: int) -> Callable[..., Any]:
    """A filter of the logits of early layers."""
    combine.layers = layers  # type: ignore[attr-defined] (what makes it one)
    return combine


def raises(*given: object) -> None:
    raise ZeroDivisionError


def constraint(**verbs: Any) -> type:
    """A constraint that forbids nothing, but for these methods."""
    nothing = np.zeros(31, np.bool_)
    free = {"start": lambda *given: None, "banned": lambda self, ids: nothing, "advance": lambda self, token: None}
    return type("Own", (), free | verbs)


USES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "search": lambda part: {"beams": 2, "search": part, "temperature": 1.0},
    "ranking": lambda part: {"best_of": 3, "ranking": part, "temperature": 0.9},
    "filter": lambda part: {"filters": [part]},
    "constraint": lambda part: {"constraint": part},
}
BEST = "advance must return the best branch, 0 to 1, and 2 pairs"


@pytest.mark.parametrize(
    ("use", "part", "reason", "words"),
    [
        ("search", Search(lambda branches: (0, [(0, 1)])), "error", f"{BEST} (branch, token), tokens 0 to 30; not"),
        ("search", Search(lambda branches: (2, [(0, 1)] * 2)), "error", BEST),
        ("search", Search(lambda branches: (0, [(0, 99)] * 2)), "error", BEST),
        ("search", Search(lambda branches: [1, 2, 3]), "error", "; not [1, 2, 3]"),
        ("search", Search(raises), "error", "raised ZeroDivisionError"),
        ("search", object(), "refused", "a search needs advance(branches)"),
        ("ranking", lambda samples: [1.0], "error", "must return 3 finite numbers, one a sample, not [1.0]"),
        ("ranking", lambda samples: [float("nan")] * 3, "error", "must return 3 finite numbers"),
        ("ranking", lambda samples: raises(), "error", "raised ZeroDivisionError"),
        ("ranking", lambda: None, "refused", "must take (samples)"),
        ("filter", combiner(lambda logits, histories, early: logits[0], 1), "error",
         "must return logits (1, 31) torch.float32, not (31,)"),
        ("filter", combiner(lambda logits, histories, early: logits * float("nan"), 1), "error",
         "its logits leave no token, or contain NaN"),
        ("filter", combiner(lambda logits, histories, early: raises(), 1), "error", "ZeroDivisionError"),
        ("filter", combiner(lambda logits, histories, early: logits, 1, 2), "refused",
         "layers (1, 2); the model has 2: give 0 to 1"),
        ("filter", combiner(lambda logits, histories, early: logits), "refused", "must be a tuple of layer numbers"),
        ("constraint", constraint(start=lambda self, tokens, ends: raises()), "refused", "start: ZeroDivisionError"),
        ("constraint", constraint(banned=lambda self, ids: raises()), "error", "banned: ZeroDivisionError"),
        ("constraint", constraint(banned=lambda self, ids: [False]), "error", "return [31] of bool, not [1] of bool"),
        ("constraint", constraint(banned=lambda self, ids: [0] * 31), "error", "not [31] of int64"),
        ("constraint", constraint(banned=lambda self, ids: [True] * 31), "error", "allows no token"),
        ("constraint", constraint(advance=lambda self, token: raises()), "error", "advance: ZeroDivisionError"),
        ("constraint", constraint(advance=lambda self, token: "yes"), "error", "True if the answer ends, not 'yes'"),
        ("constraint", constraint(advance=None), "refused", "has no advance; a constraint needs advance(token)"),
        ("constraint", constraint(banned=lambda self: None), "refused", "must take (ids)"),
        ("constraint", constraint()(), "refused", "is not a class; each sample of a request needs an instance"),
    ],
)  # fmt: skip
def test_its_request_ends_with_the_reason_and_no_other(use: str, part: object, reason: str, words: str) -> None:
    runner = runner_of(MODEL)
    with temporarily_registered(part) as path:
        done = generate(runner, [request("a", 4, 5, **USES[use]({"path": path})), request("b", 4, 5)])
    assert done.pop("b").reason == "length" and {end.reason for end in done.values()} == {reason}
    assert words in done["a"].error and "\n" not in done["a"].error
    assert runner.scheduler.pages_in_use == 0
