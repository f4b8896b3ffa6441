"""Sample one sequence's tokens from its rows of a step's logits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from workbench.request import Sequence
from workbench.sampling.admitted import SamplingState, sample_row, apply_custom_filters
from workbench.sampling.choice import SampledToken, failed_token, describe_bad_logits, with_logprobs
from workbench.sampling.filters import History
from workbench.sampling.samplers import RandomSampler, sample_categorical, uniform
from workbench.sampling.verify import ACCEPT_STREAM, Draft, rejection_sample


@dataclass(frozen=True)
class PendingRows:
    """The rows of one sequence: one for its next token and one after each draft token; `largest` has each row's
    maximum."""

    index: int
    rows: range
    sequence: Sequence
    draft: Draft
    sampling_state: SamplingState
    largest: list[float]

    @property
    def histories(self) -> list[History]:
        """Return the tokens before each row's token, draft tokens included."""
        return [self.history(place) for place in range(len(self.rows))]

    def history(self, place: int) -> History:
        known = self.sequence
        return History(known.request.prompt_ids, [*known.output_ids, *self.draft.token_ids[:place]])

    def uniform(self, place: int, use: bytes = b"") -> float:
        known = self.sequence
        return uniform(known.request.sampling.seed, len(known.token_ids) - known.prompt_length + place, use)

    def sample(
        self, scores: Tensor, filtered: Tensor, faults: list[float], token: int | None, rejection: bool
    ) -> list[SampledToken]:
        """Return the accepted draft tokens and one token after them; the last may be a failure.

        Args:
            scores: the sequence's rows before the filters, [row, vocab].
            filtered: the same after the filters.
            faults: the largest value of each filtered row.
            token: the token sampled from a lone row, if that was done together with others.
            rejection: accept drafts by rejection sampling if the sampler is a plain random one; otherwise by match.
        """
        sampling_state = self.sampling_state

        def left(place: int) -> Tensor:
            if not math.isfinite(self.largest[place]):
                raise BadRow(failed_token(f"the model's logits {describe_bad_logits(self.largest[place])}"))
            if not math.isfinite(faults[place]):
                raise BadRow(failed_token(f"after the filters the logits {describe_bad_logits(faults[place])}"))
            own = apply_custom_filters(filtered[place], sampling_state, self.history(place)) if sampling_state.custom_filters else filtered[place]
            if isinstance(own, SampledToken):
                raise BadRow(own)
            return own

        choices: list[SampledToken] = []
        try:
            if token is not None and not sampling_state.custom_filters:
                return [with_logprobs(token, scores[0], left(0), sampling_state.request.sampling)]
            if len(self.draft) and isinstance(sampling_state.sampler, RandomSampler) and rejection:
                self._rejection_sample(scores, left, choices)
                return choices
            for place in range(len(self.rows)):
                choices.append(sample_row(scores[place], left(place), sampling_state, self.uniform(place)))
                if place < len(self.draft) and choices[-1].token_id != self.draft.token_ids[place]:
                    break
        except BadRow as broken:
            choices.append(broken.choice)
        return choices

    def _rejection_sample(self, scores: Tensor, left: Callable[[int], Tensor], choices: list[SampledToken]) -> None:
        """Append the accepted draft tokens and the one after them."""
        rows: dict[int, Tensor] = {}

        def take(place: int, token: int) -> None:
            choices.append(with_logprobs(token, scores[place], rows[place], self.sampling_state.request.sampling))

        def target(place: int) -> Tensor:
            if place:  # it is requested only after the token before it was accepted
                take(place - 1, self.draft.token_ids[place - 1])
            rows[place] = left(place)
            return rows[place].double().softmax(-1)

        uniforms = [self.uniform(place, ACCEPT_STREAM) for place in range(len(self.draft))]
        standing, weights = rejection_sample(self.draft, target, uniforms)
        take(standing, sample_categorical(weights[None], [self.uniform(standing)])[0])


class BadRow(Exception):
    """A row from which no token can be sampled."""

    def __init__(self, choice: SampledToken):
        super().__init__(choice.error)
        self.choice = choice
