"""Sample tokens for each sequence from a step's logits. A row's token never depends on the rows beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from workbench.errors import WorkbenchError
from workbench.request import Sequence
from workbench.sampling.admitted import SamplingState, build_sampling_state
from workbench.sampling.asked import PendingRows
from workbench.sampling.choice import SampledToken, failed_token, describe_bad_logits, describe_failure
from workbench.sampling.verify import NO_DRAFT, Draft


@dataclass
class Sampler:
    """Sample tokens for many requests, and keep each one's filters and sampler state.

    A runner owns one. `vocab_size` lets `add` refuse a bias on a token that does not exist. `acceptance_rule` is the
    acceptance rule of draft tokens. `rejection` accepts as often as any rule that keeps the target's distribution, if
    the sampler is a plain random one. `match` accepts the tokens that would have been sampled without a draft.
    """

    vocab_size: int | None = None
    acceptance_rule: Literal["rejection", "match"] = "rejection"
    _states: dict[str, SamplingState] = field(default_factory=dict, repr=False)

    def add(self, sequence: Sequence) -> None:
        """Build the sampling state of a request; WorkbenchError for a component or a bias that cannot work."""
        self.state_of(sequence)

    def remove(self, request_id: str) -> None:
        """Drop the state of a finished request."""
        self._states.pop(request_id, None)

    def sample(self, logits: Tensor, sequences: list[Sequence]) -> list[SampledToken]:
        """Sample one token from each row of `logits` [sample, vocab], in order; a bad row fails alone."""
        return [choices[0] for choices in self.verify(logits, sequences, [NO_DRAFT] * len(sequences))]

    @torch.no_grad()
    def verify(self, logits: Tensor, sequences: list[Sequence], drafts: Many[Draft]) -> list[list[SampledToken]]:
        """Return each sequence's accepted draft tokens and one token after them; the last may be a failure.

        Rows whose requests have equal filters are filtered together, by operations that treat every row by itself.

        Args:
            logits: [sample, vocab]. Each sequence has, in order, a row for its next token and one per draft token.
            sequences: the sequences.
            drafts: the draft of each sequence.
        """
        wanted = sum(1 + len(draft) for draft in drafts)
        if len(logits) != wanted or len(sequences) != len(drafts):
            raise ValueError(f"{len(logits)} rows of logits for {len(sequences)} sequences with {wanted} to choose")
        scores = logits.float()
        largest, tokens = _largest(scores) if sequences else ([], [])
        chosen: dict[int, list[SampledToken]] = {}
        groups: dict[tuple, list[PendingRows]] = {}
        row = 0
        for number, (sequence, draft) in enumerate(zip(sequences, drafts, strict=True)):
            rows, row = range(row, row + 1 + len(draft)), row + 1 + len(draft)
            try:
                sampling_state = self.state_of(sequence)
            except WorkbenchError as error:
                chosen[number] = [failed_token(str(error))]
                continue
            if not math.isfinite(largest[rows.start]):
                chosen[number] = [failed_token(f"the model's logits {describe_bad_logits(largest[rows.start])}")]
            elif sampling_state.is_plain_greedy:
                chosen[number] = _greedy(draft, rows, largest, tokens)
            else:
                asked = PendingRows(number, rows, sequence, draft, sampling_state, [largest[row] for row in rows])
                groups.setdefault((sampling_state.filters, sampling_state.sampler), []).append(asked)
        for together in groups.values():
            chosen.update(self._sample_group(scores, together))
        return [chosen[number] for number in range(len(sequences))]

    def _sample_group(self, scores: Tensor, together: list[PendingRows]) -> dict[int, list[SampledToken]]:
        """Sample for sequences that share filters and sampler; if that fails together, each is tried alone."""
        rows = [row for asked in together for row in asked.rows]
        sampler = together[0].sampling_state.sampler
        try:
            filtered = _rows_of(scores, rows)
            histories = [history for asked in together for history in asked.histories]
            for rule in together[0].sampling_state.filters:
                filtered = rule(filtered, histories)
            faults = filtered.amax(-1).tolist()
            tokens = {}
            if sampler is not None and (alone := [asked for asked in together if not len(asked.draft)]):
                place = {row: i for i, row in enumerate(rows)}
                wanted = [place[asked.rows.start] for asked in alone]
                mine = filtered if len(alone) == len(rows) else _rows_of(filtered, wanted)
                found = sampler.choose_rows(mine, [asked.uniform(0) for asked in alone])
                tokens = {asked.index: token for asked, token in zip(alone, found, strict=True)}
        except Exception as error:
            if len(together) == 1:
                return {together[0].index: [failed_token(describe_failure("sampling", error))]}
            return {k: v for asked in together for k, v in self._sample_group(scores, [asked]).items()}
        chosen, row = {}, 0
        for asked in together:
            count = len(asked.rows)
            known = scores[asked.rows.start : asked.rows.stop], filtered[row : row + count], faults[row : row + count]
            chosen[asked.index] = asked.sample(*known, tokens.get(asked.index), self.acceptance_rule == "rejection")
            row += count
        return chosen

    def state_of(self, sequence: Sequence) -> SamplingState:
        """Return the sampling state of a request."""
        known = self._states.get(sequence.request_id)
        if known is None or known.request is not sequence.request:
            known = self._states[sequence.request_id] = build_sampling_state(sequence.request, self.vocab_size)
        return known


def _rows_of(scores: Tensor, rows: list[int]) -> Tensor:
    """A copy of these rows. torch's `scores[rows]` wakes all threads for a single row (2.13), and waits for them."""
    return scores.index_select(0, torch.tensor(rows, device=scores.device))


def _greedy(draft: Draft, rows: range, largest: list[float], tokens: list[int]) -> list[SampledToken]:
    """Return the rows' largest tokens, as long as they equal the draft tokens."""
    choices = []
    for place, row in enumerate(rows):
        if not math.isfinite(largest[row]):
            return [*choices, failed_token(f"the model's logits {describe_bad_logits(largest[row])}")]
        choices.append(SampledToken(tokens[row]))
        if place < len(draft) and tokens[row] != draft.token_ids[place]:
            break
    return choices


def _largest(scores: Tensor) -> tuple[list[float], list[int]]:
    """Return each row's largest value (NaN if the row has one) and the first token that has it."""
    if scores.device.type == "cpu" and not scores.requires_grad:
        rows = scores.numpy()  # numpy's argmax uses vectors, torch's does not: 10 against 100 us for 49,152
        tokens = rows.argmax(-1)
        return rows[range(len(rows)), tokens].tolist(), tokens.tolist()
    values, tokens = scores.max(-1)
    return values.tolist(), tokens.tolist()
