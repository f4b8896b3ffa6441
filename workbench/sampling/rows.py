"""Sample from the rows of one sequence: one row for its next token, and one after each draft token."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from workbench.request import Sequence
from workbench.sampling.filters import History
from workbench.sampling.samplers import (
    RandomSampler,
    SampledToken,
    describe_bad_logits,
    failed_token,
    sample_categorical,
    uniform,
    with_logprobs,
)
from workbench.sampling.sampling_state import SamplingState, apply_custom_filters, sample_row
from workbench.sampling.verify import ACCEPT_STREAM, Draft, rejection_sample


@dataclass(frozen=True)
class PendingRows:
    """The rows of one sequence that are to be sampled: one for its next token and one after each draft token; `largest`
    has the largest logit of each row.
    """

    index: int
    rows: range
    sequence: Sequence
    draft: Draft
    sampling_state: SamplingState
    largest: list[float]
    take: Take | None = None  # the constraint of a constrained request

    @property
    def histories(self) -> list[History]:
        """Return the history of each row, including the draft tokens before it."""
        return [self.history(place) for place in range(len(self.rows))]

    def history(self, place: int) -> History:
        sequence = self.sequence
        return History(sequence.request.prompt_ids, [*sequence.output_ids, *self.draft.before(place)])

    def uniform(self, place: int, use: bytes = b"") -> float:
        ahead = place if self.draft.parents is None else len(self.draft.before(place))
        position = len(self.sequence.token_ids) - self.sequence.prompt_length + ahead
        return uniform(self.sequence.request.sampling.seed, position, use)

    def sample(
        self, scores: Tensor, filtered: Tensor, faults: list[float], token: int | None, rejection: bool
    ) -> list[SampledToken]:
        """Return the accepted draft tokens and one token after them; the last may be a failure.

        Args:
            scores: the sequence's rows before filters, [row, vocab].
            filtered: the rows after filters, [row, vocab].
            faults: the largest value of each filtered row, which shows whether a token can be sampled from it.
            token: the token of a single row, if it was sampled in a batch with other sequences.
            rejection: accept drafts by rejection sampling if the sampler is a plain random one; otherwise by match.
        """
        sampling_state = self.sampling_state

        def left(place: int) -> Tensor:
            if not math.isfinite(self.largest[place]):
                raise BadRow(failed_token(f"the model's logits {describe_bad_logits(self.largest[place])}"))
            if not math.isfinite(faults[place]):
                raise BadRow(failed_token(f"after the filters the logits {describe_bad_logits(faults[place])}"))
            if not sampling_state.custom_filters:
                return filtered[place]
            row = apply_custom_filters(filtered[place], sampling_state, self.history(place))
            if isinstance(row, SampledToken):
                raise BadRow(row)
            return row

        def sample_alone(place: int) -> SampledToken:
            try:
                if token is not None and not sampling_state.custom_filters:
                    return with_logprobs(token, scores[0], left(0), sampling_state.request.sampling)
                return sample_row(scores[place], left(place), sampling_state, self.uniform(place))
            except BadRow as broken:
                return broken.choice

        chain = self.draft.parents is None and len(self.draft.token_ids) > 0
        if not (chain and isinstance(sampling_state.sampler, RandomSampler) and rejection):
            return follow(self.draft, sample_alone, self.take)
        choices: list[SampledToken] = []
        try:
            self._rejection_sample(scores, left, choices)
        except BadRow as broken:
            choices.append(broken.choice)
        return follow(self.draft, lambda place: choices[place] if place < len(choices) else None, self.take)

    def _rejection_sample(self, scores: Tensor, left: Callable[[int], Tensor], choices: list[SampledToken]) -> None:
        """Append the accepted draft tokens and the one after them."""
        rows: dict[int, Tensor] = {}

        def take(place: int, token: int) -> None:
            choices.append(with_logprobs(token, scores[place], rows[place], self.sampling_state.request.sampling))

        def target(place: int) -> Tensor:
            if place:  # it is only requested after its predecessor was accepted
                take(place - 1, self.draft.token_ids[place - 1])
            rows[place] = left(place)
            return rows[place].double().softmax(-1)

        uniforms = [self.uniform(place, ACCEPT_STREAM) for place in range(len(self.draft.token_ids))]
        standing, weights = rejection_sample(self.draft, target, uniforms)
        take(standing, sample_categorical(weights[None], [self.uniform(standing)])[0])


Take = Callable[[int, SampledToken], SampledToken | None]  # row -> the token to take, or None to wait


def follow(draft: Draft, sample: Callable[[int], SampledToken | None], take: Take | None) -> list[SampledToken]:
    """Return the tokens sampled along a draft. They end with the first token that is not in the draft, fails, waits or
    is the last.

    Args:
        draft: the draft.
        sample: function that returns the token sampled from a row; None if there is none.
        take: function that passes a sampled token to the request's constraint, if there is one.
    """
    choices: list[SampledToken] = []
    row: int | None = 0
    while row is not None and (choice := sample(row)) is not None:
        taken = choice if take is None or choice.error else take(row, choice)
        if taken is None:
            break
        choices.append(taken)
        row = None if taken.error or taken.finish_reason else draft.next_row(row, taken.token_id)
    return choices


class BadRow(Exception):
    """Raised for a row from which no token can be sampled."""

    def __init__(self, choice: SampledToken):
        super().__init__(choice.error)
        self.choice = choice
