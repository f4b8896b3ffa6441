"""Build the filters and the sampler of one request once, and apply them to a row; user-defined ones may fail."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from workbench.constrained.constraint import Constraint
from workbench.errors import WorkbenchError
from workbench.request import CustomPart, Request
from workbench.sampling.combiners import NamedCombiner
from workbench.sampling.filters import Filter, History, build_filters
from workbench.sampling.samplers import (
    Greedy,
    RandomSampler,
    SampledToken,
    TokenSampler,
    describe_bad_logits,
    describe_failure,
    failed_token,
    load_filter,
    load_sampler,
    with_logprobs,
)


@dataclass
class SamplingState:
    """The filters and the sampler of one request, built once, with the state of a user-defined sampler."""

    request: Request
    filters: tuple[Filter, ...]
    custom_filters: tuple[tuple[CustomPart, Filter], ...]
    sampler: Greedy | RandomSampler | None  # None if a user-defined sampler replaces it
    custom_sampler: TokenSampler | None
    state: Any = None
    constraint: Constraint | None = None  # tokens removed before all filters
    combiners: tuple[NamedCombiner, ...] = ()  # filters that combine other logits, run first
    is_plain_greedy: bool = field(init=False)  # the row's argmax is the result

    def __post_init__(self) -> None:
        plain = not self.filters and not self.custom_filters and not self.combiners
        self.is_plain_greedy = isinstance(self.sampler, Greedy) and plain and self.request.sampling.logprobs is None


def build_sampling_state(request: Request, vocab_size: int | None) -> SamplingState:
    """Build the sampling state of `request`; `vocab_size` bounds the token ids of its logit bias.

    Raises:
        WorkbenchError: names the invalid component.
    """
    sampling = request.sampling
    beyond = [token for token in sampling.logit_bias if vocab_size is not None and token >= vocab_size]
    if beyond:
        raise WorkbenchError(f"logit_bias: token id {beyond[0]} is outside the vocabulary of {vocab_size} tokens")
    filters = build_filters(sampling)
    loaded = [(part, load_filter(part)) for part in sampling.filters]
    combiners = tuple(rule for _, rule in loaded if isinstance(rule, NamedCombiner))
    custom_filters = tuple((part, rule) for part, rule in loaded if not isinstance(rule, NamedCombiner))
    if sampling.sampler is None:
        own_sampler = RandomSampler() if sampling.temperature else Greedy()
        return SamplingState(request, filters, custom_filters, own_sampler, None, combiners=combiners)
    if sampling.temperature == 0:
        raise WorkbenchError(
            f"sampler {sampling.sampler.path}: temperature 0 means greedy; set it above 0, or no sampler"
        )
    own = load_sampler(sampling.sampler)
    try:
        state = own.start()
    except Exception as error:
        raise WorkbenchError(describe_failure(f"sampler {sampling.sampler.path}: start", error)) from error
    return SamplingState(request, filters, custom_filters, None, own, state, combiners=combiners)


def apply_custom_filters(filtered: Tensor, sampling_state: SamplingState, history: History) -> Tensor | SampledToken:
    """Apply the user-defined filters to this row, each on a copy, and return the row; return a failed token if a filter
    fails.
    """
    for part, rule in sampling_state.custom_filters:
        try:
            before, filtered = filtered, _row_of(rule(filtered[None].clone(), [history]), filtered)
        except Exception as error:
            return failed_token(describe_failure(part.path, error))
        if bool(((before == -torch.inf) & (filtered != -torch.inf)).any()):
            return failed_token(f"filter {part.path}: brought a token back that an earlier filter had removed")
        largest = float(filtered.amax())
        if not math.isfinite(largest):
            return failed_token(f"filter {part.path}: its logits {describe_bad_logits(largest)}")
    return filtered


def sample_row(scores: Tensor, filtered: Tensor, sampling_state: SamplingState, draw: float) -> SampledToken:
    """Sample a token from a filtered row with the request's sampler, which may be user-defined.

    Args:
        scores: the model's logits, [vocab].
        filtered: logits after all filters, [vocab].
        sampling_state: the request's sampling state.
        draw: a number in [0, 1).
    """
    sampling = sampling_state.request.sampling
    name, state = type(sampling_state.sampler).__name__, sampling_state.state
    try:
        if sampling_state.custom_sampler is None:
            assert sampling_state.sampler is not None
            token = sampling_state.sampler.choose_rows(filtered[None], [draw])[0]
        else:
            assert sampling.sampler is not None
            name = sampling.sampler.path
            token, state = sampling_state.custom_sampler.choose(filtered.clone(), draw, sampling_state.state)
            token = operator.index(token)
    except Exception as error:
        return failed_token(describe_failure(name, error))
    if not 0 <= token < len(filtered) or filtered[token] == -torch.inf:
        return failed_token(f"sampler {name}: chose token {token}, which is removed or unknown")
    sampling_state.state = state
    return with_logprobs(token, scores, filtered, sampling)


def _row_of(returned: object, row: Tensor) -> Tensor:
    wanted = (1, len(row))
    if not isinstance(returned, Tensor):
        raise TypeError(f"a filter must return logits, not {type(returned).__name__}")
    if returned.shape != wanted or returned.dtype != row.dtype:
        actual = f"{tuple(returned.shape)} {returned.dtype}"
        raise TypeError(f"a filter must return logits {wanted} {row.dtype}, not {actual}")
    return returned[0]
