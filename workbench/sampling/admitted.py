"""Build and keep the sampling state of one request: filters, sampler, and user-defined components."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench.errors import WorkbenchError
from workbench.request import Request
from workbench.sampling.choice import Choice, failed, fault, noted, told
from workbench.sampling.filters import Filter, History, pipeline
from workbench.sampling.samplers import Draw, Greedy, Sampler
from workbench.sampling.user import load_filter, load_sampler


@dataclass
class Admitted:
    """How one request samples, built once, and the state of its user-defined sampler."""

    request: Request
    filters: tuple[Filter, ...]
    own_filters: tuple[Filter, ...]
    sampler: Greedy | Draw | None  # None if a user-defined sampler replaces it
    own_sampler: Sampler | None
    state: Any = None

    @property
    def plain(self) -> bool:
        """Return whether the row's argmax is the whole answer."""
        greedy = isinstance(self.sampler, Greedy) and not self.filters and not self.own_filters
        return greedy and self.request.sampling.logprobs is None


def admit(request: Request, vocab: int | None) -> Admitted:
    """Build the sampling state of `request`; `vocab_size` bounds the token ids of its logit bias.

    Raises:
        WorkbenchError: naming the component that cannot work.
    """
    sampling = request.sampling
    beyond = [token for token in sampling.logit_bias if vocab is not None and token >= vocab]
    if beyond:
        raise WorkbenchError(f"logit_bias: token id {beyond[0]} is outside the vocabulary of {vocab} tokens")
    filters = pipeline(sampling)
    own_filters = tuple(load_filter(part) for part in sampling.filters)
    if sampling.sampler is None:
        return Admitted(request, filters, own_filters, Draw() if sampling.temperature else Greedy(), None)
    if sampling.temperature == 0:
        raise WorkbenchError(
            f"sampler {sampling.sampler.path}: temperature 0 means greedy; set it above 0, or no sampler"
        )
    own = load_sampler(sampling.sampler)
    try:
        state = own.start()
    except Exception as error:
        raise WorkbenchError(told(f"sampler {sampling.sampler.path}: start", error)) from error
    return Admitted(request, filters, own_filters, None, own, state)


def own_filtered(filtered: Tensor, way: Admitted, history: History) -> Tensor | Choice:
    """Apply the user-defined filters to this row, each on a copy; return a failed token if one breaks."""
    for part, rule in zip(way.request.sampling.filters, way.own_filters, strict=True):
        try:
            before, filtered = filtered, _row_of(rule(filtered[None].clone(), [history]), filtered)
        except Exception as error:
            return failed(told(part.path, error))
        if bool(((before == -torch.inf) & (filtered != -torch.inf)).any()):
            return failed(f"filter {part.path}: brought a token back that an earlier filter had removed")
        largest = float(filtered.amax())
        if not math.isfinite(largest):
            return failed(f"filter {part.path}: its logits {fault(largest)}")
    return filtered


def choose_own(scores: Tensor, filtered: Tensor, way: Admitted, draw: float) -> Choice:
    """Sample a token from a filtered row with the request's sampler, which may be user-defined.

    Args:
        scores: the model's logits, [vocab].
        filtered: logits after all filters, [vocab].
        sampling_state: the request's sampling state.
        draw: a number in [0, 1).
    """
    sampling = way.request.sampling
    name, state = type(way.sampler).__name__, way.state
    try:
        if way.own_sampler is None:
            assert way.sampler is not None
            token = way.sampler.choose_rows(filtered[None], [draw])[0]
        else:
            assert sampling.sampler is not None
            name = sampling.sampler.path
            token, state = way.own_sampler.choose(filtered.clone(), draw, way.state)
            token = operator.index(token)
    except Exception as error:
        return failed(told(name, error))
    if not 0 <= token < len(filtered) or filtered[token] == -torch.inf:
        return failed(f"sampler {name}: chose token {token}, which is removed or unknown")
    way.state = state
    return noted(token, scores, filtered, sampling)


def _row_of(returned: object, row: Tensor) -> Tensor:
    wanted = (1, len(row))
    if not isinstance(returned, Tensor):
        raise TypeError(f"a filter must return logits, not {type(returned).__name__}")
    if returned.shape != wanted or returned.dtype != row.dtype:
        given = f"{tuple(returned.shape)} {returned.dtype}"
        raise TypeError(f"a filter must return logits {wanted} {row.dtype}, not {given}")
    return returned[0]
