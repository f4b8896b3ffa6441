"""Move requests through two pools: to a prefill engine, then to a decode engine, and back if a process died.

    queued -> computed at a prefill engine -> offered -> travelling -> computed at a decode engine -> ended
       ^--------------------- its process died, or its pages cannot be had ----------------------|

Only the coordinator's thread may call these classes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from workbench.cluster.apart import pool_messages as message
from workbench.cluster.apart.handover import why_not_apart
from workbench.cluster.apart.lending import TransferKey
from workbench.cluster.apart.pool_slots import PoolSlots, Slot
from workbench.cluster.fleet_request import MAX_LOSSES, FleetRequest
from workbench.cluster.submissions import Submission, Submissions
from workbench.engine import inputs as intake
from workbench.engine.runner_thread import EventSink
from workbench.kv_cache.pages import NULL_PAGE
from workbench.request import FinishReason, Request
from workbench.trace.events import Event, Finished, HandedOver, Moved, Submitted


@dataclass
class Transfer:
    """Pages in transfer: offered by the engine `home`, then requested by the engine `target` (None: not chosen yet)."""

    offer: message.OfferPages
    home: int
    offered_at: float  # time.perf_counter()
    num_pages: int
    target: int | None = None


class PoolRequests:
    """The requests of two pools.

    Args:
        slots: the slots of the pools.
        counts: counters of requests handed over and computed again, and of failed transfers.
        report: receives a line about each listener or sink that raised; it gets no more events.
        max_losses: maximum processes that a request may lose before it fails, since it may be the cause.
    """

    def __init__(
        self, slots: PoolSlots, counts: Counter[str], report: Callable[[str], None], max_losses: int = MAX_LOSSES
    ):
        self.slots, self.counts, self.max_losses = slots, counts, max_losses
        self.submissions = Submissions(report)
        self.transfers: dict[TransferKey, Transfer] = {}

    def submit(self, sink: EventSink, requests: Iterable[FleetRequest]) -> Submission:
        """Submit requests, whose events go to `sink`, and return the submission."""
        submission = self.submissions.add(sink, requests)
        self.arrive()
        return submission

    def arrive(self) -> None:
        """Admit the requests that are due, assign processes to waiting requests and offers, and deliver all events."""
        now = time.perf_counter()
        for submission, each in self.submissions.due(now):
            if self.submissions.is_taken(each):
                error = f"request id {each.name!r} is already taken; ids must differ"
                ends = [each.end(sample, now, FinishReason.REFUSED, error) for sample in each.samples]
                self.submissions.emit_all(submission, each, ends)
            else:
                self.submissions.enter(submission, each)
        for key, transfer in list(self.transfers.items()):
            if transfer.target is None:
                self._place(key)
        while self.submissions.waiting and self._run(self.submissions.waiting[0]):
            pass
        self.submissions.deliver()

    def cancel_id(self, request_id: str) -> None:
        """Cancel a request with all its samples. The id of one sample cancels that sample, if it is served alone."""
        self._cancel(
            each for each in self.submissions.live if request_id in (each.name, each.public and each.public[0])
        )

    def cancel(self, submission: Submission) -> None:
        """Cancel the unfinished requests of a submission, but no requests of other submissions with the same ids."""
        submission.pending.clear()
        self._cancel(submission.live.values())

    def _cancel(self, requests: Iterable[FleetRequest]) -> None:
        for each in tuple(requests):
            each.is_cancelling = True
            if each.replica:
                self.slots.send(self.slots.slots[each.replica - 1], message.Cancel(each.name))
                continue
            self._withdraw(TransferKey(each.name, each.attempts))
            self._end(each, FinishReason.CANCELLED)

    def report(self, slot: Slot, found: message.StepReport) -> None:
        """Process the report of a slot's process after a step."""
        for key in found.adopted:
            self._has_arrived(slot, key)
        for attempt, event in found.events:
            self._event(slot, attempt, event)
        for offer in found.offers:
            self._offered(slot, offer)
        if (ledger := self.slots.ledger) is not None and found.returned:
            self.slots.send_home(ledger.give_back(slot.number, found.returned))
        if found.needs_pages:
            self.recall()

    def recall(self) -> None:
        """Let every engine give back borrowed pages that no sequence references."""
        for slot in self.slots.slots:
            if slot.state == "ready":
                self.slots.send(slot, message.Recall())

    def lost(self, slot: Slot, names: set[str], reason: str) -> None:
        """Move the requests of a dead process to other engines; each emits `Moved` once it continues."""
        for served in [each for each in self.submissions.live if each.name in names]:
            self._drop_bytes(served)
            self.transfers.pop(TransferKey(served.name, served.attempts), None)
            self._lose(served, f"its process ended: {reason}")

    def end_all(self, reason: FinishReason, error: str) -> None:
        """End all requests because the pools close."""
        for submission in self.submissions:
            submission.pending.clear()
            submission.error = error
        for each in self.submissions.live:
            self._end(each, reason, error)
        self.transfers.clear()  # no request is left that `arrive` could place
        self.submissions.deliver()

    def _run(self, served: FleetRequest) -> bool:
        """Assign the first waiting request to a process, up to its first token or whole; return False while it must
        wait for one."""
        attempt, name = served.attempt(), served.name
        if attempt.lost:
            self._end(served, FinishReason.ERROR, attempt.lost[0][1])
            return True
        prefill, decode = self.slots.pool("prefill"), self.slots.pool("decode")
        (request,) = attempt.requests
        whole = bool(why_not_apart(request)) or not decode or not prefill
        pool = (self.slots.pool("any") or decode or prefill) if whole else prefill
        ready = [slot for slot in pool if slot.state == "ready"]
        if not ready:
            if pool or any(each.will_serve for each in self.slots.slots):
                return False  # a process is being started, or will be
            self._end(served, FinishReason.ERROR, "no engine is left: their processes ended too often")
            return True
        slot = min(ready, key=lambda each: (len(each.requests), each.number))
        channel, served.send_to = None, None
        if self.slots.transfer == "gloo" and not whole:
            targets = [each for each in decode if each.state == "ready"]
            if not targets:
                return False
            coming = Counter(each.send_to[0] for each in self.submissions.live if each.send_to and not each.is_decoding)
            target = min(targets, key=lambda each: (len(each.requests) + coming[each.number], each.number))
            served.send_to = target.number, target.restarts
            channel = self.slots.channel(slot, target)
        served.replica, served.is_decoding = slot.number + 1, whole
        served.attempts += 1
        self.submissions.waiting.remove(served)
        slot.requests.add(name)
        if served.moved_from:
            now, tokens = time.perf_counter(), max(len(each.token_ids) for each in served.samples)
            self.submissions.emit_of(served, None, Moved(
                now, name, replica=served.replica, source=served.moved_from, reason=served.move_reason,
                generated_tokens=tokens,
            ))  # fmt: skip
        self.slots.send(slot, message.Run(request, served.attempts, not whole, channel))
        return True

    def _offered(self, slot: Slot, offer: message.OfferPages) -> None:
        """Receive the offered pages of a computed prompt."""
        key = offer.key
        if self.slots.ledger is not None:
            self.slots.ledger.offer(key, slot.number, offer.handed.pages)
        pages = sum(page != NULL_PAGE for group in offer.handed.pages for page in group)
        self.transfers[key] = Transfer(offer, slot.number, time.perf_counter(), pages)
        served = self.submissions.find(key.request_id)
        if served is None or served.is_cancelling or served.attempts != key.attempt:
            self._withdraw(key)
            if served is not None and served.is_cancelling and not served.replica:
                self._end(served, FinishReason.CANCELLED)
            return
        self._place(key)

    def _place(self, key: TransferKey) -> None:
        """Assign an offer to a decode engine. The offer waits while an engine is starting; if none will start, its
        request waits for a process again."""
        transfer, served = self.transfers[key], self.submissions.find(key.request_id)
        assert served is not None
        pool = self.slots.pool("decode")
        ready = [slot for slot in pool if slot.state == "ready"]
        if served.send_to is not None:
            pool = ready = [slot for slot in ready if (slot.number, slot.restarts) == served.send_to]
        if not ready:
            if not pool:
                self._withdraw(key)
                self._lose(served, "no process is left to take its pages")
            return
        slot = min(ready, key=lambda each: (len(each.requests), each.number))
        if self.slots.ledger is not None:
            self.slots.ledger.claim(key, slot.number)
        transfer.target, served.replica = slot.number, slot.number + 1
        served.is_decoding = True
        slot.requests.add(key.request_id)
        offer = transfer.offer
        self.slots.send(slot, message.Adopt(key, offer.request, offer.handed, offer.channel, offer.sent_pass))

    def _withdraw(self, key: TransferKey) -> None:
        """End an unclaimed transfer."""
        if self.transfers.pop(key, None) is None:
            return
        if self.slots.ledger is not None:
            self.slots.send_home(self.slots.ledger.withdraw(key))
        for slot in self.slots.pool("decode") if self.slots.transfer == "gloo" else ():
            if slot.state == "ready":
                self.slots.send(slot, message.Drop(key))

    def _has_arrived(self, slot: Slot, key: TransferKey) -> None:
        """Emit a handover: the engine at `slot` has the pages of a transfer."""
        transfer = self.transfers.pop(key, None)
        served = self.submissions.find(key.request_id)
        if transfer is None or served is None or served.attempts != key.attempt:
            return
        self.counts["handed over"] += 1
        if transfer.offer.channel is not None:
            self.slots.has_arrived(transfer.offer.channel)
        now, pages = time.perf_counter(), transfer.offer.handed.pages
        sent = 0 if self.slots.layout is None or transfer.offer.channel is None else self.slots.layout.bytes_of(pages)
        self.submissions.emit_of(served, None, HandedOver(
            now, key.request_id, replica=slot.number + 1, source=transfer.home + 1, pages=transfer.num_pages,
            bytes=sent, seconds=now - transfer.offered_at,
        ))  # fmt: skip

    def _event(self, slot: Slot, attempt: int, event: Event) -> None:
        event = replace(event, time=event.time + slot.clock_ahead, replica=slot.number + 1)
        name = event.request_id
        if not name:  # a step event
            self.submissions.emit(event)
            return
        served = self.submissions.find(name)
        if served is None or served.replica != slot.number + 1 or served.attempts != attempt:
            return  # the attempt was given up
        sample = served.samples[event.sample]
        match event:
            case Submitted():
                if self.transfers.pop(TransferKey(name, attempt), None) is not None:  # it began without the pages
                    self.counts["transfers that failed"] += 1
            case Finished(reason=FinishReason.MOVED):
                served.replica = 0
                slot.requests.discard(name)
            case Finished():
                self.transfers.pop(TransferKey(name, attempt), None)
                if sample.moved is not None:  # the engine that it left wrote the pages of its prompt
                    adopted = event.prompt_tokens // slot.config.cache.page_size * slot.config.cache.page_size
                    event = replace(event, written_tokens=max(0, event.written_tokens - adopted))
                self._drop_bytes(served)
        new = sample.take(event)
        if new is None:
            return
        self.submissions.emit_of(served, sample, new)
        if not served.unfinished:
            self.submissions.leave(served)
            slot.requests.discard(name)

    def _drop_bytes(self, served: FleetRequest) -> None:
        """Make the decode engine drop the layers that it received: no handover follows."""
        if served.send_to is not None and not served.is_decoding:
            key = TransferKey(served.name, served.attempts)
            target = self.slots.slots[served.send_to[0]]
            if target.state == "ready":
                self.slots.send(target, message.Drop(key))

    def _lose(self, served: FleetRequest, reason: str) -> None:
        """Let a request that has lost its process or its pages wait for another process, unless it must end."""
        served.lose(reason)
        if served.is_cancelling:
            self._end(served, FinishReason.CANCELLED)
        elif why := served.why_given_up(self.max_losses):
            self._end(served, FinishReason.ERROR, why)
        else:
            self.counts["computed again"] += 1
            self.submissions.wait(served)

    def _end(self, served: FleetRequest, reason: FinishReason, error: str = "") -> None:
        """End the samples of a request that is at no process."""
        if served in self.submissions.waiting:
            self.submissions.waiting.remove(served)
        for sample in served.unfinished:
            self.submissions.emit_of(served, sample, served.end(sample, time.perf_counter(), reason, error))
        self.submissions.leave(served)


def apart(request: Request, now: float) -> Iterator[FleetRequest]:
    """Yield the requests that the pools serve in place of `request`: one for each sample, or one for all samples if
    they share state. They arrive `request.arrival` seconds after `now`.
    """
    asked, arrival = request.sampling, now + intake.arrival(request)
    is_apart = asked.num_sequences == asked.n > 1 and not asked.beams
    for number, each in enumerate(intake.split_samples(request) if is_apart else (request,)):
        yield FleetRequest(each, arrival, public=(request.request_id, number) if is_apart else None)
