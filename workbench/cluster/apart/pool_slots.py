"""Keep the places of two pools filled: start engines, compare their caches, join them by channels, and start others in
place of those that die.

    starting -> described: its layout -> building: its pages are known -> ready -> dead: starting again, or gone

All of it belongs to the coordinator's thread, but for the start of a process, which may take seconds.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from workbench.cluster.apart import pool_messages as message
from workbench.cluster.apart.engine_link import EngineLink
from workbench.cluster.apart.lending import PageLedger
from workbench.cluster.apart.page_layout import PageLayout
from workbench.cluster.apart.pool_processes import EngineProcess, StartProcess
from workbench.cluster.apart.shared_memory import SharedMemory, assign_homes
from workbench.cluster.replica import PageCounts
from workbench.engine.config import EngineConfig
from workbench.errors import WorkbenchError, describe_error

MAX_FAILURES = 3  # of channels between two processes, one after another, without a transfer that arrived
PING_SECONDS = 1.0  # between an answer of an engine and the next question whether it goes on
START_SECONDS = 600.0  # for a process to load its model, and to build its runner
State = Literal["starting", "described", "building", "ready", "gone"]


@dataclass
class Slot:
    """A place in a pool, which one process after another fills."""

    number: int
    role: Literal["prefill", "decode"]
    config: EngineConfig
    process: EngineProcess | None = None
    link: EngineLink | None = None  # to that process
    silent: float | None = None  # seconds that an answer is due; None: none is
    answered_at: float = 0.0  # time.monotonic()
    state: State = "starting"
    described: message.Described | None = None
    clock_ahead: float = 0.0  # seconds by which this process's clock is ahead of its
    restarts: int = 0
    requests: set[str] = field(default_factory=set)  # that are computed here
    pages: PageCounts = PageCounts()  # of its home, as its process last reported; none without a process

    @property
    def name(self) -> str:
        return f"{self.role} {self.number}"


class _Channel(NamedTuple):
    """A channel between two processes, each a place and the number of its restarts."""

    prefill: tuple[int, int]
    decode: tuple[int, int]


class PoolSlots:
    """The places of both pools, the memory that their engines map, and the channels between them.

    Args:
        configs: of the engines of each pool.
        transfer: how pages travel.
        start_process: starts a process, in a thread.
        max_restarts: processes that may be started in place of dead ones, by place.
        threads: of torch, in each process.
        step_seconds: that a step may last, after which its process is ended; None: any time.
        put: lets the coordinator's thread carry out a job.
        receive: called in the coordinator's thread with each message of a process.
        ended: called there when a process has ended by itself.
    """

    def __init__(
        self,
        configs: dict[Literal["prefill", "decode"], list[EngineConfig]],
        transfer: message.Transfer,
        start_process: StartProcess,
        max_restarts: int,
        threads: int,
        step_seconds: float | None,
        put: Callable[[Callable[[], None]], None],
        receive: Callable[[Slot, object], None],
        ended: Callable[[Slot, str], None],
    ):
        self.slots: list[Slot] = []
        for role, its in configs.items():
            self.slots += [Slot(len(self.slots) + number, role, config) for number, config in enumerate(its)]
        self.transfer, self.max_restarts = transfer, max_restarts
        self.ledger: PageLedger | None = None  # of the pages of a shared memory
        self.layout: PageLayout | None = None
        self._memory: SharedMemory | None = None
        self._totals: tuple[int, ...] = ()
        self._channels: list[_Channel] = []  # by number
        self._failures: Counter[_Channel] = Counter()  # of channels, since a transfer arrived over one
        self._start_process, self._threads, self._put = start_process, threads, put
        self._receive, self._ended, self._step_seconds = receive, ended, step_seconds
        self._looked_at = time.monotonic()
        self._starts: list[threading.Thread] = []

    def pool(self, role: str) -> list[Slot]:
        """Return the places of a pool that have a process, or will have one."""
        return [slot for slot in self.slots if slot.role == role and slot.state != "gone"]

    def send(self, slot: Slot, found: object) -> None:
        """Send a message, soon; if the process has died, its end of the connection says so next."""
        if slot.link is not None:
            slot.link.send(found)

    @property
    def look_seconds(self) -> float:
        """Return how often `find_hung` is to be called."""
        return PING_SECONDS if self._step_seconds is None else min(PING_SECONDS, self._step_seconds / 4)

    def find_hung(self) -> Iterator[tuple[Slot, str]]:
        """Ask every engine whether it goes on; yield those whose answers are due for too long, with the reason.

        Engines answer between two steps. Only time in which this is called counts, so that a coordinator that was
        stopped itself hears the answers first.
        """
        now = time.monotonic()
        passed, self._looked_at = min(now - self._looked_at, 2 * self.look_seconds), now
        for slot in self.slots:
            if slot.silent is not None:
                slot.silent += passed
                limit = self._step_seconds if slot.state == "ready" else START_SECONDS
                if limit is not None and slot.silent > limit:
                    yield slot, f"it gave no answer for {slot.silent:.0f} s"
            elif slot.state == "ready" and now - slot.answered_at > self.look_seconds:
                self.send(slot, message.Ping())
                slot.silent = 0.0

    def send_home(self, pages: dict[int, list[list[int]]], tainted: bool = False) -> None:
        """Tell the homes of pages that loans have ended. One that is not built yet begins without them."""
        for home, its in pages.items():
            if self.slots[home].state in ("building", "ready"):
                self.send(self.slots[home], message.TakeBack(its, tainted))

    def start(self, slot: Slot, started: Callable[[Slot, EngineProcess | None, str], None]) -> None:
        """Start a process; the coordinator's thread calls `started` with it, or with an error."""
        slot.state = "starting"

        def run() -> None:
            process, error = None, ""
            try:
                process = self._start_process(slot.name)
            except Exception as problem:
                error = describe_error(problem)
            try:
                self._put(lambda: started(slot, process, error))
            except WorkbenchError:  # the pools have closed
                if process is not None:
                    process.kill()

        self._starts = [thread for thread in self._starts if thread.is_alive()]
        self._starts.append(threading.Thread(target=run, name=f"start of {slot.name}", daemon=True))
        self._starts[-1].start()

    def greet(self, slot: Slot, process: EngineProcess) -> None:
        """Give a place its new process."""

        def put(job: Callable[[], None]) -> None:
            with contextlib.suppress(WorkbenchError):  # the pools have closed
                self._put(lambda: job() if slot.process is process else None)

        slot.process, slot.silent = process, 0.0
        slot.link = EngineLink(
            process.connection,
            lambda found: put(lambda: self._receive(slot, found)),
            lambda error: put(lambda: self._ended(slot, error)),
        )
        self.send(slot, message.Start(slot.name, slot.config, self._threads))

    def receive(self, slot: Slot, found: object) -> None:
        """Carry out a message of a process about itself.

        Raises:
            WorkbenchError: if the engines' caches differ.
        """
        match found:
            case message.Pong():
                slot.silent, slot.answered_at = None, time.monotonic()
            case message.Described():
                slot.described, slot.state, slot.silent = found, "described", None
                if slot.process is not None and slot.process.pid is None:  # another host's clock has another origin
                    slot.clock_ahead = time.perf_counter() - found.time
                self._begin_when_all_described(slot)
            case message.Ready(pages):
                slot.state, slot.silent, slot.answered_at = "ready", None, time.monotonic()
                slot.pages = pages
                if self.transfer == "gloo":
                    for other in self.slots:
                        if other.role != slot.role and other.state == "ready":
                            self._connect(*((slot, other) if slot.role == "prefill" else (other, slot)))
            case message.ChannelAddress(channel):
                other = self._other_end(slot, channel)
                if other is not None:
                    self.send(other, found)
            case message.ChannelBroken(channel):
                self._mend(channel)

    def channel(self, prefill: Slot, decode: Slot) -> int:
        """Return the channel between two ready processes."""
        wanted = _Channel((prefill.number, prefill.restarts), (decode.number, decode.restarts))
        return max(number for number, each in enumerate(self._channels) if each == wanted)

    def has_arrived(self, channel: int) -> None:
        """Note that a transfer has arrived over a channel."""
        self._failures.pop(self._channels[channel], None)

    def end(self, slot: Slot) -> set[str]:
        """End a process that has died or hangs; return the requests that it had. Its loans go back, tainted."""
        self._kill(slot)
        lost, slot.requests, slot.pages = slot.requests, set(), PageCounts()
        mine = (slot.number, slot.restarts)
        for number, channel in enumerate(self._channels):
            if mine in channel and (other := self._other_end(slot, number)) is not None:
                self.send(other, message.Disconnect(number))
        slot.state = "starting" if slot.restarts < self.max_restarts else "gone"
        slot.restarts += slot.state == "starting"
        if self.ledger is not None:
            self.send_home(self.ledger.died(slot.number), tainted=True)
        return lost

    def stop(self) -> None:
        """End all processes, the others too where the end of one raises."""
        with contextlib.ExitStack() as ends:
            for slot in self.slots:
                ends.callback(self._kill, slot)

    def _kill(self, slot: Slot) -> None:
        process, link = slot.process, slot.link
        slot.process = slot.link = slot.silent = None
        if process is not None and link is not None:
            link.close()
            process.kill()

    def close(self) -> None:
        """Wait for the ends of processes that were being started, and close the memory: nothing of it stays mapped.

        Threads that start processes must find that no job is taken any more."""
        for thread in self._starts:
            thread.join()
        if self._memory is not None:
            self._memory.close()
            self._memory = None  # its mapping ends with its last reference

    def _begin_when_all_described(self, slot: Slot) -> None:
        """Compare layouts, and give each process its pages once all have said what they want."""
        if self.layout is not None:
            self._begin(slot)
            return
        described = [each.described for each in self.slots if each.described is not None]
        if len(described) < len(self.slots):
            return
        self.layout = described[0].layout
        for each, its in zip(self.slots[1:], described[1:], strict=True):
            self.layout.check_equal(its.layout, self.slots[0].name, each.name)
        if self.transfer == "shared":
            self._totals, homes = assign_homes([each.num_pages for each in described])
            self._memory = SharedMemory.create(self.layout.memory_bytes(self._totals))
            self.ledger = PageLedger(homes)
        for each in self.slots:
            self._begin(each)

    def _begin(self, slot: Slot) -> None:
        assert slot.described is not None and self.layout is not None
        self.layout.check_equal(slot.described.layout, "the other engines", slot.name)
        slot.state, slot.silent = "building", 0.0
        if self.ledger is None or self._memory is None:
            self.send(slot, message.Begin(is_successor=slot.restarts > 0))
            return
        homes = tuple(self.ledger.homes[slot.number])
        lent = self.ledger.lent_by(slot.number)
        self.send(slot, message.Begin(self._memory.address, self._totals, homes, lent, slot.restarts > 0))

    def _connect(self, prefill: Slot, decode: Slot) -> None:
        """Open a channel between two processes."""
        number = len(self._channels)
        self._channels.append(_Channel((prefill.number, prefill.restarts), (decode.number, decode.restarts)))
        self.send(decode, message.Connect(number, sends=False))
        self.send(prefill, message.Connect(number, sends=True))

    def _ready_ends(self, channel: int) -> tuple[Slot | None, Slot | None]:
        """Return the places of a channel whose processes are still those that it joined."""
        ends = (self._channels[channel].prefill, self._channels[channel].decode)
        found = [(self.slots[number], restarts) for number, restarts in ends]
        first, second = (slot if slot.restarts == n and slot.state == "ready" else None for slot, n in found)
        return first, second

    def _other_end(self, slot: Slot, channel: int) -> Slot | None:
        return next((each for each in self._ready_ends(channel) if each is not None and each is not slot), None)

    def _mend(self, channel: int) -> None:
        """Open another channel in place of one that broke between two processes that live, unless none works."""
        prefill, decode = self._ready_ends(channel)
        pair = self._channels[channel]
        newest = max(number for number, each in enumerate(self._channels) if each == pair)
        if prefill is None or decode is None or newest != channel:  # both of its ends say that it broke
            return
        self._failures[pair] += 1
        if self._failures[pair] < MAX_FAILURES:
            self._connect(prefill, decode)
