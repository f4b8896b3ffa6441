"""From a step's logits to tokens for each sequence. What a row becomes never depends on the rows beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from workbench.errors import WorkbenchError
from workbench.request import Sequence
from workbench.sampling.admitted import Admitted, admit, choose_own, own_filtered
from workbench.sampling.choice import Choice, failed, fault, noted, told
from workbench.sampling.filters import History
from workbench.sampling.samplers import Draw, drawn, uniform
from workbench.sampling.verify import ACCEPT, NO_DRAFT, Draft, judge


@dataclass
class Chooser:
    """Chooses tokens for many requests and keeps, for each, its filters and its own sampler's state.

    Owned by one runner. `vocab` lets `admit` refuse a bias on a token that does not exist. Drafted tokens stand by
    `accept`: by `rejection` as often as any rule can let them whose output has the target's distribution, where the
    sampler is a plain draw; by `match` where they are the very tokens that would have been chosen without a draft.
    """

    vocab: int | None = None
    accept: Literal["rejection", "match"] = "rejection"
    _admitted: dict[str, Admitted] = field(default_factory=dict, repr=False)

    def admit(self, sequence: Sequence) -> None:
        """Build what the request needs. Errors: WorkbenchError for a part or a bias that cannot work."""
        self.of(sequence)

    def forget(self, request_id: str) -> None:
        """The request has ended: drop what was kept for it."""
        self._admitted.pop(request_id, None)

    def choose(self, logits: Tensor, sequences: list[Sequence]) -> list[Choice]:
        """One choice for each row of `logits` [sample, vocab], in order; a broken row breaks alone."""
        return [choices[0] for choices in self.verify(logits, sequences, [NO_DRAFT] * len(sequences))]

    @torch.no_grad()
    def verify(self, logits: Tensor, sequences: list[Sequence], drafts: Many[Draft]) -> list[list[Choice]]:
        """For each sequence the drafted tokens that stand, and one that follows them; the last may be a failure.

        `logits` [sample, vocab] has for each sequence, in order, a row for what comes next and one after each token
        of its draft. Rows whose requests filter alike are filtered together, by operations that treat every row for
        itself.
        """
        wanted = sum(1 + len(draft) for draft in drafts)
        if len(logits) != wanted or len(sequences) != len(drafts):
            raise ValueError(f"{len(logits)} rows of logits for {len(sequences)} sequences with {wanted} to choose")
        scores = logits.float()
        largest, tokens = _largest(scores) if sequences else ([], [])
        chosen: dict[int, list[Choice]] = {}
        groups: dict[tuple, list[_Asked]] = {}
        row = 0
        for number, (sequence, draft) in enumerate(zip(sequences, drafts, strict=True)):
            rows, row = range(row, row + 1 + len(draft)), row + 1 + len(draft)
            try:
                way = self.of(sequence)
            except WorkbenchError as error:
                chosen[number] = [failed(str(error))]
                continue
            if not math.isfinite(largest[rows.start]):
                chosen[number] = [failed(f"the model's logits {fault(largest[rows.start])}")]
            elif way.plain:
                chosen[number] = _greedy(draft, rows, largest, tokens)
            else:
                asked = _Asked(number, rows, sequence, draft, way, [largest[row] for row in rows])
                groups.setdefault((way.filters, way.sampler), []).append(asked)
        for together in groups.values():
            chosen.update(self._choose_alike(scores, together))
        return [chosen[number] for number in range(len(sequences))]

    def _choose_alike(self, scores: Tensor, together: list[_Asked]) -> dict[int, list[Choice]]:
        """Choices for sequences that share filters and sampler; if together they fail, each is tried alone."""
        rows = [row for asked in together for row in asked.rows]
        sampler = together[0].way.sampler
        try:
            filtered = scores[rows]
            histories = [history for asked in together for history in asked.histories]
            for rule in together[0].way.filters:
                filtered = rule(filtered, histories)
            faults = filtered.amax(-1).tolist()
            tokens = {}
            if sampler is not None and (alone := [asked for asked in together if not len(asked.draft)]):
                place = {row: i for i, row in enumerate(rows)}
                mine = filtered if len(alone) == len(rows) else filtered[[place[asked.rows.start] for asked in alone]]
                found = sampler.choose_rows(mine, [asked.uniform(0) for asked in alone])
                tokens = {asked.number: token for asked, token in zip(alone, found, strict=True)}
        except Exception as error:
            if len(together) == 1:
                return {together[0].number: [failed(told("sampling", error))]}
            return {k: v for asked in together for k, v in self._choose_alike(scores, [asked]).items()}
        chosen, row = {}, 0
        for asked in together:
            count = len(asked.rows)
            known = scores[asked.rows.start : asked.rows.stop], filtered[row : row + count], faults[row : row + count]
            chosen[asked.number] = self._chosen(asked, *known, tokens.get(asked.number))
            row += count
        return chosen

    def _chosen(
        self, asked: _Asked, scores: Tensor, filtered: Tensor, faults: list[float], token: int | None
    ) -> list[Choice]:
        """Of one sequence, from its rows; `token` is what the sampler made of a lone row."""
        way = asked.way

        def left(place: int) -> Tensor:
            if not math.isfinite(asked.largest[place]):
                raise _Broken(failed(f"the model's logits {fault(asked.largest[place])}"))
            if not math.isfinite(faults[place]):
                raise _Broken(failed(f"after the filters the logits {fault(faults[place])}"))
            own = own_filtered(filtered[place], way, asked.history(place)) if way.own_filters else filtered[place]
            if isinstance(own, Choice):
                raise _Broken(own)
            return own

        choices: list[Choice] = []
        try:
            if token is not None and not way.own_filters:
                return [noted(token, scores[0], left(0), way.request.sampling)]
            if len(asked.draft) and isinstance(way.sampler, Draw) and self.accept == "rejection":
                self._judged(asked, scores, left, choices)
                return choices
            for place in range(len(asked.rows)):
                choices.append(choose_own(scores[place], left(place), way, asked.uniform(place)))
                if place < len(asked.draft) and choices[-1].token_id != asked.draft.token_ids[place]:
                    break
        except _Broken as broken:
            choices.append(broken.choice)
        return choices

    def _judged(self, asked: _Asked, scores: Tensor, left, choices: list[Choice]) -> None:
        """Append the drafted tokens that stand and the one after them."""
        rows: dict[int, Tensor] = {}

        def target(place: int) -> Tensor:
            if place:  # it is asked for: the token before it stands
                before = place - 1
                token = asked.draft.token_ids[before]
                choices.append(noted(token, scores[before], rows[before], asked.way.request.sampling))
            rows[place] = left(place)
            return rows[place].double().softmax(-1)

        uniforms = [asked.uniform(place, ACCEPT) for place in range(len(asked.draft))]
        standing, weights = judge(asked.draft, target, uniforms)
        token = drawn(weights[None], [asked.uniform(standing)])[0]
        choices.append(noted(token, scores[standing], rows[standing], asked.way.request.sampling))

    def of(self, sequence: Sequence) -> Admitted:
        """How a request chooses."""
        known = self._admitted.get(sequence.request_id)
        if known is None or known.request is not sequence.request:
            known = self._admitted[sequence.request_id] = admit(sequence.request, self.vocab)
        return known


@dataclass(frozen=True)
class _Asked:
    """A sequence that is to have tokens, and its rows: for what comes next, and after each token of its draft."""

    number: int
    rows: range
    sequence: Sequence
    draft: Draft
    way: Admitted
    largest: list[float]

    def history(self, place: int) -> History:
        known = self.sequence
        return History(known.request.prompt_ids, [*known.output_ids, *self.draft.token_ids[:place]])

    @property
    def histories(self) -> list[History]:
        return [self.history(place) for place in range(len(self.rows))]

    def uniform(self, place: int, use: bytes = b"") -> float:
        known = self.sequence
        return uniform(known.request.sampling.seed, len(known.token_ids) - known.prompt_length + place, use)


class _Broken(Exception):
    def __init__(self, choice: Choice):
        super().__init__(choice.error)
        self.choice = choice


def _greedy(draft: Draft, rows: range, largest: list[float], tokens: list[int]) -> list[Choice]:
    """The rows' largest tokens, as long as they are those drafted."""
    choices = []
    for place, row in enumerate(rows):
        if not math.isfinite(largest[row]):
            return [*choices, failed(f"the model's logits {fault(largest[row])}")]
        choices.append(Choice(tokens[row]))
        if place < len(draft) and tokens[row] != draft.token_ids[place]:
            break
    return choices


def _largest(scores: Tensor) -> tuple[list[float], list[int]]:
    """Each row's largest value (NaN where the row has one) and the first token that has it."""
    if scores.device.type == "cpu" and not scores.requires_grad:
        rows = scores.numpy()  # numpy's argmax uses vectors, torch's does not: 10 against 100 us for 49,152
        tokens = rows.argmax(-1)
        return rows[range(len(rows)), tokens].tolist(), tokens.tolist()
    values, tokens = scores.max(-1)
    return values.tolist(), tokens.tolist()
