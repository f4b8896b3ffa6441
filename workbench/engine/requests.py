"""Track the requests of a runner from submission to their end: sequences, output, and events."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from torch import Tensor

from workbench.constrained.factory import ConstraintFactory
from workbench.constrained.grammar import Grammar
from workbench.constrained.thought import with_own_thought
from workbench.decoding.decoder import Decoder
from workbench.decoding.method import Advance
from workbench.decoding.pair import Pair, second_request
from workbench.engine import inputs as intake
from workbench.engine.cache import Adoption, KVCache
from workbench.engine.compiling import CompilingRequests
from workbench.engine.outputs import DetokenizedTokens, OutputProcessor, StopChecker, detokenize
from workbench.engine.request_events import emits_no_tokens, finished_event, submitted_event
from workbench.engine.resume import check_resumable, resume
from workbench.errors import WorkbenchError, describe_error
from workbench.model.spec import ModelSpec
from workbench.prompt.tokenization.tokenizer import Tokenizer
from workbench.request import FinishReason, Request, Sequence
from workbench.sampling.verify import Draft
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
    """The tracker of all requests of a runner. Every sample has exactly one Submitted and one Finished event.

    `emit` receives all events; those of a request go to its output queue too.
    """

    def __init__(
        self,
        spec: ModelSpec,
        tokenizer: Tokenizer | None,
        scheduler: Scheduler,
        cache: KVCache,
        decoder: Decoder,
        emit: Callable[[Event], None],
        clock: Callable[[], float],
    ):
        self.spec, self.tokenizer, self.clock = spec, tokenizer, clock
        self.sequences: dict[str, Sequence] = {}
        self._scheduler, self._cache, self.decoder = scheduler, cache, decoder
        self._stop_checkers: dict[str, StopChecker] = {}
        self._emit, self._processor = emit, OutputProcessor(emit)
        self._submitted = 0
        self._sent: dict[str, tuple[int, int]] = {}  # requests with emitted prompt log-probabilities and pins
        self._constraints = ConstraintFactory(tokenizer, spec.vocab_size)
        self.compiling = CompilingRequests(self._constraints.compiler, clock)
        self.to_cancel: deque[str] = deque()  # request ids to cancel; any thread may append
        self._adoptions: dict[str, Adoption] = {}  # pages that another engine computed, by request id

    def submit(self, request: Request, queue: deque[Event], arrival: float | None) -> int:
        """Queue `request`, or finish it at once; return the number of Finished events to expect: one per sample.

        A request with a grammar is submitted later, by `submit_compiled`.
        """
        arrival, request = self.clock() if arrival is None else arrival, with_own_thought(request, self.tokenizer)
        names = [sample.request_id for sample in intake.split_samples(request)]
        if request.sampling.response_format is None or any(map(self._is_taken, names)):
            return self._submit(request, queue, arrival)
        self.compiling.add(request, names, queue, arrival)
        self.submit_compiled()
        return len(names)

    def submit_compiled(self) -> None:
        """Submit the requests with compiled grammars; refuse those with a grammar that failed to compile."""
        for ended, grammar, error in self.compiling.pop_compiled():
            request = replace(ended.request, invalid_reason=error) if error else ended.request
            self._submit(request, ended.queue, ended.arrival, grammar)

    def _is_taken(self, name: str) -> bool:
        return name in self.sequences or self.compiling.reserves(name)

    def _submit(
        self, request: Request, queue: deque[Event], arrival: float, grammar: Grammar | None = None, ends: bool = False
    ) -> int:
        """Queue `request` with its compiled grammar; with `ends`, cancel it."""
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
        sequences = []
        self._processor.defer(request)
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
        except Exception as error:  # an error of one request does not affect the others
            for sequence in sequences:
                if sequence.pages:  # adopted pages
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
        """Start the request with this id, which must be submitted next, on pages that another engine computed."""
        self._adoptions[request_id] = adoption

    def _decline(self, request_id: str) -> None:
        if (adoption := self._adoptions.pop(request_id, None)) is not None:
            adoption.decline(self._cache)

    def move_out(self, sequence: Sequence) -> None:
        """End a sequence that another engine continues; that engine emits the held-back text."""
        self._finish(sequence, FinishReason.MOVED)

    def _admit(self, request: Request, sequences: list[Sequence], grammar: Grammar | None) -> None:
        intake.check_request(sequences[0].request, self.spec.vocab_size)
        check_resumable(request, self.spec.vocab_size)
        self._processor.rank(request)
        for sequence in sequences:
            self.decoder.add(sequence)
            room = self.spec.max_position_embeddings - self._pair(sequence)
            output = StopChecker(sequence.request, self.tokenizer, self.spec.eos_token_ids, room)
            self._stop_checkers[sequence.request_id] = output
            constraint = self._constraints.build(sequence.request, room, output.end_token_ids, grammar)
            self.decoder.sampler.constrain(sequence, constraint)
            if request.generated_ids and (ended := resume(request, output, constraint)) is not None:
                sequence.finish_reason = ended
                self._end(sequence, ended, "")
                return
        if request.sampling.beams:
            output = self._stop_checkers[sequences[0].request_id]
            ends, most = output.end_token_ids, output.max_output_tokens
            self.decoder.add_search(request.sampling, sequences, ends, most)
        if (adoption := self._adoptions.pop(request.request_id, None)) is not None:
            adoption.adopt(self._cache, sequences[0])
        method = self.decoder.methods.of(sequences[0])
        if method is not None and method.hidden:  # each sample is a group of its own
            for sequence in sequences:
                self._scheduler.submit(sequence, self.decoder.methods.hidden(sequence), as_beams=True)
        else:
            self._scheduler.submit(sequences[0], sequences[1:], as_beams=method is not None)

    def _pair(self, sequence: Sequence) -> int:
        """Create the second stream of `sequence` if its filters need one; return how many tokens longer its prompt is,
        at least 0. WorkbenchError if it cannot be created.
        """
        request = second_request(sequence.request, self.decoder.sampler.combiners_of(sequence.request_id))
        if request is None:
            return 0
        intake.check_request(request, self.spec.vocab_size)
        if self._is_taken(request.request_id):
            raise WorkbenchError(f"request id {request.request_id!r} is already taken; ids must differ")
        second = self._new_sequence(request, sequence.arrival_time)
        second.own_prompt = True
        self.decoder.methods.add(Pair(sequence, second, self.decoder.sampler))
        return max(0, second.prompt_length - sequence.prompt_length)

    def process_cancellations(self) -> None:
        """End the requests with recorded cancellations, with all their samples; unknown ids are ignored."""
        while self.to_cancel:
            request_id = self.to_cancel.popleft()
            compiling = self.compiling.pop(request_id)
            if compiling is not None:
                self._submit(compiling.request, compiling.queue, compiling.arrival, ends=True)
                continue
            if self.decoder.methods.is_hidden(request_id):  # a second stream, which is invisible to clients
                continue
            names = self._processor.sample_ids_of(request_id)
            if any(name in self.sequences for name in names):
                self._emit(Cancelled(self.clock(), request_id))
            for name in reversed(names):
                sequence = self.sequences.get(name)
                if sequence is not None:
                    self._finish(sequence, FinishReason.CANCELLED)

    def request_ids_of(self, queue: deque[Event]) -> list[str]:
        """Return the ids of the requests whose events go to `queue`."""
        return [*self._processor.request_ids_of(queue), *self.compiling.request_ids_of(queue)]

    def before_forward(self, plan: StepPlan, failures: Iterable[tuple[Sequence, str]], now: float) -> StepPlan:
        """Emit the decisions of a step, and fail the sequences that cannot take part in it.

        Returns:
            the plan of the other sequences, with the layers whose hidden states their samplers need.
        """
        self._emit_decisions(plan, now)
        for sequence, fault in (*plan.errors, *failures):
            self.fail([sequence], fault)
        return self.decoder.prepare(plan.unfinished())

    def _emit_decisions(self, plan: StepPlan, now: float) -> None:
        """Emit the scheduler's decisions, including those for unknown ids from a policy."""
        served = {decision.request_id for decision in plan.decisions} & self.sequences.keys()
        for decision in plan.decisions:
            name, action, reason = decision.request_id, decision.action, decision.reason
            if name in served and name not in self.sequences:  # cancelled in the meantime
                continue
            if action == "preempted":
                self._send(Preempted(now, name, step=plan.step, reason=reason))
            else:
                self._send(Scheduled(now, name, step=plan.step, action=action, reason=reason))

    def after_forward(
        self,
        plan: StepPlan,
        logits: Tensor,
        drafts: Mapping[str, Draft],
        commit: Callable[[StepPlan, Mapping[str, DetokenizedTokens]], None],
    ) -> None:
        """Sample the tokens of a step, commit and emit them, and finish completed requests.

        Args:
            plan: the computed plan.
            logits: its rows [sample, vocab], with the hidden states of its layers as further columns.
            drafts: drafts by request id.
            commit: function of the plan of advancing sequences and their tokens by request id.
        """
        try:
            sampled = self.decoder.decode(plan, logits, drafts)
        except Exception as error:  # the requests of this step fail; waiting ones continue
            self.fail([span.sequence for span in plan.spans], error)
            return
        now = self.clock()
        waits = [span.sequence for span in plan.spans if not sampled.get(span.sequence.request_id, True)]
        plan = plan.without(waits) if waits else plan  # computed again in a later step
        detokenized = {name: detokenize(self._stop_checkers[name], each) for name, each in sampled.items() if each}
        commit(plan, detokenized)
        self._emit_progress(plan, detokenized, now)

    def _prefilled(self, span: Span, step: int, now: float) -> Prefilled:
        """Build the Prefilled event of a chunk, with data that has not been emitted yet."""
        sequence, name = span.sequence, span.sequence.request_id
        logprobs, pinned = sequence.prompt_logprobs or (), sequence.pinned
        if logprobs or pinned:
            scored, pins = self._sent.get(name, (0, 0))
            self._sent[name] = len(logprobs), len(pinned)
            logprobs, pinned = logprobs[scored:], pinned[pins:]
        return Prefilled(
            now, name, step=step, tokens=span.length, computed=span.end, logprobs=tuple(logprobs), pinned=tuple(pinned)
        )

    def _emit_progress(self, plan: StepPlan, detokenized: Mapping[str, DetokenizedTokens], now: float) -> None:
        """Emit the progress of each request after the step of `plan`, and finish completed ones."""
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
        for method in self.decoder.methods.ready(plan):
            if self.decoder.methods.of(method.sequences[0]) is not method:  # cancelled at an earlier event
                continue
            try:
                advances = method.advance(plan.step, now, self._scheduler.sequence_groups.advance_beams)
            except WorkbenchError as error:  # an error of a user-defined part
                self.fail(method.sequences[:1], error)
                continue
            for each in advances:
                self._show(each)

    def _show(self, advance: Advance) -> None:
        """Append the tokens that a decoding method chose for a sequence, emit them like sampled tokens, and finish the
        sequence at its end.
        """
        sequence, reason = advance.sequence, None
        together = (sequence, *self.decoder.methods.hidden(sequence))
        if advance.is_whole and sequence.finish_reason is None:
            sequence.token_ids = list(sequence.request.prompt_ids)
        for token, time, step in advance.tokens:
            if sequence.finish_reason is not None:  # it may have been cancelled
                return
            shown = detokenize(self._stop_checkers[sequence.request_id], [token])
            for each in together:
                each.token_ids += shown.token_ids
            self._emit_tokens(sequence, shown, step, time)
            reason = shown.finish_reason
        if sequence.finish_reason is None and advance.not_chosen:
            self._finish(sequence, FinishReason.NOT_CHOSEN, advance.not_chosen, advance.score)
        elif sequence.finish_reason is None and reason is not None:
            self._finish(sequence, reason, score=advance.score)

    def fail(self, sequences: Iterable[Sequence], error: Exception | str) -> None:
        """Fail `sequences` with the error, together with all sequences that advance jointly with them, such as
        beams.
        """
        for sequence in sequences:
            for each in reversed(self.decoder.methods.visible(sequence)):
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
                )
            )  # fmt: skip
        if read.error:
            self.fail([sequence], read.error)

    def _send(self, event: Event) -> None:
        """Emit an event of an unfinished request (not of a second stream), and execute cancellations by its
        listeners.
        """
        if self.decoder.methods.is_hidden(event.request_id):
            return
        self._processor.emit(event)
        if self.to_cancel:
            self.process_cancellations()

    def _finish(self, sequence: Sequence, reason: FinishReason, error: str = "", score: float | None = None) -> None:
        for each in (*self.decoder.methods.hidden(sequence), sequence):
            if each.finish_reason is not None:
                continue
            freed = self._scheduler.finish(each, reason)
            if reason is FinishReason.ERROR:
                self._cache.zero_pages(freed)
            if each is sequence:
                self._end(each, reason, error, score)

    def _end(self, sequence: Sequence, reason: FinishReason, error: str, score: float | None = None) -> None:
        name = sequence.request_id
        for hidden in self.decoder.methods.hidden(sequence):
            self.decoder.methods.remove(hidden)
            del self.sequences[hidden.request_id]
        output = self._stop_checkers.pop(name, None)
        self._processor.emit(finished_event(sequence, output, self.clock(), reason, error, score))
        self.decoder.remove(sequence)
        self._sent.pop(name, None)
        self._processor.remove_request(name)
        del self.sequences[name]


def _accepted_first(span: Span, token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Return the tokens of a draft tree with the accepted path `token_ids` first."""
    draft = Draft(span.draft_token_ids, None, span.draft_parents)
    accepted = draft.follow(token_ids)
    others = [place for place in range(len(draft)) if place not in accepted]
    return tuple(draft.token_ids[place] for place in (*accepted, *others))
