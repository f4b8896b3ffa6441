"""One sequence that is to have tokens: its rows of a step's logits, and what is chosen from them."""

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
    """`rows` are those for what comes next and after each token of the draft, `largest` the largest logit of each."""

    number: int
    rows: range
    sequence: Sequence
    draft: Draft
    way: Admitted
    largest: list[float]

    @property
    def histories(self) -> list[History]:
        """What came before each row's token, drafted tokens included."""
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
        """The drafted tokens that stand and one that follows them; the last may be a failure. `scores` and `filtered`
        are its rows before and after the filters, `faults` the largest of the latter, `token` what the sampler made of
        a lone row; drafted tokens stand by `rejection` where the sampler is a plain draw, otherwise by match."""
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
        """Append the drafted tokens that stand and the one after them."""
        rows: dict[int, Tensor] = {}

        def take(place: int, token: int) -> None:
            choices.append(noted(token, scores[place], rows[place], self.way.request.sampling))

        def target(place: int) -> Tensor:
            if place:  # it is asked for: the token before it stands
                take(place - 1, self.draft.token_ids[place - 1])
            rows[place] = left(place)
            return rows[place].double().softmax(-1)

        uniforms = [self.uniform(place, ACCEPT) for place in range(len(self.draft))]
        standing, weights = judge(self.draft, target, uniforms)
        take(standing, drawn(weights[None], [self.uniform(standing)])[0])


class Broken(Exception):
    """A row from which nothing can be chosen."""

    def __init__(self, choice: Choice):
        super().__init__(choice.error)
        self.choice = choice
