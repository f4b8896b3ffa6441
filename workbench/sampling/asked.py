"""Sample one sequence's tokens from its rows of a step's logits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from workbench.request import Sequence
from workbench.sampling.admitted import Admitted, choose_own, own_filtered
from workbench.sampling.choice import Choice, failed, fault, noted
from workbench.sampling.filters import History
from workbench.sampling.samplers import Draw, drawn, uniform
from workbench.sampling.verify import ACCEPT, Draft, judge


@dataclass(frozen=True)
class Asked:
    """The rows of one sequence: one for its next token and one after each draft token; `largest` has each row's
    maximum."""

    number: int
    rows: range
    sequence: Sequence
    draft: Draft
    way: Admitted
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

    def chosen(
        self, scores: Tensor, filtered: Tensor, faults: list[float], token: int | None, rejection: bool
    ) -> list[Choice]:
        """Return the accepted draft tokens and one token after them; the last may be a failure.

        Args:
            scores: the sequence's rows before the filters, [row, vocab].
            filtered: the same after the filters.
            faults: the largest value of each filtered row.
            token: the token sampled from a lone row, if that was done together with others.
            rejection: accept drafts by rejection sampling if the sampler is a plain random one; otherwise by match.
        """
        way = self.way

        def left(place: int) -> Tensor:
            if not math.isfinite(self.largest[place]):
                raise Broken(failed(f"the model's logits {fault(self.largest[place])}"))
            if not math.isfinite(faults[place]):
                raise Broken(failed(f"after the filters the logits {fault(faults[place])}"))
            own = own_filtered(filtered[place], way, self.history(place)) if way.own_filters else filtered[place]
            if isinstance(own, Choice):
                raise Broken(own)
            return own

        choices: list[Choice] = []
        try:
            if token is not None and not way.own_filters:
                return [noted(token, scores[0], left(0), way.request.sampling)]
            if len(self.draft) and isinstance(way.sampler, Draw) and rejection:
                self._judged(scores, left, choices)
                return choices
            for place in range(len(self.rows)):
                choices.append(choose_own(scores[place], left(place), way, self.uniform(place)))
                if place < len(self.draft) and choices[-1].token_id != self.draft.token_ids[place]:
                    break
        except Broken as broken:
            choices.append(broken.choice)
        return choices

    def _judged(self, scores: Tensor, left: Callable[[int], Tensor], choices: list[Choice]) -> None:
        """Append the accepted draft tokens and the one after them."""
        rows: dict[int, Tensor] = {}

        def take(place: int, token: int) -> None:
            choices.append(noted(token, scores[place], rows[place], self.way.request.sampling))

        def target(place: int) -> Tensor:
            if place:  # it is requested only after the token before it was accepted
                take(place - 1, self.draft.token_ids[place - 1])
            rows[place] = left(place)
            return rows[place].double().softmax(-1)

        uniforms = [self.uniform(place, ACCEPT) for place in range(len(self.draft))]
        standing, weights = judge(self.draft, target, uniforms)
        take(standing, drawn(weights[None], [self.uniform(standing)])[0])


class Broken(Exception):
    """A row from which no token can be sampled."""

    def __init__(self, choice: Choice):
        super().__init__(choice.error)
        self.choice = choice
