"""Log-softmax over the vocabulary and its largest entries, for sampling and for log probabilities."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from compiled_kernels.lanes import Lane
from compiled_kernels.operators import define
from compiled_kernels.top_logprobs import reference

LOG_SOFTMAX = define(
    "log_softmax",
    "(Tensor logits) -> Tensor",
    lambda logits: torch.empty_like(logits, memory_format=torch.contiguous_format),
    {Lane.MLIR: "compiled_kernels.top_logprobs.mlir:log_softmax"},
)
TOP_LOGPROBS = define(
    "top_logprobs",
    "(Tensor logits, int count) -> (Tensor, Tensor)",
    lambda logits, count: (
        logits.new_empty(logits.shape[0], count),
        logits.new_empty((logits.shape[0], count), dtype=torch.int64),
    ),
    {Lane.TRITON: "compiled_kernels.top_logprobs.triton:top_logprobs"},
)


def log_softmax(logits: Float[Tensor, "sample vocab"], lane: Lane = Lane.EAGER) -> Float[Tensor, "sample vocab"]:
    """Compute logits - log(sum(exp(logits))) of each row, in float32; the type of `logits` is kept. -inf stays."""
    if lane in (Lane.EAGER, Lane.INDUCTOR):
        return reference.log_softmax(logits)
    return LOG_SOFTMAX.form(lane)(logits)


def top_logprobs(logits: Float[Tensor, "sample vocab"], count: int, lane: Lane = Lane.EAGER) -> tuple[Tensor, Tensor]:
    """Return the `count` largest log probabilities of each row and their token ids, both [sample, count].

    Largest first, equal ones by token id. The log probabilities have the type of `logits`.
    """
    if lane in (Lane.EAGER, Lane.INDUCTOR):
        return reference.top_logprobs(logits, count)
    return TOP_LOGPROBS.form(lane)(logits, count)
