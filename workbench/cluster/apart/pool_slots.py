"""Keep the slots of two pools filled: start engines, compare their cache layouts, connect them by channels, and restart
engines that die.

    starting -> described: its layout -> building: its pages are known -> ready -> dead: starting again at once
                                                                                        or gone, for a pause or for good

Only the coordinator's thread may call these classes; processes start in threads, since a start may take seconds.
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
from workbench.cluster.launcher import is_longest_pause, pause_before_start
from workbench.cluster.replica import PageCounts
from workbench.engine.config import EngineConfig
from workbench.errors import WorkbenchError, describe_error

MAX_FAILURES = 3  # consecutive channels between two processes that delivered no transfer
PING_SECONDS = 1.0  # between an engine's Pong and the next Ping
START_SECONDS = 600.0  # time limit for a process to load its model, and to build its runner
State = Literal["starting", "described", "building", "ready", "gone"]
Role = Literal["any", "prefill", "decode"]  # any: whole requests, in one pool


@dataclass
class Slot:
    """A slot in a pool, filled by one process after another."""

    number: int
    role: Role
    config: EngineConfig
    process: EngineProcess | None = None
    link: EngineLink | None = None  # to the slot's process
    silent: float | None = None  # seconds since an unanswered Ping; None if none is open
    answered_at: float = 0.0  # time.monotonic()
    state: State = "starting"
    described: message.Described | None = None
    ready: message.Ready | None = None  # of its last process that served
    clock_ahead: float = 0.0  # seconds that this process's clock is ahead of the slot's process, plus a message's delay
    restarts: int = 0
    failed_starts: int = 0  # consecutive
    starts_at: float | None = None  # time.monotonic() of its next process; None: it has one, or gets none
    error: str = ""  # why its last process ended
    requests: set[str] = field(default_factory=set)  # requests computed here
    pages: PageCounts = PageCounts()  # its home's pages as last reported; all 0 without a process

    @property
    def name(self) -> str:
        return f"{'engine' if self.role == 'any' else self.role} {self.number}"

    @property
    def will_serve(self) -> bool:
        """Return whether it has a process, or will have one, perhaps after a pause."""
        return self.state != "gone" or self.starts_at is not None


class _Channel(NamedTuple):
    """A channel between two processes, each given as a slot and its restart number."""

    prefill: tuple[int, int]
    decode: tuple[int, int]


class PoolSlots:
    """The slots of both pools, the memory that their engines map, and the channels between them.

    Args:
        configs: the engine configs of each pool.
        transfer: `shared` or `gloo`; None if no engine hands anything over.
        start_process: starts a process, in a thread.
        replaces_dead: start a successor of each process that dies, by the rule of `pause_before_start`.
        threads: torch threads of each process.
        step_seconds: time limit of a step, after which its process is killed; None for no limit.
        put: queues a job for the coordinator's thread.
        receive: called in the coordinator's thread with each message of a process.
        ended: called there when a process has ended by itself.
    """

    def __init__(
        self,
        configs: dict[Role, list[EngineConfig]],
        transfer: message.Transfer | None,
        start_process: StartProcess,
        replaces_dead: bool,
        threads: int,
        step_seconds: float | None,
        put: Callable[[Callable[[], None]], None],
        receive: Callable[[Slot, object], None],
        ended: Callable[[Slot, str], None],
    ):
        self.slots: list[Slot] = []
        for role, its in configs.items():
            self.slots += [Slot(len(self.slots) + number, role, config) for number, config in enumerate(its)]
        self.transfer: message.Transfer | None = transfer
        self.replaces_dead = replaces_dead
        self.ledger: PageLedger | None = None  # of shared memory; None for gloo
        self.layout: PageLayout | None = None
        self._memory: SharedMemory | None = None
        self._totals: tuple[int, ...] = ()
        self._channels: list[_Channel] = []  # by number
        self._failures: Counter[_Channel] = Counter()  # failures since the last transfer that arrived
        self._start_process, self._threads, self._put = start_process, threads, put
        self._receive, self._ended, self._step_seconds = receive, ended, step_seconds
        self._looked_at = time.monotonic()
        self._starts: list[threading.Thread] = []

    def pool(self, role: Role) -> list[Slot]:
        """Return the slots of a pool that have a process, or get one at once."""
        return [slot for slot in self.slots if slot.role == role and slot.state != "gone"]

    def send(self, slot: Slot, found: object) -> None:
        """Queue a message for a slot's process. If the process has died, the message is lost."""
        if slot.link is not None:
            slot.link.send(found)

    @property
    def look_seconds(self) -> float:
        """Return the interval in seconds at which to call `find_hung`."""
        return PING_SECONDS if self._step_seconds is None else min(PING_SECONDS, self._step_seconds / 4)

    def find_hung(self) -> Iterator[tuple[Slot, str]]:
        """Ping every engine; yield the slots that have not answered for too long, with the reason.

        Engines answer between two steps. At most two intervals count between two calls, so that a coordinator that
        was itself suspended reads the answers first.
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
        """Notify the engines that own pages that loans of these pages have ended. An engine that is not built yet
        begins without these loans.
        """
        for home, its in pages.items():
            if self.slots[home].state in ("building", "ready"):
                self.send(self.slots[home], message.TakeBack(its, tainted))

    def start(self, slot: Slot, started: Callable[[Slot, EngineProcess | None, str], None]) -> None:
        """Start a process in a thread; the coordinator's thread calls `started` with the process or an error."""
        slot.state, slot.starts_at = "starting", None

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
        """Connect a slot to its new process."""

        def put(job: Callable[[], None]) -> None:
            with contextlib.suppress(WorkbenchError):  # the pools have closed
                self._put(lambda: job() if slot.process is process else None)

        slot.process, slot.silent, slot.clock_ahead = process, 0.0, 0.0
        slot.link = EngineLink(
            process.connection,
            lambda found: put(lambda: self._receive(slot, found)),
            lambda error: put(lambda: self._ended(slot, error)),
        )
        self.send(slot, message.Start(slot.name, slot.config, self._threads, self.transfer))

    def receive(self, slot: Slot, found: object) -> None:
        """Handle a message that a process sends about its own state.

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
                slot.ready, slot.pages, slot.failed_starts = found, pages, 0
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

    def end(self, slot: Slot, error: str) -> set[str]:
        """Kill a process that has died or hangs; return its requests. Its loans go back, marked as tainted."""
        self._kill(slot)
        slot.error = error
        lost, slot.requests, slot.pages = slot.requests, set(), PageCounts()
        mine = (slot.number, slot.restarts)
        for number, channel in enumerate(self._channels):
            if mine in channel and (other := self._other_end(slot, number)) is not None:
                self.send(other, message.Disconnect(number))
        slot.failed_starts += slot.state != "ready"
        others_serve = any(
            each.will_serve and (each.state != "gone" or not is_longest_pause(each.failed_starts))
            for each in self.slots if each is not slot
        )  # fmt: skip
        pause = pause_before_start(slot.failed_starts, others_serve) if self.replaces_dead else None
        slot.state = "gone" if pause is None or pause else "starting"
        if pause is not None:
            slot.restarts, slot.starts_at = slot.restarts + 1, time.monotonic() + pause
        if self.ledger is not None:
            self.send_home(self.ledger.died(slot.number), tainted=True)
        return lost

    def stop(self) -> None:
        """End all processes, even if ending one raises."""
        with contextlib.ExitStack() as ends:
            for slot in self.slots:
                ends.callback(self._kill, slot)

    def _kill(self, slot: Slot) -> None:
        process, link = slot.process, slot.link
        slot.process = slot.link = slot.silent = slot.starts_at = None
        if process is not None and link is not None:
            link.close()
            process.kill()

    def close(self) -> None:
        """Wait for the threads that start processes, and close and unmap the memory.

        `put` must refuse jobs by then, so that these threads end."""
        for thread in self._starts:
            thread.join()
        if self._memory is not None:
            self._memory.close()
            self._memory = None  # its mapping ends with its last reference

    def _begin_when_all_described(self, slot: Slot) -> None:
        """Once all processes have described their caches, compare the layouts and assign each process its pages."""
        if self.layout is not None or self.transfer is None:
            self._begin(slot)
            return
        described = [each.described for each in self.slots if each.described is not None]
        if len(described) < len(self.slots):
            return
        self.layout = layout = described[0].layout
        for each in self.slots[1:]:
            self._check_layout(each, self.slots[0].name)
        if self.transfer == "shared":
            self._totals, homes = assign_homes([each.num_pages for each in described])
            assert layout is not None  # an engine that hands pages over describes them
            self._memory = SharedMemory.create(layout.memory_bytes(self._totals))
            self.ledger = PageLedger(homes)
        for each in self.slots:
            self._begin(each)

    def _check_layout(self, slot: Slot, others: str) -> None:
        if self.layout is not None and slot.described is not None and slot.described.layout is not None:
            self.layout.check_equal(slot.described.layout, others, slot.name)

    def _begin(self, slot: Slot) -> None:
        self._check_layout(slot, "the other engines")
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
        """Return the slots of a channel; None for a slot that has another process than the channel joined."""
        ends = (self._channels[channel].prefill, self._channels[channel].decode)
        found = [(self.slots[number], restarts) for number, restarts in ends]
        first, second = (slot if slot.restarts == n and slot.state == "ready" else None for slot, n in found)
        return first, second

    def _other_end(self, slot: Slot, channel: int) -> Slot | None:
        return next((each for each in self._ready_ends(channel) if each is not None and each is not slot), None)

    def _mend(self, channel: int) -> None:
        """Replace a broken channel between two live processes, unless `MAX_FAILURES` broke in a row."""
        prefill, decode = self._ready_ends(channel)
        pair = self._channels[channel]
        newest = max(number for number, each in enumerate(self._channels) if each == pair)
        if prefill is None or decode is None or newest != channel:  # both ends report the break
            return
        self._failures[pair] += 1
        if self._failures[pair] < MAX_FAILURES:
            self._connect(prefill, decode)
