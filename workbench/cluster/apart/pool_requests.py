"""Carry requests through two pools: to a prefill engine, over to a decode engine, and back where a process died.

    queued -> computed at a prefill engine -> offered -> travelling -> computed at a decode engine -> ended
       ^--------------------- its process died, or its pages cannot be had ----------------------|

All of it belongs to the coordinator's thread.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from workbench.cluster.apart import pool_messages as message
from workbench.cluster.apart.handover import why_not_apart
from workbench.cluster.apart.lending import TransferKey
from workbench.cluster.apart.pool_slots import PoolSlots, Slot
from workbench.cluster.replica_view import prompt_of
from workbench.engine.inputs import sample_id
from workbench.errors import describe_error
from workbench.kv_cache.pages import NULL_PAGE
from workbench.request import FinishReason, Request
from workbench.trace.events import Decoded, Event, Finished, HandedOver, Moved, Prefilled, Submitted

MAX_ATTEMPTS = 5  # of a request: one that ends every process that it comes to must not end them all
Emit = Callable[[Event], None]


@dataclass
class PoolRequest:
    """A request that is being served: one sample of what was asked, or all where they share state.

    `public` is the id and the number of a sample that is served alone, as its events have them.
    """

    request: Request
    emit: Emit
    public: tuple[str, int] | None = None
    attempt: int = 0
    slot: int | None = None  # where it is computed now
    is_decoding: bool = False
    send_to: tuple[int, int] | None = None  # where its bytes go: a place, and the process there by its number
    generated: list[int] = field(default_factory=list)
    submitted: set[int] = field(default_factory=set)  # samples
    ended: set[int] = field(default_factory=set)  # samples
    moved: list[Finished] = field(default_factory=list)  # ends in engines that it left
    left: tuple[int, str] | None = None  # the engine whose process died under it, until it goes on at another; and why
    is_cancelled: bool = False
    has_events: bool = False  # of tokens, which a request computed anew would emit again
    num_scored: int = 0  # log-probabilities of the prompt that were emitted
    num_scored_again: int = 0  # by this attempt

    def __post_init__(self) -> None:
        self.generated = list(self.request.generated_ids)

    @property
    def names(self) -> set[str]:
        """Return the ids of all its samples."""
        return {sample_id(self.request.request_id, at) for at in range(self.request.sampling.num_sequences)}

    @property
    def unfinished(self) -> list[int]:
        """Return the samples that have not ended."""
        return [at for at in range(self.request.sampling.num_sequences) if at not in self.ended]


@dataclass
class Transfer:
    """Pages on their way: offered by the engine `home`, and sent for by `target` once there is one."""

    offer: message.OfferPages
    home: int
    offered_at: float  # time.perf_counter()
    num_pages: int
    target: int | None = None


class PoolRequests:
    """The requests of two pools.

    Args:
        slots: the places of the pools.
        counts: of what happened: handed over, computed again, transfers that failed.
        listener: receives every event that any request's own emitter does, and those of steps; it must not raise.
        tell: receives a line about each emitter that raised, which gets no more events.
    """

    def __init__(self, slots: PoolSlots, counts: Counter[str], listener: Emit | None, tell: Callable[[str], None]):
        self.slots, self.counts, self.listener, self.tell = slots, counts, listener, tell
        self.transfers: dict[TransferKey, Transfer] = {}
        self._served: dict[str, PoolRequest] = {}
        self._taken: set[str] = set()  # ids of all samples
        self._queued: deque[str] = deque()  # requests without a process

    @property
    def is_empty(self) -> bool:
        return not self._served

    def submit(self, request: Request, emit: Emit, public: tuple[str, int] | None = None, error: str = "") -> None:
        """Queue a request; refuse it with `error`, or if an id of its samples is taken.

        `public`: the id and the number of a sample that is served alone, for its events.
        """
        name, served = request.request_id, PoolRequest(request, emit, public)
        if not error and (taken := sorted(served.names & self._taken)):
            error = f"request id {taken[0]!r} is already taken; ids must differ"
        if error:
            for sample in served.unfinished:
                end = Finished(time.perf_counter(), name, sample=sample, reason=str(FinishReason.REFUSED), error=error)
                self._emit(served, end)
            return
        self._served[name] = served
        self._taken |= served.names
        self._queued.append(name)
        self.dispatch()

    def cancel(self, request_id: str) -> None:
        """End a request soon, with all its samples; or one sample that is served alone, by its own id."""
        self._cancel(
            name for name, served in self._served.items() if request_id in (name, served.public and served.public[0])
        )

    def cancel_of(self, emit: Emit) -> None:
        """End soon the requests whose events this very object receives, and no others of the same ids."""
        self._cancel(name for name, served in self._served.items() if served.emit is emit)

    def _cancel(self, names: Iterable[str]) -> None:
        for name in tuple(names):
            served = self._served[name]
            served.is_cancelled = True
            if served.slot is not None:
                self.slots.send(self.slots.slots[served.slot], message.Cancel(name))
                continue
            self._withdraw(TransferKey(name, served.attempt))
            self._end(name, FinishReason.CANCELLED)

    def dispatch(self) -> None:
        """Give processes to requests and offers that wait for one, in order."""
        for key, transfer in list(self.transfers.items()):
            if transfer.target is None:
                self._place(key)
        for _ in range(len(self._queued)):
            name = self._queued.popleft()
            if not self._run(name):
                self._queued.appendleft(name)
                return

    def public_name(self, name: str) -> tuple[str, int]:
        """Return the id and the number of a sample, as its events have them."""
        served = self._served.get(name)
        return (served and served.public) or (name, 0)

    def report(self, slot: Slot, found: message.StepReport) -> None:
        """Carry out what a process reports after a step."""
        for key in found.adopted:
            self._has_arrived(slot, key)
        for attempt, event in found.events:
            self._event(slot, attempt, event)
        for offer in found.offers:
            self._offered(slot, offer)
        if found.offers:
            self.dispatch()
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
        """Let the requests of a process that died go on elsewhere; `Moved` says so once they do."""
        for name in [name for name in self._served if name in names]:
            served = self._served[name]
            self._drop_bytes(served)
            self.transfers.pop(TransferKey(name, served.attempt), None)
            served.slot, served.left = None, (slot.number + 1, f"its process ended: {reason}")
            if served.is_cancelled:
                self._end(name, FinishReason.CANCELLED)
            elif served.attempt >= MAX_ATTEMPTS:
                self._end(name, FinishReason.ERROR, f"{MAX_ATTEMPTS} attempts ended with their processes")
            elif (served.has_events or served.ended) and (why := why_not_apart(served.request)):
                self._end(name, FinishReason.ERROR, f"its process ended, and {why}")
            else:
                self._queue_again(name)

    def end_all(self, reason: FinishReason, error: str) -> None:
        """End all requests: the pools close."""
        for name in list(self._served):
            self._end(name, reason, error)

    def _run(self, name: str) -> bool:
        """Give a request to a process, up to its first token or whole; return whether there is one."""
        served = self._served[name]
        prefill, decode = (self.slots.pool(role) for role in ("prefill", "decode"))
        request = served.request
        if served.generated:
            request = replace(request, generated_ids=tuple(served.generated))
        whole = bool(why_not_apart(request)) or not decode or not prefill
        pool = (decode or prefill) if whole else prefill
        ready = [slot for slot in pool if slot.state == "ready"]
        if not ready:
            if pool:
                return False  # one is being started
            self._end(name, FinishReason.ERROR, "no engine is left: their processes ended too often")
            return True
        slot = min(ready, key=lambda each: (len(each.requests), each.number))
        channel, served.send_to = None, None
        if self.slots.transfer == "gloo" and not whole:
            targets = [each for each in decode if each.state == "ready"]
            if not targets:
                return False
            coming = Counter(each.send_to[0] for each in self._served.values() if each.send_to and not each.is_decoding)
            target = min(targets, key=lambda each: (len(each.requests) + coming[each.number], each.number))
            served.send_to = target.number, target.restarts
            channel = self.slots.channel(slot, target)
        served.slot, served.is_decoding = slot.number, whole
        served.attempt += 1
        served.num_scored_again = 0
        slot.requests.add(name)
        if served.left is not None:
            source, why = served.left
            now, tokens, served.left = time.perf_counter(), len(served.generated), None
            self._emit(served, Moved(
                now, name, replica=slot.number + 1, source=source, reason=why, generated_tokens=tokens
            ))  # fmt: skip
        self.slots.send(slot, message.Run(request, served.attempt, not whole, channel))
        return True

    def _offered(self, slot: Slot, offer: message.OfferPages) -> None:
        """Receive the pages of a prompt that is computed."""
        key = offer.key
        if self.slots.ledger is not None:
            self.slots.ledger.offer(key, slot.number, offer.handed.pages)
        pages = sum(page != NULL_PAGE for group in offer.handed.pages for page in group)
        self.transfers[key] = Transfer(offer, slot.number, time.perf_counter(), pages)
        served = self._served.get(key.request_id)
        if served is None or served.is_cancelled or served.attempt != key.attempt:
            self._withdraw(key)
            if served is not None and served.is_cancelled and served.slot is None:
                self._end(key.request_id, FinishReason.CANCELLED)
            return
        served.generated = list(offer.request.generated_ids)
        self._place(key)

    def _place(self, key: TransferKey) -> None:
        """Give an offer to a decode engine. It waits while one is started; if none will be, its request is queued
        again, for the next `dispatch`."""
        transfer, served = self.transfers[key], self._served[key.request_id]
        pool = self.slots.pool("decode")
        ready = [slot for slot in pool if slot.state == "ready"]
        if served.send_to is not None:
            pool = ready = [slot for slot in ready if (slot.number, slot.restarts) == served.send_to]
        if not ready:
            if not pool:
                self._withdraw(key)
                self._queue_again(key.request_id)
            return
        slot = min(ready, key=lambda each: (len(each.requests), each.number))
        if self.slots.ledger is not None:
            self.slots.ledger.claim(key, slot.number)
        transfer.target = served.slot = slot.number
        served.is_decoding = True
        slot.requests.add(key.request_id)
        offer = transfer.offer
        self.slots.send(slot, message.Adopt(key, offer.request, offer.handed, offer.channel, offer.sent_pass))

    def _withdraw(self, key: TransferKey) -> None:
        """End a transfer that no process has claimed."""
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
        served = self._served.get(key.request_id)
        if transfer is None or served is None or served.attempt != key.attempt:
            return
        self.counts["handed over"] += 1
        if transfer.offer.channel is not None:
            self.slots.has_arrived(transfer.offer.channel)
        now, pages = time.perf_counter(), transfer.offer.handed.pages
        sent = 0 if self.slots.layout is None or transfer.offer.channel is None else self.slots.layout.bytes_of(pages)
        self._emit(
            served,
            HandedOver(
                now, key.request_id, replica=slot.number + 1, source=transfer.home + 1, pages=transfer.num_pages,
                bytes=sent, seconds=now - transfer.offered_at,
            ),
        )  # fmt: skip

    def _event(self, slot: Slot, attempt: int, event: Event) -> None:
        event = replace(event, time=event.time + slot.clock_ahead, replica=slot.number + 1)
        name = event.request_id
        if not name:  # of a step
            if self.listener is not None:
                self.listener(event)
            return
        served = self._served.get(name)
        if served is None or served.slot != slot.number or served.attempt != attempt:
            return  # of an attempt that was given up
        match event:
            case Submitted():
                if self.transfers.pop(TransferKey(name, attempt), None) is not None:  # it has begun without them
                    self.counts["transfers that failed"] += 1
                if event.sample in served.submitted:
                    return
                served.submitted.add(event.sample)
            case Prefilled(logprobs=logprobs) if logprobs:
                known = max(0, served.num_scored - served.num_scored_again)
                served.num_scored_again += len(logprobs)
                served.num_scored = max(served.num_scored, served.num_scored_again)
                event = replace(event, logprobs=logprobs[known:])
            case Decoded():
                if why_not_apart(served.request) is None:
                    served.generated.append(event.token_id)
                served.has_events = True
            case Finished(reason=FinishReason.MOVED):
                served.moved.append(event)
                served.slot = None
                slot.requests.discard(name)
                return
            case Finished():
                self.transfers.pop(TransferKey(name, attempt), None)
                event = _merged(served, event, slot.config.cache.page_size)
                self._drop_bytes(served)
                if event.sample in served.ended:
                    return
                served.ended.add(event.sample)
                if not served.unfinished:
                    self._forget(name)
                    slot.requests.discard(name)
        self._emit(served, event)

    def _forget(self, name: str) -> PoolRequest:
        served = self._served.pop(name)
        self._taken -= served.names
        return served

    def _drop_bytes(self, served: PoolRequest) -> None:
        """Let a decode engine forget layers that it was sent for nothing: no handover follows."""
        if served.send_to is not None and not served.is_decoding:
            key = TransferKey(served.request.request_id, served.attempt)
            target = self.slots.slots[served.send_to[0]]
            if target.state == "ready":
                self.slots.send(target, message.Drop(key))

    def _queue_again(self, name: str) -> None:
        self.counts["computed again"] += 1
        self._queued.append(name)

    def _end(self, name: str, reason: FinishReason, error: str = "") -> None:
        """End the samples of a request that no process has."""
        served = self._forget(name)
        if name in self._queued:
            self._queued.remove(name)
        prompt, ids = len(prompt_of(served.request)), tuple(served.generated)
        end = Finished(
            time.perf_counter(), name, reason=str(reason), error=error, token_ids=ids, prompt_tokens=prompt
        )  # fmt: skip
        for sample in served.unfinished:
            self._emit(served, _merged(served, replace(end, sample=sample), 0))

    def _emit(self, served: PoolRequest, event: Event) -> None:
        if served.public is not None:
            event = replace(event, request_id=served.public[0], sample=served.public[1])
        if self.listener is not None:
            self.listener(event)
        try:
            served.emit(event)
        except Exception as error:  # the receiver's fault: this request and the others go on
            served.emit = lambda event: None
            name = event.request_id
            self.tell(f"request {name}: its receiver failed and gets no more events: {describe_error(error)}")


def _merged(served: PoolRequest, end: Finished, page_size: int) -> Finished:
    """Return the end of a request with what the engines that it left had counted."""
    if not served.moved or served.request.sampling.num_sequences > 1:
        return end
    first, last = served.moved[0], served.moved[-1]
    adopted = last.prompt_tokens // page_size * page_size if page_size else 0
    return replace(
        end,
        prompt_tokens=first.prompt_tokens,
        cached_tokens=first.cached_tokens,
        computed_tokens=end.computed_tokens + sum(each.computed_tokens for each in served.moved),
        written_tokens=sum(each.written_tokens for each in served.moved) + max(0, end.written_tokens - adopted),
        shared_pages=first.shared_pages,
        pinned=first.pinned,
        prompt_logprobs=first.prompt_logprobs,
    )
