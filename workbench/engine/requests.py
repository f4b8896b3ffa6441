"""Track the requests of a runner from submission to their end: sequences, output, and events."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Literal

from torch import Tensor

from workbench.engine import inputs as intake
from workbench.engine.beam_search import BeamHypothesis, BeamSearch, BeamSearches, beam_results
from workbench.engine.branch_search import BranchSearch
from workbench.engine.cache import KVCache
from workbench.engine.compiling import CompilingRequests
from workbench.engine.other_logits import EarlyLogits
from workbench.engine.outputs import BestOf, DetokenizedTokens, OutputProcessor, StopChecker, detokenize
from workbench.engine.request_events import emits_no_tokens, finished_event, submitted_event
from workbench.engine.resume import check_resumable, resume
from workbench.engine.second_streams import StreamPair, StreamPairs, second_request
from workbench.errors import WorkbenchError, describe_error
from workbench.executors.early_layers import split_columns
from workbench.kv_cache.adoption import Adoption
from workbench.model.spec import ModelSpec
from workbench.prompt.tokenization.tokenizer import Tokenizer
from workbench.request import FinishReason, Request, Sequence
from workbench.sampling.combiners import OtherLogits
from workbench.sampling.compiler import GrammarCompiler
from workbench.sampling.constraint import Constraint
from workbench.sampling.grammar import Grammar
from workbench.sampling.prompt_logprobs import BadPromptRow, score_prompt
from workbench.sampling.sampler import Sampler
from workbench.sampling.samplers import SampledToken, failed_token
from workbench.sampling.searches import Search, load_search
from workbench.sampling.thought import with_own_thought
from workbench.sampling.verify import NO_DRAFT, Draft
from workbench.scheduler.plan import Span, StepPlan
from workbench.scheduler.scheduler import Scheduler
from workbench.trace.events import (
    Cancelled,
    Decoded,
    Event,
    Finished,
    Preempted,
    Prefilled,
    Scheduled,
    Verified,
)


class RequestTracker:
    """The request tracker. Every sample has one Submitted and one Finished event, whatever happens in between.

    `emit` receives all events; those of a request go to its output queue too.
    """

    def __init__(
        self,
        spec: ModelSpec,
        tokenizer: Tokenizer | None,
        scheduler: Scheduler,
        cache: KVCache,
        sampler: Sampler,
        emit: Callable[[Event], None],
        clock: Callable[[], float],
        early_logits: EarlyLogits,
    ):
        self.spec, self.tokenizer, self.clock = spec, tokenizer, clock
        self.sequences: dict[str, Sequence] = {}
        self._scheduler, self._cache, self.sampler = scheduler, cache, sampler
        self._stop_checkers: dict[str, StopChecker] = {}
        self._beam_searches, self._pairs = BeamSearches(), StreamPairs()
        self._emit, self._processor = emit, OutputProcessor(emit)
        self._submitted = 0
        self._sent: dict[str, tuple[int, int]] = {}  # log-probabilities of a prompt and pins that were emitted
        self.compiling = CompilingRequests(GrammarCompiler(tokenizer), clock)
        self._early_logits = early_logits
        self.to_cancel: deque[str] = deque()  # request ids to cancel; any thread may append
        self._adoptions: dict[str, Adoption] = {}  # by request id: pages that another engine computed

    def set_acceptance_rule(self, rule: Literal["rejection", "match"]) -> None:
        """Accept draft tokens by `rule` from the next step on."""
        self.sampler.acceptance_rule = rule

    def set_sampler(self, sampler: Sampler) -> None:
        """Sample by `sampler` from the next step on."""
        self.sampler = sampler

    def submit(self, request: Request, queue: deque[Event], arrival: float | None) -> int:
        """Queue `request`, or finish it at once; return the number of Finished events to expect: one per sample.

        One with a grammar is submitted by `submit_compiled`, once that is compiled.
        """
        arrival, request = self.clock() if arrival is None else arrival, with_own_thought(request, self.tokenizer)
        names = [sample.request_id for sample in intake.split_samples(request)]
        if request.sampling.response_format is None or any(map(self._is_taken, names)):
            return self._submit(request, queue, arrival)
        self.compiling.add(request, names, queue, arrival)
        self.submit_compiled()
        return len(names)

    def submit_compiled(self) -> None:
        """Submit the requests whose grammars are compiled; refuse those whose grammars cannot be."""
        for ended, grammar, error in self.compiling.pop_compiled():
            request = replace(ended.request, invalid_reason=error) if error else ended.request
            self._submit(request, ended.queue, ended.arrival, grammar)

    def _is_taken(self, name: str) -> bool:
        return name in self.sequences or self.compiling.reserves(name)

    def _submit(
        self, request: Request, queue: deque[Event], arrival: float, grammar: Grammar | None = None, ends: bool = False
    ) -> int:
        """Queue `request` with its compiled grammar, or with `ends` cancel it."""
        now = self.clock()
        samples = intake.split_samples(request)
        taken = next((sample.request_id for sample in samples if self._is_taken(sample.request_id)), None)
        if taken is not None:
            refused = f"request id {taken!r} is already taken; ids must differ"
            end = Finished(now, request.request_id, reason=str(FinishReason.REFUSED), error=refused)
            for event in (submitted_event(request, now, arrival), end):
                self._emit(event)
                queue.append(event)
            self._decline(request.request_id)
            return 1
        sampling, sequences = request.sampling, []
        if not sampling.beams and sampling.num_sequences > sampling.n:
            self._processor.defer(request.request_id, BestOf(sampling.num_sequences, sampling.n))
        for number, sample in enumerate(samples):
            sequence = self._new_sequence(sample, arrival)
            sequences.append(sequence)
            self._processor.add_request(
                sample.request_id, queue, (request.request_id, number) if len(samples) > 1 else None
            )
            self._processor.emit(submitted_event(sample, now, arrival))
        if ends:
            self._emit(Cancelled(self.clock(), request.request_id))
            for sequence in reversed(sequences):
                sequence.finish_reason = FinishReason.CANCELLED
                self._end(sequence, FinishReason.CANCELLED, "")
            self._decline(request.request_id)
            return len(samples)
        try:
            self._admit(request, sequences, grammar)
        except Exception as error:  # an error of one request does not concern the others
            for sequence in sequences:
                if sequence.pages:  # adopted ones
                    self._cache.manager.free(sequence)
                sequence.finish_reason = FinishReason.REFUSED
                self._end(sequence, FinishReason.REFUSED, describe_error(error))
        self._decline(request.request_id)
        return len(samples)

    def _new_sequence(self, request: Request, arrival: float) -> Sequence:
        sequence = Sequence.from_request(request, self._submitted)
        sequence.arrival_time = arrival
        sequence.length_limit = min(sequence.length_limit, self.spec.max_position_embeddings)
        sequence.length_class = self.spec.length_class(sequence.length_limit)
        self._submitted += 1
        self.sequences[request.request_id] = sequence
        return sequence

    def expect_pages(self, request_id: str, adoption: Adoption) -> None:
        """Let the request of this id, which is submitted next, start on pages that another engine computed."""
        self._adoptions[request_id] = adoption

    def _decline(self, request_id: str) -> None:
        if (adoption := self._adoptions.pop(request_id, None)) is not None:
            adoption.decline(self._cache.manager)

    def move_out(self, sequence: Sequence) -> None:
        """End a sequence that another engine goes on with; text that is held back is emitted there."""
        self._finish(sequence, FinishReason.MOVED)

    def is_closing(self, request_id: str) -> bool:
        """Return `Decoded.closing` of the last token of a request."""
        constraint = self.sampler.constraint_of(request_id)
        return constraint is not None and constraint.is_closing

    def _admit(self, request: Request, sequences: list[Sequence], grammar: Grammar | None) -> None:
        intake.check_request(sequences[0].request, self.spec.vocab_size)
        check_resumable(request, self.spec.vocab_size)
        if request.sampling.ranking is not None:
            self._processor.rank_by(request.request_id, request.sampling.ranking)
        search = self._load_search(request)
        for sequence in sequences:
            self.sampler.add(sequence)
            self._early_logits.check(self.sampler.combiners_of(sequence.request_id))
            room = self.spec.max_position_embeddings - self._pair(sequence)
            output = StopChecker(sequence.request, self.tokenizer, self.spec.eos_token_ids, room)
            self._stop_checkers[sequence.request_id] = output
            constraint = self._constraint(sequence.request, output, grammar, room)
            self.sampler.constrain(sequence, constraint)
            if request.generated_ids and (ended := resume(request, output, constraint)) is not None:
                sequence.finish_reason = ended
                self._end(sequence, ended, "")
                return
        beams = request.sampling.beams > 0
        if (adoption := self._adoptions.pop(request.request_id, None)) is not None:
            adoption.adopt(self._cache.manager, self._cache.store, sequences[0])
        if self._pairs.together(sequences[0])[1:]:  # each sample is a group of its own
            for first, second in map(self._pairs.together, sequences):
                self._scheduler.submit(first, [second], as_beams=True)
        else:
            self._scheduler.submit(sequences[0], sequences[1:], as_beams=beams)
        if beams:
            ends = self._stop_checkers[sequences[0].request_id]
            how = request.sampling, sequences, ends.end_token_ids, ends.max_output_tokens
            self._beam_searches.add(BeamSearch(*how) if search is None else BranchSearch(search, *how))

    def _load_search(self, request: Request) -> Search | None:
        """Return the request's own search; WorkbenchError where it cannot be one, or there are no states for it."""
        if (part := request.sampling.search) is None:
            return None
        if self._early_logits.problem:
            raise WorkbenchError(f"search {part.path}: {self._early_logits.problem}")
        return load_search(part)

    def _pair(self, sequence: Sequence) -> int:
        """Make the second stream of `sequence` if its filters want one; return how many tokens longer that prompt is,
        at least 0. WorkbenchError for one that cannot be."""
        request = second_request(sequence.request, self.sampler.combiners_of(sequence.request_id))
        if request is None:
            return 0
        intake.check_request(request, self.spec.vocab_size)
        if self._is_taken(request.request_id):
            raise WorkbenchError(f"request id {request.request_id!r} is already taken; ids must differ")
        second = self._new_sequence(request, sequence.arrival_time)
        second.own_prompt = True
        self._pairs.add(StreamPair(sequence, second))
        return max(0, second.prompt_length - sequence.prompt_length)

    def _constraint(
        self, request: Request, output: StopChecker, grammar: Grammar | None, max_model_len: int
    ) -> Constraint | None:
        """Return what constrains the request's tokens: its grammar, its thought, or nothing."""
        if grammar is None and request.sampling.thinking is None:
            return None
        spec = self.spec
        return Constraint(request, self.tokenizer, spec.vocab_size, max_model_len, output.end_token_ids, grammar)

    def process_cancellations(self) -> None:
        """End the requests to cancel, with all their samples; unknown ids are ignored."""
        while self.to_cancel:
            request_id = self.to_cancel.popleft()
            compiling = self.compiling.pop(request_id)
            if compiling is not None:
                self._submit(compiling.request, compiling.queue, compiling.arrival, ends=True)
                continue
            names = self._processor.sample_ids_of(request_id)
            if any(name in self.sequences for name in names):
                self._emit(Cancelled(self.clock(), request_id))
            for name in reversed(names):
                sequence = self.sequences.get(name)
                if sequence is not None:
                    self._finish(sequence, FinishReason.CANCELLED)

    def request_ids_of(self, queue: deque[Event]) -> list[str]:
        """Return the ids of requests whose events go to `queue`."""
        return [*self._processor.request_ids_of(queue), *self.compiling.request_ids_of(queue)]

    def emit_decisions(self, plan: StepPlan, now: float) -> None:
        """Emit the scheduler's decisions, also those on unknown ids that a policy named."""
        served = {decision.request_id for decision in plan.decisions} & self.sequences.keys()
        for decision in plan.decisions:
            name, action, reason = decision.request_id, decision.action, decision.reason
            if name in served and name not in self.sequences:  # it has been cancelled
                continue
            if action == "preempted":
                self._send(Preempted(now, name, step=plan.step, reason=reason))
            else:
                self._send(Scheduled(now, name, step=plan.step, action=action, reason=reason))

    def legal_drafts(self, drafts: Mapping[str, Draft]) -> dict[str, Draft]:
        """Cut drafts before the first token that their requests' constraints forbid.

        A drafted token with a probability is kept, though it will be rejected: only then is the token in its place
        sampled from the target's distribution. Where rows are masked or combined as a chain, a tree gives its first
        branch.
        """
        legal: dict[str, Draft] = {}
        for name, draft in drafts.items():
            constraint = self.sampler.constraint_of(name)
            if constraint is not None or self.sampler.combiners_of(name):
                draft = draft.first_branch()
            if constraint is not None:
                draft = draft.truncated(constraint.legal_count(draft.token_ids) + (draft.probabilities is not None))
            if len(draft):
                legal[name] = draft
        return legal

    def start_masks(self, plan: StepPlan) -> None:
        """Start on the masks of the step, beside its forward pass."""
        spans = (span for span in plan.spans if span.needs_sample)
        self.sampler.start_masks((span.sequence, tuple(span.draft_token_ids)) for span in spans)

    def layers_to_note(self, plan: StepPlan) -> tuple[int, ...]:
        """Return the layers whose states the filters of the step's samples need."""
        names = (span.sequence.request_id for span in plan.spans if span.needs_sample)
        layers: set[int] = set()
        for name in names:
            layers.update(layer for each in self.sampler.combiners_of(name) for layer in each.layers)
            if isinstance(self._beam_searches.get(name), BranchSearch):
                layers.add(self._early_logits.num_layers)
        return tuple(sorted(layers))

    def needs_only_largest(self, plan: StepPlan) -> bool:
        """Return whether all rows of the step's logits are for greedy requests that ask for nothing else of them."""
        return all(
            span.requested_logits is None
            and span.sequence.request_id not in self._beam_searches
            and self.sampler.is_plain_greedy(span.sequence)
            for span in plan.spans
            if span.num_logits
        )

    def sample(self, logits: Tensor, plan: StepPlan, drafts: Mapping[str, Draft]) -> dict[str, list[SampledToken]]:
        """Sample tokens from the step's logits.

        Beams have none, unless their row is bad: their search takes the logits and advances all of them together.

        Args:
            logits: [sample, vocab], the rows of `plan`, with the states of its layers as further columns.
            plan: the computed plan.
            drafts: drafts by request id.

        Returns:
            by request id, the accepted draft tokens and one token after them; none where a token has to wait, and its
            span is to be computed once more.
        """
        choices: dict[str, list[SampledToken]] = {}
        rows, sequences, checked = [], [], []
        others: dict[str, OtherLogits] = {}
        logits, states = split_columns(logits, self.spec.vocab_size, plan.layers)
        last = states.get(self._early_logits.num_layers)
        row = 0
        for span in plan.spans:
            sequence, mine = span.sequence, range(row, row := row + span.num_logits)
            if span.requested_logits is not None:  # of a prompt
                mine, wrong = self._score_prompt(span, logits, mine)
                if wrong:
                    choices[sequence.request_id] = [failed_token(wrong)]
                    continue
            search = self._beam_searches.get(sequence.request_id)
            if not span.needs_sample:
                continue
            early = self._early_logits.of_rows(self.sampler.combiners_of(sequence.request_id), states, mine)
            if (pair := self._pairs.get(sequence.request_id)) is not None:
                pair.add_logits(sequence, logits[mine.start], early)
            elif search is None:
                rows += mine
                sequences.append(sequence)
                drafted = len(span.draft_token_ids)
                checked.append(drafts[sequence.request_id].truncated(drafted) if drafted else NO_DRAFT)
                if early:
                    others[sequence.request_id] = OtherLogits(early)
            elif wrong := search.add_logits(sequence, logits[mine.start], None if last is None else last[mine.start]):
                choices[sequence.request_id] = [failed_token(wrong)]
        if sequences:
            chosen = self.sampler.verify(
                logits if len(rows) == len(logits) else logits[rows], sequences, checked, others
            )
            choices |= {sequence.request_id: each for sequence, each in zip(sequences, chosen, strict=True)}
        return choices

    def _score_prompt(self, span: Span, logits: Tensor, rows: range) -> tuple[range, str]:
        """Keep the log-probabilities that a span of a prompt gives; return the rows left to sample from, and an
        error."""
        known, scored = span.sequence.prompt_logprobs, rows[: len(rows) - span.needs_sample]
        assert known is not None
        try:
            known += score_prompt(span.sequence, logits[scored.start : scored.stop])
        except BadPromptRow as bad:
            return rows[:0], str(bad)
        return rows[len(scored) :], ""

    def _prefilled(self, span: Span, step: int, now: float) -> Prefilled:
        """Build the event of a chunk, with what no event of the request had yet."""
        sequence, name = span.sequence, span.sequence.request_id
        logprobs, pinned = sequence.prompt_logprobs or (), sequence.pinned
        if logprobs or pinned:
            scored, pins = self._sent.get(name, (0, 0))
            self._sent[name] = len(logprobs), len(pinned)
            logprobs, pinned = logprobs[scored:], pinned[pins:]
        return Prefilled(
            now, name, step=step, tokens=span.length, computed=span.end, logprobs=tuple(logprobs), pinned=tuple(pinned)
        )

    def detokenize(self, sampled: Mapping[str, list[SampledToken]]) -> dict[str, DetokenizedTokens]:
        """Detokenize what was sampled for each request, up to its end."""
        return {name: detokenize(self._stop_checkers[name], each) for name, each in sampled.items() if each}

    def emit_step(self, plan: StepPlan, detokenized: Mapping[str, DetokenizedTokens], now: float) -> None:
        """Emit the progress of each request after the step of `plan`, and finish those that are done."""
        for span in plan.spans:
            sequence, name = span.sequence, span.sequence.request_id
            if sequence.finish_reason is not None:  # it may have been cancelled
                continue
            if not span.is_decode:
                self._send(self._prefilled(span, plan.step, now))
            if name not in detokenized or sequence.finish_reason is not None:
                continue
            if span.draft_token_ids:
                drafted, accepted = len(span.draft_token_ids), detokenized[name].num_accepted
                reported = span.draft_token_ids
                if span.draft_parents:
                    reported = _accepted_first(span, detokenized[name].token_ids)
                verified = Verified(now, name, step=plan.step, drafted=drafted, accepted=accepted, token_ids=reported)
                self._send(verified)
            if sequence.finish_reason is None:
                self._emit_and_finish(sequence, detokenized[name], plan.step, now)
        for pair in self._pairs.ready(plan) if self._pairs else ():
            self._advance_pair(pair, plan.step, now)
        if self._beam_searches:
            for search in self._beam_searches.ready(plan):
                self._advance_beams(search, plan.step, now)

    def _advance_pair(self, pair: StreamPair, step: int, now: float) -> None:
        """Sample a token from the combined logits of a pair, and append it to both."""
        logits, others = pair.pop_logits()
        (sampled,) = self.sampler.verify(logits[None], [pair.first], [NO_DRAFT], {pair.first.request_id: others})
        read = detokenize(self._stop_checkers[pair.first.request_id], sampled)
        for each in pair.sequences:
            each.token_ids += read.token_ids
        self._emit_and_finish(pair.first, read, step, now)

    def _advance_beams(self, search: BeamSearch, step: int, now: float) -> None:
        """Advance a search whose beams all have logits, or finish it with a text for each beam."""
        try:
            going = search.advance(now, step)
        except WorkbenchError as error:  # of a search of the user's own
            self.fail(search.sequences[:1], error)
            return
        if going is not None:
            search.reassign(self._scheduler.sequence_groups.advance_beams(search.sequences, going))
            return
        for beam, found, words in beam_results(search):
            if beam.finish_reason is not None:  # it may have been cancelled
                return
            beam.token_ids = list(beam.request.prompt_ids)
            reason = None if found is None else self._emit_hypothesis(beam, found, search.token_times)
            score = None if found is None else found.score
            if words:
                self._finish(beam, FinishReason.NOT_CHOSEN, words, score)
            elif reason is not None:
                self._finish(beam, reason, score=score)

    def _emit_hypothesis(
        self, beam: Sequence, found: BeamHypothesis, moments: list[tuple[float, int]]
    ) -> FinishReason | None:
        """Emit a text as if `beam` had decoded it; return its finish reason, or None if it is not a complete text."""
        reason = None
        for (time, step), token, logprob in zip(moments, found.token_ids, found.logprobs, strict=False):
            if beam.finish_reason is not None:
                return None
            beam.token_ids.append(token)
            shown = detokenize(self._stop_checkers[beam.request_id], [SampledToken(token, logprob)])
            self._emit_tokens(beam, shown, step, time)
            reason = shown.finish_reason
        return reason

    def fail(self, sequences: Iterable[Sequence], error: Exception | str) -> None:
        """Fail `sequences` with the error."""
        for sequence in sequences:
            for each in reversed(self._beam_searches.beams_of(sequence)):
                self._finish(each, FinishReason.ERROR, describe_error(error))

    def _emit_and_finish(self, sequence: Sequence, read: DetokenizedTokens, step: int, now: float) -> None:
        self._emit_tokens(sequence, read, step, now)
        if read.finish_reason is not None:
            self._finish(sequence, read.finish_reason)

    def _emit_tokens(self, sequence: Sequence, read: DetokenizedTokens, step: int, now: float) -> None:
        """Emit the last tokens of `sequence`; fail it if they could not be detokenized."""
        first = len(sequence.output_ids) - len(read.tokens)
        texts = () if emits_no_tokens(sequence.request) else read.texts
        emitted = zip(read.tokens, texts, read.channels, strict=False)
        for index, (choice, text, channel) in enumerate(emitted, first):
            if sequence.finish_reason is not None:  # it may have been cancelled
                return
            self._send(
                Decoded(
                    now, sequence.request_id, text, step=step, token_id=choice.token_id,
                    index=index, logprob=choice.logprob, top_logprobs=choice.top_logprobs, channel=channel,
                    closing=choice.closing,
                )
            )  # fmt: skip
        if read.error:
            self.fail([sequence], read.error)

    def _send(self, event: Event) -> None:
        """Emit an event of an unfinished request, none of a second stream, and carry out cancellations that its
        listeners ask for."""
        if self._pairs.is_hidden(event.request_id):
            return
        self._processor.emit(event)
        if self.to_cancel:
            self.process_cancellations()

    def _finish(self, sequence: Sequence, reason: FinishReason, error: str = "", score: float | None = None) -> None:
        for each in reversed(self._pairs.together(sequence)):
            if each.finish_reason is not None:
                continue
            freed = self._scheduler.finish(each, reason)
            if reason is FinishReason.ERROR:
                self._cache.zero_pages(freed)
            if not self._pairs.is_hidden(each.request_id):
                self._end(each, reason, error, score)

    def _end(self, sequence: Sequence, reason: FinishReason, error: str, score: float | None = None) -> None:
        name = sequence.request_id
        if (pair := self._pairs.pop(name, None)) is not None:
            del self._pairs[pair.second.request_id], self.sequences[pair.second.request_id]
        output = self._stop_checkers.pop(name, None)
        self._processor.emit(finished_event(sequence, output, self.clock(), reason, error, score))
        self.sampler.remove(name)
        self._sent.pop(name, None)
        self._beam_searches.pop(name, None)
        self._processor.remove_request(name)
        del self.sequences[name]


def _accepted_first(span: Span, token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Return the tokens of a tree of drafts, those along which `token_ids` go first."""
    draft = Draft(span.draft_token_ids, None, span.draft_parents)
    accepted = draft.follow(token_ids)
    others = [place for place in range(len(draft)) if place not in accepted]
    return tuple(draft.token_ids[place] for place in (*accepted, *others))
