"""Describe the token sampled for a sequence, with its log-probabilities, or the failure."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.errors import WorkbenchError
from workbench.request import SamplingParameters


@dataclass(frozen=True)
class SampledToken:
    """The token sampled for one sequence; on failure `error` has the reason and `token_id` is -1."""

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()  # most probable first, equal ones by token id
    error: str = ""


def with_logprobs(token: int, scores: Tensor, filtered: Tensor, sampling: SamplingParameters) -> SampledToken:
    """Return the token with the requested log-probabilities, of the model or of the filtered distribution."""
    if sampling.logprobs is None:
        return SampledToken(token)
    row = scores if sampling.logprobs_of == "model" else filtered
    logprobs = row.double().log_softmax(-1)
    return SampledToken(token, float(logprobs[token]), _most_probable(logprobs, sampling.logprobs))


def _most_probable(logprobs: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    if count == 0:
        return ()
    least = logprobs.topk(min(count, len(logprobs))).values[-1]
    ids = ((logprobs >= least) & (logprobs > -torch.inf)).nonzero()[:, 0]
    best = logprobs[ids].sort(descending=True, stable=True).indices[:count]
    return tuple(zip(ids[best].tolist(), logprobs[ids[best]].tolist(), strict=True))


def failed_token(error: str) -> SampledToken:
    return SampledToken(-1, error=error)


def describe_bad_logits(largest: float) -> str:
    if math.isnan(largest):
        return "contain NaN"
    return "contain +inf" if largest > 0 else "leave no token: all are -inf"


def describe_failure(name: str, error: Exception) -> str:
    return str(error) if isinstance(error, WorkbenchError) else f"{name}: {type(error).__name__}: {error}"
