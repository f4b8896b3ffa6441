"""Compute the log-probabilities of a prompt's tokens from the logits of its positions, a few rows at a time."""

from __future__ import annotations

import math

from torch import Tensor

from workbench.request import Sequence
from workbench.sampling.samplers import describe_bad_logits, most_probable
from workbench.trace.events import PromptLogprob

ROWS_AT_ONCE = 32  # in float64 a row is twice as large as its logits


class BadPromptRow(Exception):
    """Raised for a prompt position whose logits are invalid."""


def score_prompt(sequence: Sequence, logits: Tensor) -> list[PromptLogprob]:
    """Return the log-probabilities of the next prompt tokens, those that have none so far.

    They are the model's own log-probabilities (no filter, temperature 1), computed like those of generated tokens.

    Args:
        sequence: the sequence, with its prompt and the number of prompt tokens that already have one.
        logits: logits at the positions before these tokens, [row, vocab].

    Raises:
        BadPromptRow: for logits that are NaN, +inf or all -inf; the message says which.
    """
    assert sequence.prompt_logprobs is not None and sequence.request.sampling.prompt_logprobs is not None
    first, count = len(sequence.prompt_logprobs), sequence.request.sampling.prompt_logprobs
    logprobs: list[PromptLogprob] = []
    for begin in range(0, len(logits), ROWS_AT_ONCE):
        rows = logits[begin : begin + ROWS_AT_ONCE]
        for largest in rows.amax(-1).tolist():
            if not math.isfinite(largest):
                raise BadPromptRow(f"the model's logits of the prompt {describe_bad_logits(largest)}")
        place = first + begin
        ids = sequence.request.prompt_ids[place : place + len(rows)]
        for token, row in zip(ids, rows.double().log_softmax(-1), strict=True):
            logprobs.append(PromptLogprob(token, float(row[token]), most_probable(row, count)))
    return logprobs
