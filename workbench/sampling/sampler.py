"""Sample tokens for each sequence from a step's logits, with log-probabilities. A row's token never depends on other
rows.

    logits  ->  PendingRows (a sequence's rows)  ->  SamplingState (filters, sampler)  ->  SampledToken, or a failure
    rows of a request whose filters combine other logits are combined with these first
    rows of a constrained request lose their forbidden tokens before that, and its constraint takes the token after it
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workbench.constrained.closing import NodeBudget
from workbench.constrained.constraint import Constraint
from workbench.constrained.masks import MAX_NODES_OF_SAMPLING, MaskWorker
from workbench.errors import WorkbenchError, describe_error
from workbench.request import Sequence
from workbench.sampling.combiners import NO_OTHERS, NamedCombiner, OtherLogits
from workbench.sampling.rows import PendingRows, Take, follow
from workbench.sampling.samplers import (
    SampledToken,
    describe_bad_logits,
    describe_failure,
    failed_token,
    with_logprobs,
)
from workbench.sampling.sampling_state import SamplingState, build_sampling_state
from workbench.sampling.verify import NO_DRAFT, Draft


@dataclass
class Sampler:
    """The sampler of a runner: it samples tokens for many requests, and has each request's filters and sampler state.

    A runner owns one. `vocab_size` lets `add` refuse a bias on a token that does not exist. `acceptance_rule` is the
    acceptance rule of draft tokens. `rejection` has the highest acceptance rate of all rules that keep the target's
    distribution; it needs the plain random sampler. `match` accepts the tokens that would have been sampled without a
    draft.
    """

    vocab_size: int | None = None
    acceptance_rule: Literal["rejection", "match"] = "rejection"
    masks: MaskWorker = field(default_factory=MaskWorker, repr=False)
    constraint_seconds: float = 0.0  # CPU time that constraints used in the last call
    _states: dict[str, SamplingState] = field(default_factory=dict, repr=False)

    def add(self, sequence: Sequence, constraint: Constraint | None = None) -> None:
        """Build the sampling state of a request. Raises WorkbenchError for an invalid component or bias."""
        state = build_sampling_state(sequence.request, self.vocab_size)
        self._states[sequence.request_id] = replace(state, constraint=constraint)

    def constrain(self, sequence: Sequence, constraint: Constraint | None) -> None:
        """Constrain the tokens of a request that was added by `constraint`; None removes it."""
        self._states[sequence.request_id].constraint = constraint

    def constraint_of(self, request_id: str) -> Constraint | None:
        """Return the constraint of a request, if it has one."""
        state = self._states.get(request_id)
        return None if state is None else state.constraint

    def combiners_of(self, request_id: str) -> tuple[NamedCombiner, ...]:
        """Return those filters of a request that combine other logits."""
        state = self._states.get(request_id)
        return () if state is None else state.combiners

    def is_plain_greedy(self, sequence: Sequence) -> bool:
        """Return whether every token of this sequence is simply the one with the largest logit of its row."""
        state = self._states.get(sequence.request_id)
        return state is not None and state.is_plain_greedy and state.constraint is None

    def legal_drafts(self, drafts: Mapping[str, Draft]) -> dict[str, Draft]:
        """Cut drafts before the first token forbidden by their request's constraint.

        A draft token with a probability is kept even though it will be rejected: only then its replacement has the
        target's distribution. A tree is reduced to its first branch if rows are masked or combined.
        """
        legal: dict[str, Draft] = {}
        self.masks.wait()
        for name, draft in drafts.items():
            constraint = self.constraint_of(name)
            if constraint is not None or self.combiners_of(name):
                draft = draft.first_branch()
            if constraint is not None:
                draft = draft.truncated(constraint.legal_count(draft.token_ids) + (draft.probabilities is not None))
            if len(draft):
                legal[name] = draft
        return legal

    def start_masks(self, sequences: Iterable[tuple[Sequence, tuple[int, ...]]]) -> None:
        """Start a thread that computes the masks of sequences with these drafts; `verify` waits for it."""
        constrained = [
            (constraint, draft)
            for sequence, draft in sequences
            if (constraint := self.constraint_of(sequence.request_id)) is not None
        ]
        if constrained:
            self.masks.start(constrained)

    def remove(self, request_id: str) -> None:
        """Drop the state of a finished request."""
        self._states.pop(request_id, None)

    def sample(self, logits: Tensor, sequences: list[Sequence]) -> list[SampledToken]:
        """Sample one token from each row of `logits` [sample, vocab], in order; a bad row fails alone."""
        return [choices[0] for choices in self.verify(logits, sequences, [NO_DRAFT] * len(sequences))]

    @torch.no_grad()
    def verify(
        self,
        logits: Tensor,
        sequences: list[Sequence],
        drafts: Many[Draft],
        others: Mapping[str, OtherLogits] = MappingProxyType({}),
    ) -> list[list[SampledToken]]:
        """Return each sequence's accepted draft tokens and one token after them; the last may be a failure.

        A list is empty if a constraint defers the token: its row must be computed again. Rows of requests with equal
        filters are filtered together, by operations that treat every row separately.

        Args:
            logits: [sample, vocab]. Each sequence has, in order, a row for its next token and one per draft token.
            sequences: the sequences.
            drafts: the draft of each sequence.
            others: by request id, the other logits of requests with combiners.
        """
        spans = _spans(drafts)
        if len(logits) != (spans[-1].stop if spans else 0) or len(sequences) != len(drafts):
            raise ValueError(f"{len(logits)} rows of logits for {len(sequences)} sequences with rows {spans}")
        scores = logits.float()
        chosen: dict[int, list[SampledToken]] = {}
        masked = self._combined(scores, sequences, drafts, spans, others, chosen)
        largest, tokens = _largest(masked) if sequences else ([], [])
        constrained = self._constrained(sequences, drafts, chosen)
        if constrained:
            masked = _mask(masked, [(spans[number], banned) for number, banned in constrained.items()])
            model_largest, (largest, tokens) = largest, _largest(masked)
            for number in constrained.keys() - chosen.keys():
                row = spans[number].start
                if not math.isfinite(model_largest[row]):
                    chosen[number] = [failed_token(f"the model's logits {describe_bad_logits(model_largest[row])}")]
                elif largest[row] == -math.inf:
                    chosen[number] = [failed_token("the request's constraint allows no token")]
        self.constraint_seconds = 0.0
        budget = NodeBudget(MAX_NODES_OF_SAMPLING) if constrained else None
        takes: dict[int, Take] = {}
        for number in constrained:
            state, span = self._states[sequences[number].request_id], slice(spans[number].start, spans[number].stop)
            # A prefill is too long to be computed again.
            work = budget if sequences[number].is_decoding else None
            takes[number] = partial(self._take, state, scores[span], masked[span], work)
        groups: dict[tuple, list[PendingRows]] = {}
        for number, (sequence, draft, rows) in enumerate(zip(sequences, drafts, spans, strict=True)):
            if number in chosen:
                continue
            try:
                state = self.state_of(sequence)
            except WorkbenchError as error:
                chosen[number] = [failed_token(str(error))]
                continue
            take = takes.get(number)
            if not math.isfinite(largest[rows.start]):
                chosen[number] = [failed_token(f"the model's logits {describe_bad_logits(largest[rows.start])}")]
            elif state.is_plain_greedy:
                chosen[number] = follow(draft, partial(_greedy, rows, largest, tokens), take)
            else:
                peaks = [largest[row] for row in rows]
                pending = PendingRows(number, rows, sequence, draft, state, peaks, take)
                groups.setdefault((state.filters, state.sampler), []).append(pending)
        for together in groups.values():
            chosen.update(self._sample_group(scores, masked, together))
        return [chosen[number] for number in range(len(sequences))]

    def _take(
        self,
        state: SamplingState,
        scores: Tensor,
        masked: Tensor,
        budget: NodeBudget | None,
        row: int,
        choice: SampledToken,
    ) -> SampledToken | None:
        """Pass a token to the request's constraint; return the output token, or None if it has to wait.

        Args:
            state: the request's sampling state.
            scores: its rows, [row, vocab].
            masked: its rows with forbidden tokens at -inf.
            budget: the work that constraints may do now.
            row: index of the token's row.
            choice: the sampled token.
        """
        assert state.constraint is not None
        began = time.thread_time()
        try:
            token, reason = state.constraint.advance(choice.token_id, budget)
        except Exception as error:
            return failed_token(describe_error(error))
        finally:
            self.constraint_seconds += time.thread_time() - began
        if token is None:
            return None if reason is None else SampledToken(-1, finish_reason=reason)
        if token != choice.token_id:
            choice = with_logprobs(token, scores[row], masked[row], state.request.sampling)
        return choice if reason is None else replace(choice, finish_reason=reason)

    def _combined(
        self,
        scores: Tensor,
        sequences: list[Sequence],
        drafts: Many[Draft],
        spans: list[range],
        others: Mapping[str, OtherLogits],
        failed: dict[int, list[SampledToken]],
    ) -> Tensor:
        """Return the rows [row, vocab] after combiners; add sequences with a failing combiner to `failed`."""
        combined = scores
        for number, (sequence, draft, rows) in enumerate(zip(sequences, drafts, spans, strict=True)):
            row = scores[rows.start : rows.stop]
            try:
                state = self.state_of(sequence)
                if not state.combiners:
                    continue
                histories = PendingRows(number, rows, sequence, draft, state, []).histories
                for combiner in state.combiners:
                    row = combiner.rows(row, histories, others.get(sequence.request_id, NO_OTHERS))
            except WorkbenchError as error:
                failed[number] = [failed_token(str(error))]
                continue
            combined = combined.clone() if combined is scores else combined
            combined[rows.start : rows.stop] = row
        return combined

    def _constrained(
        self, sequences: list[Sequence], drafts: Many[Draft], failed: dict[int, list[SampledToken]]
    ) -> dict[int, NDArray[np.bool_]]:
        """Return the masks [row, vocab] of constrained sequences; add sequences with a failed mask to `failed`."""
        masks: dict[int, NDArray[np.bool_]] = {}
        constraints = [self.constraint_of(sequence.request_id) for sequence in sequences]
        if all(each is None for each in constraints):
            return masks
        for number, (constraint, draft) in enumerate(zip(constraints, drafts, strict=True)):
            if constraint is None:
                continue
            banned = self.masks.take(constraint, draft.token_ids)
            if isinstance(banned, str):
                failed[number] = [failed_token(banned)]
            else:
                masks[number] = banned
        self.masks.clear()
        return masks

    def _sample_group(self, scores: Tensor, masked: Tensor, group: list[PendingRows]) -> dict[int, list[SampledToken]]:
        """Sample for sequences with the same filters and sampler; if the batch fails, sample each sequence alone."""
        rows = [row for pending in group for row in pending.rows]
        sampler = group[0].sampling_state.sampler
        try:
            filtered = _rows_of(masked, rows)
            histories = [history for pending in group for history in pending.histories]
            for rule in group[0].sampling_state.filters:
                filtered = rule(filtered, histories)
            faults = filtered.amax(-1).tolist()
            tokens = {}
            if sampler is not None and (alone := [pending for pending in group if not len(pending.draft.token_ids)]):
                place = {row: i for i, row in enumerate(rows)}
                places = [place[pending.rows.start] for pending in alone]
                lone = filtered if len(alone) == len(rows) else _rows_of(filtered, places)
                drawn = sampler.choose_rows(lone, [pending.uniform(0) for pending in alone])
                tokens = {pending.index: token for pending, token in zip(alone, drawn, strict=True)}
        except Exception as error:
            if len(group) == 1:
                return {group[0].index: [failed_token(describe_failure("sampling", error))]}
            return {k: v for pending in group for k, v in self._sample_group(scores, masked, [pending]).items()}
        chosen, row = {}, 0
        for pending in group:
            stop = row + len(pending.rows)
            values = scores[pending.rows.start : pending.rows.stop], filtered[row:stop], faults[row:stop]
            token, rejection = tokens.get(pending.index), self.acceptance_rule == "rejection"
            chosen[pending.index] = pending.sample(*values, token, rejection)
            row = stop
        return chosen

    def state_of(self, sequence: Sequence) -> SamplingState:
        """Return the sampling state of a request."""
        state = self._states.get(sequence.request_id)
        if state is None or state.request is not sequence.request:
            sampling = sequence.request.sampling
            for setting in ("response_format", "constraint", "thinking"):
                if getattr(sampling, setting) is not None:
                    raise WorkbenchError(
                        f"request {sequence.request_id}: {setting}: add the request with its constraint"
                    )
            state = self._states[sequence.request_id] = build_sampling_state(sequence.request, self.vocab_size)
        return state


def _spans(drafts: Many[Draft]) -> list[range]:
    """Return the range of rows of each sequence: one row for its next token, and one per draft token."""
    spans, row = [], 0
    for draft in drafts:
        spans.append(range(row, row := row + 1 + len(draft.token_ids)))
    return spans


def _mask(scores: Tensor, masks: list[tuple[range, NDArray[np.bool_]]]) -> Tensor:
    """Return a copy of `scores` [row, vocab] with -inf at the forbidden tokens of these rows."""
    rows = [row for span, _ in masks for row in span]
    banned = torch.from_numpy(np.concatenate([mask for _, mask in masks])).to(scores.device)
    if len(rows) == len(scores):
        return scores.masked_fill(banned, -torch.inf)
    index = torch.tensor(rows, device=scores.device)
    return scores.index_copy(0, index, scores.index_select(0, index).masked_fill_(banned, -torch.inf))


def _rows_of(scores: Tensor, rows: list[int]) -> Tensor:
    """Return a copy of these rows. torch's `scores[rows]` (2.13) wakes all threads even for a single row, and waits for
    them.
    """
    return scores.index_select(0, torch.tensor(rows, device=scores.device))


def _greedy(rows: range, largest: list[float], tokens: list[int], place: int) -> SampledToken:
    """Return the token with the largest logit in one of a sequence's rows."""
    row = rows.start + place
    if not math.isfinite(largest[row]):
        return failed_token(f"the model's logits {describe_bad_logits(largest[row])}")
    return SampledToken(tokens[row])


def _largest(scores: Tensor) -> tuple[list[float], list[int]]:
    """Return each row's largest value (NaN if the row has one) and the first token that has it."""
    if scores.device.type == "cpu" and not scores.requires_grad:
        rows = scores.numpy()  # numpy's argmax is vectorized, torch's is not: 10 against 100 us for 49,152 logits
        tokens = rows.argmax(-1)
        return rows[range(len(rows)), tokens].tolist(), tokens.tolist()
    values, tokens = scores.max(-1)
    return values.tolist(), tokens.tolist()
