"""Place the requests of a fleet on its replicas, and carry them over where one is lost or leaves.

submit ---> waiting ---> router ---> replica: reports ---> sinks, listeners      lost or leaving: back to waiting
                                                                                 after what was emitted

A front has no thread and no clock of its own: every call belongs to one thread, and nothing waits. What a request emits
does not depend on where it is computed, and every sample ends exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from workbench.cluster.accounts import FleetAccount
from workbench.cluster.fleet_request import FleetRequest, SampleState
from workbench.cluster.prefixes import PrefixGuess
from workbench.cluster.replica import PageCounts, Replica, Report
from workbench.cluster.replica_view import ReplicaView, as_job, prompt_of
from workbench.cluster.submissions import Submission, Submissions
from workbench.cluster.variants import VariantShares
from workbench.engine.request_events import submitted_event
from workbench.engine.resume import why_not_resumable
from workbench.engine.runner_thread import EventSink
from workbench.progress import to_stderr
from workbench.request import FinishReason, Request
from workbench.simulate.routers import AnyRouter, routing_options
from workbench.trace.events import Cancelled, Decoded, Event, Finished, Moved, Prefilled, Routed


@dataclass(frozen=True)
class FleetLimits:
    """Bounds of a fleet.

    Args:
        page_size: tokens of a page of the replicas' prefix caches; None without one.
        replica_samples: samples that a replica has at most, running and waiting; more wait at the front.
        waiting: requests that wait at the front at most; more are refused.
        losses: replicas that a request may lose; a request that loses more may be what ends them, and fails.
    """

    page_size: int | None = None
    replica_samples: int = 64
    waiting: int = 4096
    losses: int = 3


class Front:
    """The front of a fleet.

    Attributes:
        accounts: what each variant did.
        variants: how requests are divided among variants.
        submissions: what was submitted and has not ended; its listeners hear every event.
    """

    def __init__(
        self,
        router: AnyRouter,
        limits: FleetLimits,
        clock: Callable[[], float],
        on_gone: Callable[[int], None] = lambda number: None,
        report: Callable[[str], None] = to_stderr,
    ):
        """Create a front without replicas; `on_gone` is called with the number of each that was lost or has left.

        `report` gets a line on each that was lost, and on listeners and sinks that raised."""
        self.router, self.limits, self.clock, self._on_gone = router, limits, clock, on_gone
        self.replicas: dict[int, ReplicaView] = {}
        self.variants = VariantShares()
        self.accounts: dict[str, FleetAccount] = {"": FleetAccount()}
        self.submissions, self._report = Submissions(report), report
        self.num_lost = 0  # replicas
        self._waiting: list[FleetRequest] = []  # in order of arrival

    @property
    def num_waiting(self) -> int:
        """Return the number of requests that wait at the front."""
        return len(self._waiting)

    @property
    def num_requests(self) -> int:
        """Return the number of requests in the fleet that have arrived and not ended."""
        return self.submissions.num_live

    @property
    def pages(self) -> PageCounts:
        """Return the pages of all replicas together, as each reported them last."""
        total = PageCounts()
        for each in tuple(self.replicas.values()):  # any thread may ask
            total = total.plus(each.pages)
        return total

    def num_on(self, number: int) -> int:
        """Return the number of requests that a replica has; 0 of an unknown one."""
        return len(self.replicas[number].requests) if number in self.replicas else 0

    # Replicas.

    def add_replica(self, handle: Replica, variant: str = "", pages: PageCounts = PageCounts()) -> None:  # noqa: B008 (a frozen value)
        """Take in a replica that is ready, with the pages that it has."""
        guess = PrefixGuess(self.limits.page_size, sum(pages))
        self.replicas[handle.number] = ReplicaView(handle, variant, guess, pages=pages)
        self.variants = self.variants.with_available(variant)
        self._place_waiting()
        self.submissions.deliver()

    def lose_replica(self, number: int, reason: str) -> None:
        """Carry over what a replica had, which ended by itself; an unknown one is ignored."""
        view = self.replicas.pop(number, None)
        if view is None:
            return
        self.num_lost += 1
        self._report(f"{reason} ({len(view.requests)} requests go on elsewhere)")
        mine = list(view.requests.values())
        for each in mine:
            each.losses += 1
        self._take_back(view, mine, reason)
        self._on_gone(number)
        self._place_waiting()
        self.submissions.deliver()

    def retire_replica(self, number: int, hand_over: bool = True) -> None:
        """Let a replica leave: it gets nothing new, and is stopped when it is empty.

        Args:
            number: the replica; an unknown one is ignored.
            hand_over: its requests go on elsewhere at once; otherwise they end there.
        """
        view = self.replicas.get(number)
        if view is None:
            return
        view.is_leaving = True
        if hand_over:
            mine = [  # the others end there
                each
                for each in view.requests.values()
                if not each.is_cancelling and not why_not_resumable(each.request)
            ]
            for each in mine:
                self._cancel_on(view, each)
            self._take_back(view, mine, f"replica {number} leaves")
        self._stop_if_empty(view)
        self._place_waiting()
        self.submissions.deliver()

    def take_report(self, number: int, report: Report) -> None:
        """Take a message of a replica; one that is unknown, lost or gone is not heard any more."""
        view = self.replicas.get(number)
        if view is None:
            return
        view.pages = report.pages
        whole_step: list[Event] = []
        for event in report.events:
            if not event.request_id:
                event = replace(event, replica=event.replica or number)  # pools name their engines
                self.submissions.emit(event)
                whole_step.append(event)
                continue
            known = view.names.get(event.request_id)
            if known is None:  # of what was taken from it
                continue
            ended = isinstance(event, Finished) and event.reason == FinishReason.CANCELLED
            if ended and not known[0].is_cancelling:
                view.handle.stop()
                why = report.error or "gave up its requests"
                return self.lose_replica(number, f"the engine of replica {number}: {why}")
            self._take(view, *known, event)
        self.submissions.add_steps(whole_step, view.requests)
        self._stop_if_empty(view)
        self._place_waiting()
        self.submissions.deliver()

    def give_up(self, variant: str, why: str) -> None:
        """Give up a variant of which no replica will come: its requests go to the other variants, by their shares.

        Where no other has a share, they end with the error `why`, and those that come are refused with it. Requests of
        the others are not touched."""
        self.variants = self.variants.without(variant, why)
        if variant in self.variants.unavailable:
            for each in [each for each in self._waiting if each.variant == variant]:
                self._waiting.remove(each)
                submission = self.submissions.of(each.name)
                self._end_samples(each, FinishReason.ERROR, why)
                if not submission.live and not submission.pending:
                    submission.error = submission.error or why
        self._place_waiting()
        self.submissions.deliver()

    def _stop_if_empty(self, view: ReplicaView) -> None:
        if view.is_leaving and not view.requests and self.replicas.pop(view.number, None) is not None:
            view.handle.stop()
            self._on_gone(view.number)

    # Requests.

    def submit(self, sink: EventSink, requests: Iterable[Request], is_single: bool = False) -> Submission:
        """Submit requests, each at its time of arrival after now; `sink` has their events.

        `is_single`: the sink is given the error of a request that is refused.
        """
        submission = self.submissions.add(sink, requests, is_single, self.clock())
        self.arrive()
        return submission

    def arrive(self) -> None:
        """Let the requests arrive that are due now."""
        for submission in self.submissions:
            while submission.pending and submission.pending[-1].arrival <= self.clock():
                self._arrive(submission, submission.pending.pop())
        self._place_waiting()
        self.submissions.deliver()

    def cancel(self, submission: Submission) -> None:
        """Cancel what has not ended of a submission: it ends once its replicas say so, or are lost."""
        submission.pending.clear()
        for each in list(submission.live.values()):
            if each.is_cancelling:
                continue
            each.is_cancelling = True
            if each.replica:
                self._cancel_on(self.replicas[each.replica], each)
            else:
                self._end_cancelled(each)
        self.submissions.deliver()

    def end_all(self, error: str) -> None:
        """End every request now with an error, whatever its replica does: the fleet itself ends."""
        for submission in self.submissions:
            submission.pending.clear()
            submission.error = error
            for each in list(submission.live.values()):
                if view := self.replicas.get(each.replica):
                    self._cancel_on(view, each)
                    self._take_off(view, each)
                    self._lose(each, error)
                self._end_samples(each, FinishReason.ERROR, error)
        self._waiting.clear()
        self.submissions.deliver()

    def _arrive(self, submission: Submission, each: FleetRequest) -> None:
        refused, by, variant = "", "", self.variants.of(each.request)
        if self.submissions.is_taken(each):
            refused = f"request id {each.name!r} is already taken; ids must differ"
        elif len(self._waiting) >= self.limits.waiting:
            by = "overloaded"
            refused = f"request {each.name}: the fleet is full: {len(self._waiting)} requests wait; ask again later"
        elif variant in self.variants.unavailable:
            refused, by = f"request {each.name}: {self.variants.unavailable[variant]}", "unavailable"
        if refused:
            now = self.clock()
            end = Finished(now, each.name, reason=str(FinishReason.REFUSED), error=refused, ended_by=by)
            for event in (submitted_event(each.request, now, each.arrival), end):
                self.submissions.emit(event)
                submission.outbox.append(event)
            submission.error = submission.error or refused * submission.is_single
            return
        each.variant = variant
        self.accounts[variant].submitted += len(each.samples)
        self.submissions.enter(submission, each)
        self._wait(each)
        event = submitted_event(each.request, self.clock(), each.arrival)
        events = [replace(event, sample=sample.number) for sample in each.samples]
        submission.outbox += events  # all before a listener can cancel
        for event in events:
            self.submissions.emit(event)

    def _wait(self, each: FleetRequest) -> None:
        place = sum(other.order < each.order for other in self._waiting)
        self._waiting.insert(place, each)

    def _change_variant(self, each: FleetRequest) -> None:
        self.accounts[each.variant].left += len(each.unfinished)
        each.variant = self.variants.of(each.request)
        self.accounts[each.variant].submitted += len(each.unfinished)

    # Placement.

    def _place_waiting(self) -> None:
        """Send waiting requests, in order of arrival, as long as replicas of their variant have room."""
        full: set[str] = set()
        present = {*self.variants.shares, *(view.variant for view in self.replicas.values() if not view.is_leaving)}
        for each in self._waiting:
            if each.variant not in present:  # it was withdrawn
                self._change_variant(each)
        for each in list(self._waiting):
            if each.variant in full or each.is_cancelling or each not in self._waiting:  # a listener cancelled it
                continue
            room = [
                view
                for view in self.replicas.values()
                if view.variant == each.variant
                and not view.is_leaving
                and (not view.requests or view.num_requests + len(each.unfinished) <= self.limits.replica_samples)
            ]
            if not room:
                full.add(each.variant)
                continue
            self._waiting.remove(each)
            self._place(each, room)

    def _place(self, each: FleetRequest, room: list[ReplicaView]) -> None:
        attempt = each.attempt()
        requests = attempt.requests
        for sample, why in attempt.lost:
            words = f"its replica ended ({each.move_reason}); {why.split(';')[0]}"
            self._end_sample(each, sample, FinishReason.ERROR, words)
        if not requests or each.is_cancelling:
            return
        job, room = as_job(each, requests[0]), sorted(room, key=lambda view: view.number)
        number = self.router.choose(job, room).number
        view = self.replicas[number]
        now, name = self.clock(), each.name  # before the replica can have begun
        reason, options = self.router.reason(job, view, room), routing_options(room, job)
        each.replica, each.pending_tokens = number, each.num_tokens
        view.requests[each.name] = each
        view.names |= {name: (each, sample) for name, sample in attempt.names.items()}
        for request in requests:
            view.prefixes.enter((*job.prompt, *request.generated_ids), request.cache_salt)
        view.handle.submit(requests)
        if each.moved_from:
            self.accounts[each.variant].moves += 1
        for sample in each.unfinished:
            if each.moved_from:
                self.submissions.emit_of(each, sample, Moved(
                    now, name, replica=number, source=each.moved_from, reason=each.move_reason,
                    generated_tokens=len(sample.token_ids),
                ))  # fmt: skip
            self.submissions.emit_of(each, sample, Routed(now, name, replica=number, reason=reason, options=options))

    def _take_back(self, view: ReplicaView, requests: list[FleetRequest], reason: str) -> None:
        """Take requests from a replica that is lost or leaves: each waits for another, unless it is to end."""
        for each in requests:  # all are at the front before a listener hears of one
            self._take_off(view, each)
            self._lose(each, reason)
            self._wait(each)
        for each in requests:
            if each not in self._waiting:  # a listener cancelled it
                continue
            if each.is_cancelling:
                self._end_cancelled(each)
            elif each.losses > self.limits.losses:
                self._waiting.remove(each)
                words = f"{each.losses} replicas ended while they served it, the last one: {reason}"
                self._end_samples(each, FinishReason.ERROR, words)

    def _end_cancelled(self, each: FleetRequest) -> None:
        """End a request that was cancelled and is at the front."""
        if each in self._waiting:
            self._waiting.remove(each)
        self.submissions.emit_of(each, None, Cancelled(self.clock(), each.name))
        self._end_samples(each, FinishReason.CANCELLED, "")

    def _lose(self, each: FleetRequest, reason: str) -> None:
        account = self.accounts[each.variant]
        account.lost_attempts += len(each.unfinished)
        account.lost_tokens += sum(sample.computed_now for sample in each.unfinished)
        each.lose(reason)

    def _take_off(self, view: ReplicaView, each: FleetRequest) -> None:
        view.requests.pop(each.name, None)
        for name in each.all_names:
            view.names.pop(name, None)

    def _cancel_on(self, view: ReplicaView, each: FleetRequest) -> None:
        for name, (owner, _) in list(view.names.items()):
            if owner is each:
                view.handle.cancel(name)

    # Events.

    def _take(self, view: ReplicaView, each: FleetRequest, number: int | None, event: Event) -> None:
        """Take an event of a request from its replica; `number` is the sample, None where the event says it."""
        sample = each.samples[event.sample if number is None else number]
        if isinstance(event, Cancelled) and not each.is_cancelling:
            return
        if isinstance(event, Prefilled):
            each.pending_tokens = max(0, each.num_tokens - event.computed)
        elif isinstance(event, Decoded):
            each.pending_tokens = 0
        new = sample.take(event)
        if new is None:
            return
        self.submissions.emit_of(each, sample, replace(new, replica=new.replica or view.number))
        if isinstance(new, Finished):
            self._ended(each, sample, new)
            view.prefixes.enter((*prompt_of(each.request), *new.token_ids), each.request.cache_salt)

    def _end_samples(self, each: FleetRequest, reason: FinishReason, error: str) -> None:
        for sample in each.unfinished:
            self._end_sample(each, sample, reason, error)

    def _end_sample(self, each: FleetRequest, sample: SampleState, reason: FinishReason, error: str) -> None:
        """End a sample that no replica has."""
        end = Finished(
            self.clock(), each.name, reason=str(reason), error=error, token_ids=tuple(sample.token_ids),
            prompt_tokens=len(prompt_of(each.request)),
        )  # fmt: skip
        new = sample.take(end)
        assert isinstance(new, Finished)
        self.submissions.emit_of(each, sample, new)
        self._ended(each, sample, new)

    def _ended(self, each: FleetRequest, sample: SampleState, end: Finished) -> None:
        self.accounts[each.variant].add(end, each.arrival, sample.first_token, sample.last_token)
        submission = self.submissions.of(each.name)
        if end.reason == FinishReason.REFUSED and submission.is_single:
            submission.error = submission.error or end.error
        if each.unfinished:
            return
        if each.replica in self.replicas:
            self._take_off(self.replicas[each.replica], each)
        self.submissions.leave(each)
