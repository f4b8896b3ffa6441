"""Shortest job first: the request with the shortest predicted output goes first.

Qiu et al., 2024, "Efficient Interactive LLM Serving with Proxy Model-based Sequence Length Prediction" (speculative
shortest job first); Fu et al., 2024, "Efficient LLM Scheduling by Learning to Rank", of which only the order of the
predictions matters. With n jobs of lengths l_1 .. l_n on one machine the mean time to completion is

    (1/n) * sum over i of (n - i + 1) * l_(i)     and is least for   l_(1) <= l_(2) <= ... <= l_(n)

The predictor is an argument: "given" is the prediction that came with the request, "limit" its `max_tokens`, "prompt"
its prompt's length; in Python any function of a view. A running request is not interrupted.

It gives up the law that no request starves: a long one does while shorter ones keep coming. `starvation_limit` (steps)
bounds that, as the prevention of Fu et al. does, at the price of the order; 0 is the plain rule.
"""

from __future__ import annotations

from collections.abc import Callable

from workbench.parts import RequestView, SchedulerDecision, SchedulerState, sorted_with_aging

PREDICTORS: dict[str, Callable[[RequestView], float]] = {
    "given": lambda entry: entry.predicted_tokens,
    "limit": lambda entry: entry.max_tokens,
    "prompt": lambda entry: entry.num_prompt_tokens,
}
BY_LENGTH = ("short prompts", "long prompts", "prompts without outputs")  # rivals of the kit with shorter outputs
STARVED = {
    "given": (*BY_LENGTH, "requests predicted to be short"),
    "limit": BY_LENGTH,
    "prompt": ("short prompts", "long outputs"),  # the rivals with long outputs have shorter prompts
}
NEVER = 2**62  # steps


class ShortestJob:
    """Sort by predicted length."""

    steady = True  # a decoding request is never held back

    def __init__(self, predictor: str | Callable[[RequestView], float] = "given", starvation_limit: int = 0):
        if isinstance(predictor, str) and predictor not in PREDICTORS:
            raise ValueError(f"predictor {predictor!r}: give {', '.join(PREDICTORS)}, or a function of a view")
        self.key = PREDICTORS[predictor] if isinstance(predictor, str) else predictor
        self.starvation_limit = starvation_limit
        starved = STARVED.get(predictor, ()) if isinstance(predictor, str) and not starvation_limit else ()
        self.gives_up = frozenset(f"no request starves among {rivals}" for rivals in starved)

    def __call__(self, state: SchedulerState) -> SchedulerDecision:
        turns = sorted_with_aging(state, self.starvation_limit or NEVER, self.key)
        return SchedulerDecision([state.decodes, turns])
