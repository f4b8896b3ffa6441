"""Track the requests of a runner from submission to their end: sequences, output, and events."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from workbench.engine import intake
from workbench.engine.beam_search import Hypothesis, Search
from workbench.engine.best_of import BestOf
from workbench.engine.cache import Cache
from workbench.engine.mail import Mail
from workbench.engine.output import NO_END, Output
from workbench.engine.plan import StepPlan
from workbench.engine.reading import Read, read_out
from workbench.engine.scheduler import Scheduler
from workbench.engine.searches import Searches, places
from workbench.errors import in_words
from workbench.model.spec import ModelSpec
from workbench.prompt.tokenizer import Tokenizer
from workbench.request import FinishReason, Request, Sequence
from workbench.sampling.choice import failed
from workbench.sampling.choose import Choice, Chooser
from workbench.sampling.verify import NO_DRAFT, Draft
from workbench.trace.events import Cancelled, Decoded, Event, Finished, Planned, Prefilled, SetBack, Submitted, Verified

ENDED_WELL = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.NOT_CHOSEN)


class Served:
    """The request tracker. Every sample has one Submitted and one Finished event, whatever happens in between.

    `emit` receives all events; those of a request go to its output queue too.
    """

    def __init__(
        self,
        spec: ModelSpec,
        tokenizer: Tokenizer | None,
        scheduler: Scheduler,
        cache: Cache,
        chooser: Chooser,
        tell: Callable[[Event], None],
        clock: Callable[[], float],
    ):
        self.spec, self.tokenizer, self.clock = spec, tokenizer, clock
        self.sequences: dict[str, Sequence] = {}
        self._scheduler, self._cache, self.chooser = scheduler, cache, chooser
        self._outputs: dict[str, Output] = {}
        self._searches = Searches()
        self._tell, self._mail = tell, Mail(tell)
        self._submitted = 0
        self.noted: deque[str] = deque()  # request ids to cancel; any thread may append

    def submit(self, request: Request, box: deque[Event], arrival: float | None) -> int:
        """Queue `request`, or finish it at once; return the number of Finished events to expect: one per sample."""
        now = self.clock()
        arrival = now if arrival is None else arrival
        samples = intake.samples_of(request)
        taken = next((sample.request_id for sample in samples if sample.request_id in self.sequences), None)
        if taken is not None:
            refused = f"request id {taken!r} is already taken; ids must differ"
            end = Finished(now, request.request_id, reason=str(FinishReason.REFUSED), error=refused)
            for event in (_submitted(request, now, arrival), end):
                self._tell(event)
                box.append(event)
            return 1
        asked, sequences = request.sampling, []
        if not asked.beams and asked.samples > asked.n:
            self._mail.hold(request.request_id, BestOf(asked.samples, asked.n))
        for number, sample in enumerate(samples):
            sequence = Sequence.of(sample, self._submitted)
            self._submitted += 1
            sequences.append(sequence)
            self.sequences[sample.request_id] = sequence
            self._mail.open(sample.request_id, box, (request.request_id, number) if len(samples) > 1 else None)
            self._mail.send(_submitted(sample, now, arrival))
        try:
            self._admit(request, sequences)
        except Exception as error:  # an error of one request does not concern the others
            for sequence in sequences:
                sequence.finish_reason = FinishReason.REFUSED
                self._end(sequence, FinishReason.REFUSED, in_words(error))
        return len(samples)

    def _admit(self, request: Request, sequences: list[Sequence]) -> None:
        intake.check(sequences[0].request, self.spec.vocab)
        for sequence in sequences:
            output = Output(sequence.request, self.tokenizer, self.spec.end_ids, self.spec.context)
            self._outputs[sequence.request_id] = output
            self.chooser.admit(sequence)
        beams = request.sampling.beams > 0
        self._scheduler.submit(sequences[0], sequences[1:], together=beams)
        if beams:
            self._searches.begin(request.sampling, sequences, self._outputs[sequences[0].request_id])

    def heed(self) -> None:
        """End the requests to cancel, with all their samples; unknown ids are ignored."""
        while self.noted:
            request_id = self.noted.popleft()
            names = self._mail.samples(request_id)
            if any(name in self.sequences for name in names):
                self._tell(Cancelled(self.clock(), request_id))
            for name in reversed(names):
                sequence = self.sequences.get(name)
                if sequence is not None:
                    self._finish(sequence, FinishReason.CANCELLED)

    def of(self, box: deque[Event]) -> list[str]:
        """Return the ids of requests whose events go to `queue`."""
        return self._mail.names(box)

    def planned(self, plan: StepPlan, now: float) -> None:
        """Emit the scheduler's decisions, also those on unknown ids that a policy named."""
        served = {decision.request_id for decision in plan.decisions} & self.sequences.keys()
        for decision in plan.decisions:
            name, action, reason = decision.request_id, decision.action, decision.reason
            if name in served and name not in self.sequences:  # it has been cancelled
                continue
            if action == "set_back":
                self._send(SetBack(now, name, step=plan.step, reason=reason))
            else:
                self._send(Planned(now, name, step=plan.step, action=action, reason=reason))

    def choose(self, logits: Tensor, plan: StepPlan, drafts: Mapping[str, Draft]) -> dict[str, list[Choice]]:
        """Sample tokens from the step's logits.

        Beams have none, unless their row is bad: their search takes the logits and advances all of them together.

        Args:
            logits: [sample, vocab], the rows of `plan`.
            plan: the computed plan.
            drafts: drafts by request id.

        Returns:
            by request id, the accepted draft tokens and one token after them.
        """
        choices: dict[str, list[Choice]] = {}
        rows, sequences, checked = [], [], []
        row = 0
        for span in plan.spans:
            sequence, mine = span.sequence, range(row, row := row + span.logit_rows)
            search = self._searches.of(sequence)
            if not span.samples:
                continue
            if search is None:
                rows += mine
                sequences.append(sequence)
                checked.append(drafts.get(sequence.request_id, NO_DRAFT).first(len(span.drafts)))
            elif wrong := search.look(sequence, logits[mine.start]):
                choices[sequence.request_id] = [failed(wrong)]
        if sequences:
            chosen = self.chooser.verify(logits if len(rows) == len(logits) else logits[rows], sequences, checked)
            choices |= {sequence.request_id: each for sequence, each in zip(sequences, chosen, strict=True)}
        return choices

    def read(self, chosen: Mapping[str, list[Choice]]) -> dict[str, Read]:
        """Detokenize what was sampled for each request, up to its end."""
        return {name: read_out(self._outputs[name], choices) for name, choices in chosen.items()}

    def computed(self, plan: StepPlan, read: Mapping[str, Read], now: float) -> None:
        """Emit the progress of each request after the step of `plan`, and finish those that are done."""
        for span in plan.spans:
            sequence, name = span.sequence, span.sequence.request_id
            if sequence.finish_reason is not None:  # it may have been cancelled
                continue
            if not span.decodes:
                self._send(Prefilled(now, name, step=plan.step, tokens=span.length, computed=span.end))
            if name not in read or sequence.finish_reason is not None:
                continue
            if span.drafts:
                drafted, accepted = len(span.drafts), read[name].accepted
                told = Verified(now, name, step=plan.step, drafted=drafted, accepted=accepted, token_ids=span.drafts)
                self._send(told)
            if sequence.finish_reason is None:
                self._decoded(sequence, read[name], plan.step, now)

        for search in self._searches.ready(plan):
            self._searched(search, plan.step, now)

    def _searched(self, search: Search, step: int, now: float) -> None:
        """Advance a search whose beams all have logits, or finish it with a text for each beam."""
        going = search.select(now, step)
        if going is not None:
            search.moved(self._scheduler.families.branch(search.mates, going))
            return
        for mate, found, words in places(search):
            if mate.finish_reason is not None:  # it may have been cancelled
                return
            mate.token_ids = list(mate.request.prompt_ids)
            reason = None if found is None else self._show(mate, found, search.moments)
            score = None if found is None else found.score
            if words:
                self._finish(mate, FinishReason.NOT_CHOSEN, words, score)
            elif reason is not None:
                self._finish(mate, reason, score=score)

    def _show(self, mate: Sequence, found: Hypothesis, moments: list[tuple[float, int]]) -> FinishReason | None:
        """Emit a text as if `mate` had decoded it; return its finish reason, or None if it is not a complete text."""
        reason = None
        for (time, step), token, logprob in zip(moments, found.token_ids, found.logprobs, strict=False):
            if mate.finish_reason is not None:
                return None
            mate.token_ids.append(token)
            shown = read_out(self._outputs[mate.request_id], [Choice(token, logprob)])
            self._show_read(mate, shown, step, time)
            reason = shown.reason
        return reason

    def broke(self, sequences: Iterable[Sequence], error: Exception | str) -> None:
        """Fail `sequences` with the error."""
        for sequence in sequences:
            for each in reversed(self._searches.mates(sequence)):
                self._finish(each, FinishReason.ERROR, in_words(error))

    def _decoded(self, sequence: Sequence, read: Read, step: int, now: float) -> None:
        self._show_read(sequence, read, step, now)
        if read.reason is not None:
            self._finish(sequence, read.reason)

    def _show_read(self, sequence: Sequence, read: Read, step: int, now: float) -> None:
        """Emit the last tokens of `sequence`; fail it if they could not be detokenized."""
        first = len(sequence.output_ids) - len(read.choices)
        texts = () if _silent(sequence.request) else read.texts
        for index, (choice, text) in enumerate(zip(read.choices, texts, strict=False), first):
            if sequence.finish_reason is not None:  # it may have been cancelled
                return
            self._send(
                Decoded(
                    now, sequence.request_id, text, step=step, token_id=choice.token_id,
                    index=index, logprob=choice.logprob, top_logprobs=choice.top_logprobs,
                )
            )  # fmt: skip
        if read.error:
            self.broke([sequence], read.error)

    def _send(self, event: Event) -> None:
        """Emit an event of an unfinished request, and carry out cancellations that its listeners ask for."""
        self._mail.send(event)
        if self.noted:
            self.heed()

    def _finish(
        self, sequence: Sequence, reason: FinishReason, error: str = "", score: float | None = None
    ) -> None:
        if sequence.finish_reason is not None:
            return
        freed = self._scheduler.finish(sequence, reason)
        if reason is FinishReason.ERROR:
            self._cache.scrub(freed)
        self._end(sequence, reason, error, score)

    def _end(self, sequence: Sequence, reason: FinishReason, error: str, score: float | None = None) -> None:
        name = sequence.request_id
        output = self._outputs.pop(name, None)
        ended = output.end if output is not None and reason in ENDED_WELL else NO_END
        rest = output.finish() if output is not None else ""
        if output is not None and _silent(sequence.request):
            rest = output.text
        self._mail.send(
            Finished(
                self.clock(), name, rest, reason=str(reason), error=error, token_ids=tuple(sequence.output_ids),
                output_text=output.text if output is not None else "", prompt_tokens=sequence.prompt_length,
                cached_tokens=sequence.cached_tokens, computed_tokens=sequence.computed_tokens,
                restored_tokens=sequence.restored_tokens, written_tokens=sequence.written_tokens,
                shared_pages=sequence.shared_pages, score=score, ended_by=ended.by, stop_reason=ended.stop,
            )
        )  # fmt: skip
        self.chooser.forget(name)
        self._searches.forget(name)
        self._mail.close(name)
        del self.sequences[name]


def _silent(request: Request) -> bool:
    """Return whether the request has no events for single tokens."""
    return request.whole and request.sampling.logprobs is None


def _submitted(request: Request, now: float, arrival: float) -> Submitted:
    return Submitted(
        now, request.request_id, prompt_tokens=len(request.prompt_ids), arrival=arrival, cut_tokens=request.cut_tokens,
        tenant=request.tenant, priority=request.priority,
    )  # fmt: skip
