"""Sample tokens for each sequence from a step's logits, with log-probabilities. A row's token never depends on the rows
beside it.

    logits  ->  PendingRows (a sequence's rows)  ->  SamplingState (filters, sampler)  ->  SampledToken, or a failure
    rows of a request whose filters combine other logits are combined with these first
    rows of a request with a grammar or a thought lose their forbidden tokens before that, and its constraint takes the
    token after it
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
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
from workbench.sampling.filters import History
from workbench.sampling.samplers import (
    RandomSampler,
    SampledToken,
    describe_bad_logits,
    describe_failure,
    failed_token,
    sample_categorical,
    uniform,
    with_logprobs,
)
from workbench.sampling.sampling_state import SamplingState, apply_custom_filters, build_sampling_state, sample_row
from workbench.sampling.verify import ACCEPT_STREAM, NO_DRAFT, Draft, rejection_sample


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
    take: Take | None = None  # of a constrained request

    @property
    def histories(self) -> list[History]:
        """Return the tokens before each row's token, draft tokens included."""
        return [self.history(place) for place in range(len(self.rows))]

    def history(self, place: int) -> History:
        known = self.sequence
        return History(known.request.prompt_ids, [*known.output_ids, *self.draft.before(place)])

    def uniform(self, place: int, use: bytes = b"") -> float:
        known, ahead = self.sequence, place if self.draft.parents is None else len(self.draft.before(place))
        return uniform(known.request.sampling.seed, len(known.token_ids) - known.prompt_length + ahead, use)

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
            own = (
                apply_custom_filters(filtered[place], sampling_state, self.history(place))
                if sampling_state.custom_filters
                else filtered[place]
            )
            if isinstance(own, SampledToken):
                raise BadRow(own)
            return own

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
            if place:  # it is requested only after the token before it was accepted
                take(place - 1, self.draft.token_ids[place - 1])
            rows[place] = left(place)
            return rows[place].double().softmax(-1)

        uniforms = [self.uniform(place, ACCEPT_STREAM) for place in range(len(self.draft.token_ids))]
        standing, weights = rejection_sample(self.draft, target, uniforms)
        take(standing, sample_categorical(weights[None], [self.uniform(standing)])[0])


Take = Callable[[int, SampledToken], SampledToken | None]  # of a row: the token to take, or None where it has to wait


def follow(draft: Draft, sample: Callable[[int], SampledToken | None], take: Take | None) -> list[SampledToken]:
    """Return the tokens of rows along a draft, up to the first that is not drafted, or fails, waits or is the last.

    Args:
        draft: the draft.
        sample: returns the token sampled from a row; None where there is none.
        take: what takes the sampled tokens, if anything does.
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
    """A row from which no token can be sampled."""

    def __init__(self, choice: SampledToken):
        super().__init__(choice.error)
        self.choice = choice


@dataclass
class Sampler:
    """Sample tokens for many requests, and keep each one's filters and sampler state.

    A runner owns one. `vocab_size` lets `add` refuse a bias on a token that does not exist. `acceptance_rule` is the
    acceptance rule of draft tokens. `rejection` accepts as often as any rule that keeps the target's distribution, if
    the sampler is a plain random one. `match` accepts the tokens that would have been sampled without a draft.
    """

    vocab_size: int | None = None
    acceptance_rule: Literal["rejection", "match"] = "rejection"
    masks: MaskWorker = field(default_factory=MaskWorker, repr=False)
    constraint_seconds: float = 0.0  # processor time of the last call in which constraints took their tokens
    _states: dict[str, SamplingState] = field(default_factory=dict, repr=False)

    def add(self, sequence: Sequence, constraint: Constraint | None = None) -> None:
        """Build the sampling state of a request; WorkbenchError for a component or a bias that cannot work."""
        state = build_sampling_state(sequence.request, self.vocab_size)
        self._states[sequence.request_id] = replace(state, constraint=constraint)

    def constrain(self, sequence: Sequence, constraint: Constraint | None) -> None:
        """Let `constraint` take the tokens of a request that was added."""
        self._states[sequence.request_id].constraint = constraint

    def constraint_of(self, request_id: str) -> Constraint | None:
        """Return the constraint of a request, if it has one."""
        known = self._states.get(request_id)
        return None if known is None else known.constraint

    def combiners_of(self, request_id: str) -> tuple[NamedCombiner, ...]:
        """Return the filters of a request that combine other logits."""
        known = self._states.get(request_id)
        return () if known is None else known.combiners

    def is_plain_greedy(self, sequence: Sequence) -> bool:
        """Return whether the largest logit of each row is all that this sequence's tokens hang on."""
        known = self._states.get(sequence.request_id)
        return known is not None and known.is_plain_greedy and known.constraint is None

    def legal_drafts(self, drafts: Mapping[str, Draft]) -> dict[str, Draft]:
        """Cut drafts before the first token that their requests' constraints forbid.

        A drafted token with a probability is kept, though it will be rejected: only then is the token in its place
        sampled from the target's distribution. Where rows are masked or combined as a chain, a tree gives its first
        branch.
        """
        legal: dict[str, Draft] = {}
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
        """Start on the masks of sequences with these drafts, in a thread; `verify` waits for them."""
        wanted = [
            (constraint, draft)
            for sequence, draft in sequences
            if (constraint := self.constraint_of(sequence.request_id)) is not None
        ]
        if wanted:
            self.masks.start(wanted)

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

        A list is empty where a constraint lets the token wait: its row is to be computed once more.
        Rows whose requests have equal filters are filtered together, by operations that treat every row by itself.

        Args:
            logits: [sample, vocab]. Each sequence has, in order, a row for its next token and one per draft token.
            sequences: the sequences.
            drafts: the draft of each sequence.
            others: by request id, the other logits of requests whose filters combine them.
        """
        wanted = sum(1 + len(draft.token_ids) for draft in drafts)
        if len(logits) != wanted or len(sequences) != len(drafts):
            raise ValueError(f"{len(logits)} rows of logits for {len(sequences)} sequences with {wanted} to choose")
        scores = logits.float()
        chosen: dict[int, list[SampledToken]] = {}
        masked = self._combined(scores, sequences, drafts, others, chosen)
        largest, tokens = _largest(masked) if sequences else ([], [])
        constrained = self._constrained(sequences, drafts, chosen)
        if constrained:
            masked = _mask(masked, constrained)
            model_largest, (largest, tokens) = largest, _largest(masked)
            for number, rows, _ in constrained:
                if number not in chosen and not math.isfinite(found := model_largest[rows.start]):
                    chosen[number] = [failed_token(f"the model's logits {describe_bad_logits(found)}")]
                elif number not in chosen and largest[rows.start] == -math.inf:
                    chosen[number] = [failed_token("the request's constraint leaves no token")]
        self.constraint_seconds = 0.0
        budget = NodeBudget(MAX_NODES_OF_SAMPLING)
        takes: dict[int, Take] = {}
        for number, rows, _ in constrained:
            state, own = self._states[sequences[number].request_id], slice(rows.start, rows.stop)
            # A prefill is too long to be computed again.
            work = budget if sequences[number].is_decoding else None
            takes[number] = partial(self._take, state, scores[own], masked[own], work)
        groups: dict[tuple, list[PendingRows]] = {}
        row = 0
        for number, (sequence, draft) in enumerate(zip(sequences, drafts, strict=True)):
            rows, row = range(row, row + 1 + len(draft.token_ids)), row + 1 + len(draft.token_ids)
            if number in chosen:
                continue
            try:
                sampling_state = self.state_of(sequence)
            except WorkbenchError as error:
                chosen[number] = [failed_token(str(error))]
                continue
            take = takes.get(number)
            if not math.isfinite(largest[rows.start]):
                chosen[number] = [failed_token(f"the model's logits {describe_bad_logits(largest[rows.start])}")]
            elif sampling_state.is_plain_greedy:
                chosen[number] = follow(draft, partial(_greedy, rows, largest, tokens), take)
            else:
                peaks = [largest[row] for row in rows]
                asked = PendingRows(number, rows, sequence, draft, sampling_state, peaks, take)
                groups.setdefault((sampling_state.filters, sampling_state.sampler), []).append(asked)
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
        """Let the request's constraint take a token; return the token of the output, or None where it has to wait.

        Args:
            state: the request's sampling state.
            scores: its rows, [row, vocab].
            masked: its rows without forbidden tokens.
            budget: work that constraints may do now.
            row: the row of the token.
            choice: the token.
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
        others: Mapping[str, OtherLogits],
        failed: dict[int, list[SampledToken]],
    ) -> Tensor:
        """Return the rows [row, vocab] with those of combiners combined; add sequences whose combiner fails to
        `failed`."""
        combined, row = scores, 0
        for number, (sequence, draft) in enumerate(zip(sequences, drafts, strict=True)):
            rows, row = range(row, row + 1 + len(draft.token_ids)), row + 1 + len(draft.token_ids)
            found = scores[rows.start : rows.stop]
            try:
                known = self.state_of(sequence)
                if not known.combiners:
                    continue
                mine = PendingRows(number, rows, sequence, draft, known, [])
                for combiner in known.combiners:
                    found = combiner.rows(found, mine.histories, others.get(sequence.request_id, NO_OTHERS))
            except WorkbenchError as error:
                failed[number] = [failed_token(str(error))]
                continue
            combined = combined.clone() if combined is scores else combined
            combined[rows.start : rows.stop] = found
        return combined

    def _constrained(
        self, sequences: list[Sequence], drafts: Many[Draft], failed: dict[int, list[SampledToken]]
    ) -> list[ConstrainedRows]:
        """Return the rows of constrained sequences with their masks; add those whose mask failed to `failed`."""
        found: list[ConstrainedRows] = []
        row = 0
        for number, (sequence, draft) in enumerate(zip(sequences, drafts, strict=True)):
            rows, row = range(row, row + 1 + len(draft.token_ids)), row + 1 + len(draft.token_ids)
            constraint = self.constraint_of(sequence.request_id)
            if constraint is None:
                continue
            banned = self.masks.take(constraint, draft.token_ids)
            if isinstance(banned, str):
                failed[number] = [failed_token(banned)]
            else:
                found.append((number, rows, banned))
        self.masks.clear()
        return found

    def _sample_group(
        self, scores: Tensor, masked: Tensor, together: list[PendingRows]
    ) -> dict[int, list[SampledToken]]:
        """Sample for sequences that share filters and sampler; if that fails together, each is tried alone."""
        rows = [row for asked in together for row in asked.rows]
        sampler = together[0].sampling_state.sampler
        try:
            filtered = _rows_of(masked, rows)
            histories = [history for asked in together for history in asked.histories]
            for rule in together[0].sampling_state.filters:
                filtered = rule(filtered, histories)
            faults = filtered.amax(-1).tolist()
            tokens = {}
            if sampler is not None and (alone := [asked for asked in together if not len(asked.draft.token_ids)]):
                place = {row: i for i, row in enumerate(rows)}
                wanted = [place[asked.rows.start] for asked in alone]
                mine = filtered if len(alone) == len(rows) else _rows_of(filtered, wanted)
                found = sampler.choose_rows(mine, [asked.uniform(0) for asked in alone])
                tokens = {asked.index: token for asked, token in zip(alone, found, strict=True)}
        except Exception as error:
            if len(together) == 1:
                return {together[0].index: [failed_token(describe_failure("sampling", error))]}
            return {k: v for asked in together for k, v in self._sample_group(scores, masked, [asked]).items()}
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
            if sequence.request.sampling.response_format is not None:
                raise WorkbenchError(f"request {sequence.request_id}: response_format: its grammar was not compiled")
            known = self._states[sequence.request_id] = build_sampling_state(sequence.request, self.vocab_size)
        return known


ConstrainedRows = tuple[int, range, "NDArray[np.bool_]"]  # sequence, its rows, forbidden tokens of each


def _mask(scores: Tensor, constrained: list[ConstrainedRows]) -> Tensor:
    """Return a copy of `scores` [row, vocab] with -inf at the forbidden tokens of constrained rows."""
    rows = [row for _, mine, _ in constrained for row in mine]
    banned = torch.from_numpy(np.concatenate([each for _, _, each in constrained])).to(scores.device)
    if len(rows) == len(scores):
        return scores.masked_fill(banned, -torch.inf)
    index = torch.tensor(rows, device=scores.device)
    return scores.index_copy(0, index, scores.index_select(0, index).masked_fill_(banned, -torch.inf))


def _rows_of(scores: Tensor, rows: list[int]) -> Tensor:
    """Return a copy of these rows. torch's `scores[rows]` wakes all threads for a single row (2.13), and waits."""
    return scores.index_select(0, torch.tensor(rows, device=scores.device))


def _greedy(rows: range, largest: list[float], tokens: list[int], place: int) -> SampledToken:
    """Return the largest token of one of a sequence's rows."""
    row = rows.start + place
    if not math.isfinite(largest[row]):
        return failed_token(f"the model's logits {describe_bad_logits(largest[row])}")
    return SampledToken(tokens[row])


def _largest(scores: Tensor) -> tuple[list[float], list[int]]:
    """Return each row's largest value (NaN if the row has one) and the first token that has it."""
    if scores.device.type == "cpu" and not scores.requires_grad:
        rows = scores.numpy()  # numpy's argmax uses vectors, torch's does not: 10 against 100 us for 49,152
        tokens = rows.argmax(-1)
        return rows[range(len(rows)), tokens].tolist(), tokens.tolist()
    values, tokens = scores.max(-1)
    return values.tolist(), tokens.tolist()
