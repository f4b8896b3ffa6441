"""From a step's logits to one choice a sequence. What a row becomes never depends on the rows beside it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from workbench.errors import WorkbenchError
from workbench.request import Sequence
from workbench.sampling.admitted import Admitted, admit, choose_own
from workbench.sampling.choice import Choice, failed, fault, noted, told
from workbench.sampling.filters import History
from workbench.sampling.samplers import uniform


@dataclass
class Chooser:
    """Chooses tokens for many requests and keeps, for each, its filters and its own sampler's state.

    Owned by one runner. `vocab` lets `admit` refuse a bias on a token that does not exist.
    """

    vocab: int | None = None
    _admitted: dict[str, Admitted] = field(default_factory=dict, repr=False)

    def admit(self, sequence: Sequence) -> None:
        """Build what the request needs. Errors: WorkbenchError for a part or a bias that cannot work."""
        self._of(sequence)

    def forget(self, request_id: str) -> None:
        """The request has ended: drop what was kept for it."""
        self._admitted.pop(request_id, None)

    @torch.no_grad()
    def choose(self, logits: Tensor, sequences: list[Sequence]) -> list[Choice]:
        """One choice for each row of `logits` `[sample, vocab]`, in order; a broken row breaks alone.

        Rows whose requests filter alike are filtered together, by operations that treat every row for itself.
        """
        if len(logits) != len(sequences):
            raise ValueError(f"{len(logits)} rows of logits for {len(sequences)} sequences")
        scores = logits.float()
        largest, tokens = _largest(scores) if sequences else ([], [])
        choices: dict[int, Choice] = {}
        groups: dict[tuple, list[int]] = {}
        for row, sequence in enumerate(sequences):
            if not math.isfinite(largest[row]):
                choices[row] = failed(f"the model's logits {fault(largest[row])}")
                continue
            try:
                way = self._of(sequence)
            except WorkbenchError as error:
                choices[row] = failed(str(error))
                continue
            if way.plain:
                choices[row] = Choice(tokens[row])
            else:
                groups.setdefault((way.filters, way.sampler), []).append(row)
        for rows in groups.values():
            choices.update(self._choose_alike(scores, sequences, rows))
        return [choices[row] for row in range(len(sequences))]

    def _choose_alike(self, scores: Tensor, sequences: list[Sequence], rows: list[int]) -> dict[int, Choice]:
        """Choices for rows that share filters and sampler; if together they fail, each is tried alone."""
        ways = [self._of(sequences[row]) for row in rows]
        histories = [History(sequences[row].request.prompt_ids, sequences[row].output_ids) for row in rows]
        uniforms = [_uniform(sequences[row]) for row in rows]
        try:
            filtered = scores[rows]
            for rule in ways[0].filters:
                filtered = rule(filtered, histories)
            faults = filtered.amax(-1).tolist()
            sampler = ways[0].sampler
            tokens = [-1] * len(rows) if sampler is None else sampler.choose_rows(filtered, uniforms)
        except Exception as error:
            if len(rows) == 1:
                return {rows[0]: failed(told("sampling", error))}
            return {k: v for row in rows for k, v in self._choose_alike(scores, sequences, [row]).items()}
        choices = {}
        for i, (row, way) in enumerate(zip(rows, ways, strict=True)):
            if not math.isfinite(faults[i]):
                choices[row] = failed(f"after the filters the logits {fault(faults[i])}")
            elif way.own_filters or way.own_sampler:
                choices[row] = choose_own(scores[row], filtered[i], way, histories[i], uniforms[i])
            else:
                choices[row] = noted(tokens[i], scores[row], filtered[i], way.request.sampling)
        return choices

    def _of(self, sequence: Sequence) -> Admitted:
        known = self._admitted.get(sequence.request_id)
        if known is None or known.request is not sequence.request:
            known = self._admitted[sequence.request_id] = admit(sequence.request, self.vocab)
        return known


def _largest(scores: Tensor) -> tuple[list[float], list[int]]:
    """Each row's largest value (NaN where the row has one) and the first token that has it."""
    if scores.device.type == "cpu" and not scores.requires_grad:
        rows = scores.numpy()  # numpy's argmax uses vectors, torch's does not: 10 against 100 us for 49,152
        tokens = rows.argmax(-1)
        return rows[range(len(rows)), tokens].tolist(), tokens.tolist()
    values, tokens = scores.max(-1)
    return values.tolist(), tokens.tolist()


def _uniform(sequence: Sequence) -> float:
    return uniform(sequence.request.sampling.seed, len(sequence.token_ids) - sequence.prompt_length)
