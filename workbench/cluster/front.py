"""Place the requests of a fleet on its replicas, and move them when a replica is lost or leaves.

submit ---> waiting ---> router ---> replica: reports ---> sinks, listeners      lost or leaving: back to waiting
                                                                                 after what was emitted

A front has no thread and no clock of its own: one thread makes all calls, and no call blocks. The events of a request
do not depend on the replica that computes it, and every sample ends exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from workbench.cluster.accounts import FleetAccount
from workbench.cluster.fleet_request import MAX_LOSSES, FleetRequest, SampleState, prompt_of
from workbench.cluster.prefixes import PrefixGuess
from workbench.cluster.replica import PageCounts, Replica, Report
from workbench.cluster.replica_view import ReplicaView, as_job
from workbench.cluster.submissions import Submission, Submissions
from workbench.cluster.variants import VariantShares
from workbench.engine import inputs as intake
from workbench.engine.request_events import submitted_event
from workbench.engine.resume import why_not_resumable
from workbench.engine.runner_thread import EventSink
from workbench.progress import to_stderr
from workbench.request import FinishReason, Request
from workbench.simulate.routers import AnyRouter, routing_options
from workbench.trace.events import Cancelled, Decoded, Event, Finished, Moved, Prefilled, Routed


@dataclass(frozen=True)
class FleetLimits:
    """The limits within which a front serves a fleet.

    Args:
        page_size: tokens per page of the replicas' prefix caches; None without prefix caches.
        replica_samples: maximum samples of a replica, running and waiting; others wait at the front.
        waiting: maximum requests waiting at the front; others are refused.
        losses: maximum replicas that a request may lose before it fails, since it may be the cause.
    """

    page_size: int | None = None
    replica_samples: int = 64
    waiting: int = 4096
    losses: int = MAX_LOSSES


class Front:
    """The front of a fleet: it places requests on replicas and passes events to clients.

    Attributes:
        accounts: account of each variant.
        variants: division of the requests among variants.
        submissions: unfinished submissions; its listeners receive every event.
    """

    def __init__(
        self,
        router: AnyRouter,
        limits: FleetLimits,
        clock: Callable[[], float],
        on_gone: Callable[[int], None] = lambda number: None,
        report: Callable[[str], None] = to_stderr,
    ):
        """Create a front without replicas; `on_gone` is called with the number of each replica lost or retired.

        `report` gets a line on each lost replica, and on each listener or sink that raised."""
        self.router, self.limits, self.clock, self._on_gone = router, limits, clock, on_gone
        self.replicas: dict[int, ReplicaView] = {}
        self.variants = VariantShares()
        self.accounts: dict[str, FleetAccount] = {"": FleetAccount()}
        self.submissions, self._report = Submissions(report), report
        self.num_lost = 0  # lost replicas

    @property
    def num_waiting(self) -> int:
        """Return the number of requests that wait at the front."""
        return len(self.submissions.waiting)

    @property
    def num_requests(self) -> int:
        """Return the number of requests in the fleet that have arrived and not ended."""
        return self.submissions.num_live

    @property
    def pages(self) -> PageCounts:
        """Return the numbers of pages in use, idle and free, over all replicas, as last reported."""
        total = PageCounts()
        for each in tuple(self.replicas.values()):  # called in any thread
            total = total.plus(each.pages)
        return total

    def num_on(self, number: int) -> int:
        """Return the number of requests at a replica; 0 for an unknown replica."""
        return len(self.replicas[number].requests) if number in self.replicas else 0

    # Replicas.

    def add_replica(self, handle: Replica, variant: str = "", pages: PageCounts = PageCounts()) -> None:  # noqa: B008 (a frozen value)
        """Add a ready replica with its pages."""
        guess = PrefixGuess(self.limits.page_size, sum(pages))
        self.replicas[handle.number] = ReplicaView(handle, variant, guess, pages=pages)
        self.variants = self.variants.with_available(variant)
        self._place_waiting()
        self.submissions.deliver()

    def lose_replica(self, number: int, reason: str) -> None:
        """Move the requests of a replica that ended by itself; an unknown number is ignored."""
        view = self.replicas.pop(number, None)
        if view is None:
            return
        self.num_lost += 1
        self._report(f"{reason} ({len(view.requests)} requests go on elsewhere)")
        self._take_back(view, list(view.requests.values()), reason)
        self._on_gone(number)
        self._place_waiting()
        self.submissions.deliver()

    def retire_replica(self, number: int, hand_over: bool = True) -> None:
        """Retire a replica: it gets no new requests, and is stopped when it has no requests left.

        Args:
            number: the replica; an unknown number is ignored.
            hand_over: move its requests elsewhere at once; otherwise they finish there.
        """
        view = self.replicas.get(number)
        if view is None:
            return
        view.is_leaving = True
        if hand_over:
            mine = [  # other requests finish there
                each
                for each in view.requests.values()
                if not each.is_cancelling and not why_not_resumable(each.request)
            ]
            for each in mine:
                self._cancel_on(view, each)
            self._take_back(view, mine, f"replica {number} leaves", is_planned=True)
        self._stop_if_empty(view)
        self._place_waiting()
        self.submissions.deliver()

    def take_report(self, number: int, report: Report) -> None:
        """Process a replica's report; reports of unknown, lost or retired replicas are ignored."""
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
            if known is None:  # a request that was moved away
                continue
            self._take(view, *known, event)
        self.submissions.add_steps(whole_step, view.requests)
        self._stop_if_empty(view)
        self._place_waiting()
        self.submissions.deliver()

    def give_up(self, variant: str, why: str) -> None:
        """Give up a variant that has no replica left to start: its requests go to other variants by their shares.

        If no other variant has a share, they end with the error `why`, and new ones are refused with it. Requests of
        other variants are not affected."""
        self.variants = self.variants.without(variant, why)
        if variant in self.variants.unavailable:
            for each in [each for each in self.submissions.waiting if each.variant == variant]:
                if each not in self.submissions.waiting:  # a listener cancelled it
                    continue
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
        """Submit requests, each to arrive `arrival` seconds from now, and return the submission; `sink` gets their
        events.

        `is_single`: the error of a refused request goes to the sink.
        """
        now = self.clock()
        made = [FleetRequest(each, now + intake.arrival(each)) for each in requests]
        submission = self.submissions.add(sink, made, is_single)
        self.arrive()
        return submission

    def arrive(self) -> None:
        """Admit the requests that are due now."""
        for submission, each in self.submissions.due(self.clock()):
            self._arrive(submission, each)
        self._place_waiting()
        self.submissions.deliver()

    def seconds_to_arrival(self) -> float | None:
        """Return the seconds until the next submitted request arrives; None if all have arrived."""
        coming = self.submissions.next_arrival()
        return None if coming is None else max(0.0, coming - self.clock())

    def cancel(self, submission: Submission) -> None:
        """Cancel the unfinished requests of a submission. Each ends once its replica reports its end or is lost."""
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
        """End every request now with an error, without waiting for replicas, because the fleet ends."""
        for submission in self.submissions:
            submission.pending.clear()
            submission.error = error
            for each in list(submission.live.values()):
                if view := self.replicas.get(each.replica):
                    self._cancel_on(view, each)
                    self._take_off(view, each)
                    self._lose(each, error)
                self._end_samples(each, FinishReason.ERROR, error)
        self.submissions.deliver()

    def _arrive(self, submission: Submission, each: FleetRequest) -> None:
        refused, by, variant = "", "", self.variants.of(each.request)
        if self.submissions.is_taken(each):
            refused = f"request id {each.name!r} is already taken; ids must differ"
        elif self.num_waiting >= self.limits.waiting:
            by = "overloaded"
            refused = f"request {each.name}: the fleet is full, with {self.num_waiting} waiting; ask again later"
        elif variant in self.variants.unavailable:
            refused, by = f"request {each.name}: {self.variants.unavailable[variant]}", "unavailable"
        if refused:
            now = self.clock()
            end = Finished(now, each.name, reason=str(FinishReason.REFUSED), error=refused, ended_by=by)
            self.submissions.emit_all(submission, each, (submitted_event(each.request, now, each.arrival), end))
            submission.error = submission.error or refused * submission.is_single
            return
        each.variant = variant
        self.accounts[variant].submitted += len(each.samples)
        self.submissions.enter(submission, each)
        event = submitted_event(each.request, self.clock(), each.arrival)
        taken = (sample.take(replace(event, sample=sample.number)) for sample in each.samples)
        self.submissions.emit_all(submission, each, (event for event in taken if event is not None))

    def _change_variant(self, each: FleetRequest) -> None:
        self.accounts[each.variant].left += len(each.unfinished)
        each.variant = self.variants.of(each.request)
        self.accounts[each.variant].submitted += len(each.unfinished)

    # Placement.

    def _place_waiting(self) -> None:
        """Send waiting requests, in order of arrival, as long as replicas of their variant have room."""
        full, waiting = set[str](), self.submissions.waiting
        present = {*self.variants.shares, *(view.variant for view in self.replicas.values() if not view.is_leaving)}
        for each in waiting:
            if each.variant not in present:  # the variant was withdrawn
                self._change_variant(each)
        for each in list(waiting):
            if each.variant in full or each.is_cancelling or each not in waiting:  # a listener cancelled it
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
            waiting.remove(each)
            self._place(each, room)

    def _place(self, each: FleetRequest, room: list[ReplicaView]) -> None:
        attempt = each.attempt()
        requests = attempt.requests
        for sample, error in attempt.lost:
            self._end_sample(each, sample, FinishReason.ERROR, error)
        if not requests or each.is_cancelling:
            return
        job, room = as_job(each, requests[0]), sorted(room, key=lambda view: view.number)
        number = self.router.choose(job, room).number
        view = self.replicas[number]
        now, name = self.clock(), each.name  # time before the replica can begin
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

    def _take_back(
        self, view: ReplicaView, requests: list[FleetRequest], reason: str, is_planned: bool = False
    ) -> None:
        """Take requests from a lost or leaving replica: each waits for another replica, unless it must end."""
        for each in requests:  # move all to the front before a listener is called
            self._take_off(view, each)
            self._lose(each, reason, is_planned)
            self.submissions.wait(each)
        for each in requests:
            if each not in self.submissions.waiting:  # a listener cancelled it
                continue
            if each.is_cancelling:
                self._end_cancelled(each)
            elif why := each.why_given_up(self.limits.losses):
                self._end_samples(each, FinishReason.ERROR, why)

    def _end_cancelled(self, each: FleetRequest) -> None:
        """End a cancelled request that waits at the front."""
        self.submissions.emit_of(each, None, Cancelled(self.clock(), each.name))
        self._end_samples(each, FinishReason.CANCELLED, "")

    def _lose(self, each: FleetRequest, reason: str, is_planned: bool = False) -> None:
        account = self.accounts[each.variant]
        account.lost_attempts += len(each.unfinished)
        account.lost_tokens += sum(sample.computed_now for sample in each.unfinished)
        each.lose(reason, is_planned)

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
        """Take a request's event from its replica; `number` is the sample, None if the event names it."""
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
        if each in self.submissions.waiting:
            self.submissions.waiting.remove(each)
        for sample in each.unfinished:
            self._end_sample(each, sample, reason, error)

    def _end_sample(self, each: FleetRequest, sample: SampleState, reason: FinishReason, error: str) -> None:
        """End a sample that is at no replica, unless a listener has cancelled it."""
        if sample.is_finished:
            return
        submission, end = self.submissions.of(each.name), each.end(sample, self.clock(), reason, error)
        self._ended(each, sample, end)
        self.submissions.emit_all(submission, each, [end])

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
