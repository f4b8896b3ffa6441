"""Trace the effect of each filter on one row of logits, with the engine's filters in the engine's order."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace

import torch
from torch import Tensor

from workbench.errors import WorkbenchError
from workbench.request import Request, SamplingParameters
from workbench.sampling.filters import REMOVED, History
from workbench.sampling.samplers import Greedy, SampledToken, describe_bad_logits
from workbench.sampling.sampling_state import (
    SamplingState,
    apply_custom_filters,
    build_sampling_state,
    sample_row,
)


@dataclass(frozen=True)
class FilterStep:
    """The effect of one filter: `logits` [vocab] after it, the tokens that it `removed`, and their share of the
    probability.

    Shares are fractions of the filter's input distribution; `kept_mass` is what this and all earlier filters leave.
    """

    name: str
    logits: Tensor
    removed: Tensor
    removed_mass: float
    kept_mass: float

    @property
    def num_left(self) -> int:
        return int((self.logits > REMOVED).sum())

    @property
    def probabilities(self) -> Tensor:
        """Return the softmax of the logits after the filter, [vocab] in float64."""
        return self.logits.double().softmax(-1)


@dataclass(frozen=True)
class FilterTrace:
    """The effects of all filters on one row, in order of application; at temperature 0 the last step is `greedy`, which
    keeps one token.
    """

    model: Tensor
    steps: tuple[FilterStep, ...]
    sampling_state: SamplingState
    sampled: Tensor  # input of the sampler

    @property
    def logits(self) -> Tensor:
        return self.steps[-1].logits if self.steps else self.model

    @property
    def probabilities(self) -> Tensor:
        """Return the distribution of the next token: [vocab], float64."""
        return self.logits.double().softmax(-1)

    @property
    def kept_mass(self) -> float:
        """Return the probability mass that is left after all filters; with the removed masses it adds up to 1."""
        return self.steps[-1].kept_mass if self.steps else 1.0

    def draw(self, uniforms: Sequence[float]) -> list[int]:
        """Sample one token for each of these numbers in [0, 1), by the request's sampler."""
        if self.sampling_state.sampler is None:
            return [self._own(number) for number in uniforms]
        tokens = self.sampling_state.sampler.choose_rows(self.sampled[None], uniforms)
        return tokens if len(tokens) == len(uniforms) else tokens * len(uniforms)  # greedy ignores the number

    def _own(self, number: float) -> int:
        choice = sample_row(
            self.model, self.sampled, replace(self.sampling_state), number
        )  # each draw starts from the same state
        if choice.error:
            raise WorkbenchError(choice.error)
        return choice.token_id


@torch.no_grad()
def trace_filters(logits: Tensor, history: History, sampling: SamplingParameters) -> FilterTrace:
    """Trace `logits` [vocab] through the filters of `sampling`, for the next token after `history`. Raises
    WorkbenchError if the engine would fail.

    Example: `workbench.trace_filters(logits, workbench.History(ids), workbench.SamplingParameters(top_k=40))`
    """
    scores = logits.float()
    _check(scores, "the model's logits")
    sampling_state = build_sampling_state(Request("", tuple(history.prompt_ids), sampling), len(scores))
    if sampling_state.combiners:
        path = sampling_state.combiners[0].path
        raise WorkbenchError(f"filter {path}: combines these logits with others; a row alone cannot be traced")
    steps: list[FilterStep] = []
    left = scores
    for rule in sampling_state.filters:
        left = _entered(steps, left, rule(left[None], [history])[0], _name(rule))
        _check(left, "after the filters the logits")
    for part, rule in sampling_state.custom_filters:
        after = apply_custom_filters(left, replace(sampling_state, custom_filters=((part, rule),)), history)
        if isinstance(after, SampledToken):
            raise WorkbenchError(after.error)
        left = _entered(steps, left, after, part.path)
    if isinstance(sampling_state.sampler, Greedy):
        alone = torch.full_like(left, REMOVED)
        token = sampling_state.sampler.choose_rows(left[None], [0.0])[0]
        alone[token] = left[token]
        _entered(steps, left, alone, "greedy")
    return FilterTrace(scores, tuple(steps), sampling_state, left)


def entropy_bits(probabilities: Tensor) -> float:
    """Return the entropy of a distribution, in bits.

    Example: `workbench.entropy_bits(logits.softmax(-1))`
    """
    some = probabilities[probabilities > 0]
    return max(0.0, -float((some * some.log2()).sum()))


def _entered(steps: list[FilterStep], before: Tensor, after: Tensor, name: str) -> Tensor:
    removed = ((after == REMOVED) & (before > REMOVED)).nonzero()[:, 0]
    whole, share = (steps[-1].kept_mass if steps else 1.0), float(before.double().softmax(-1)[removed].sum())
    steps.append(FilterStep(name, after, removed, whole * share, whole * (1 - share)))
    return after


def _check(row: Tensor, what: str) -> None:
    largest = float(row.amax())
    if not math.isfinite(largest):
        raise WorkbenchError(f"{what} {describe_bad_logits(largest)}")


def _name(rule: object) -> str:
    """Return a filter's name with its number, such as `top k 40`."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(rule).__name__).lower()
    values = [getattr(rule, each.name) for each in fields(rule)] if is_dataclass(rule) else []
    return f"{words} {values[0]:g}" if len(values) == 1 and isinstance(values[0], (int, float)) else words
