"""Pages of one memory among processes: whatever is lent, returned, recalled or left by a death, each page is owned once
and comes back once."""

from __future__ import annotations

from collections import Counter, deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.thorough import tries
from workbench.cluster.apart.lending import PageLedger, SharedPagePool, TransferKey
from workbench.cluster.apart.shared_memory import assign_homes

COUNTS = (5, 4, 3)  # pages of each process
TOTAL = sum(COUNTS)


class Process:
    """A process with its pool, the pages of its sequences, and what its prefix cache holds."""

    def __init__(self, home: range, lent: dict[int, int]):
        self.pool = SharedPagePool(TOTAL, 4, home, lent)
        self.sequences: list[list[int]] = []
        self.cached: list[int] = []
        self.inbox: deque[tuple] = deque()  # from the coordinator, in order
        self.outbox: deque[tuple] = deque()  # to the coordinator, in order


class Lending(RuleBasedStateMachine):
    """Processes that tell a coordinator what they lend and return. Messages arrive at any time after, in order; those
    of a process that dies still arrive, and those to it are lost."""

    def __init__(self) -> None:
        super().__init__()
        _, homes = assign_homes([(count,) for count in COUNTS])
        self.ledger = PageLedger(homes)
        self.processes = [Process(ranges[0], {}) for ranges in homes]
        self.tries = 0
        self.waiting: list[TransferKey] = []  # offers that were not claimed

    def busy(self, data: st.DataObject) -> Process | None:
        found = [process for process in self.processes if process.sequences]
        return data.draw(st.sampled_from(found)) if found else None

    @rule(which=st.integers(0, 2), count=st.integers(1, 3))
    def begin(self, which: int, count: int) -> None:
        process = self.processes[which]
        if process.pool.num_free >= count:
            process.sequences.append(process.pool.allocate(count))

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        if process := self.busy(data):
            pages = data.draw(st.sampled_from(process.sequences))
            process.pool.acquire(pages)
            process.sequences.append(list(pages))

    @rule(data=st.data())
    def cache(self, data: st.DataObject) -> None:
        if process := self.busy(data):
            page = data.draw(st.sampled_from(data.draw(st.sampled_from(process.sequences))))
            if not process.pool.is_cached(page):
                process.pool.mark_cached(page)
                process.cached.append(page)

    @rule(data=st.data(), which=st.integers(0, 2))
    def drop_cached(self, data: st.DataObject, which: int) -> None:
        process = self.processes[which]
        if process.cached:
            page = data.draw(st.sampled_from(process.cached))
            process.cached.remove(page)
            process.pool.unmark_cached(page)

    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        if process := self.busy(data):
            pages = data.draw(st.sampled_from(process.sequences))
            process.sequences.remove(pages)
            process.pool.release(pages)

    @rule(data=st.data())
    def offer(self, data: st.DataObject) -> None:
        """A prompt is computed: its pages are lent, and its sequence ends here."""
        if process := self.busy(data):
            pages = data.draw(st.sampled_from(process.sequences))
            if not all(page in process.pool.home for page in pages):
                return
            shared = process.pool.lend(pages)
            self.tries += 1
            key = TransferKey("r", self.tries)
            process.outbox.append(("offer", key, list(pages), shared))
            process.sequences.remove(pages)
            process.pool.release(pages)

    @rule(home=st.integers(0, 2), borrower=st.integers(0, 2), cached=st.booleans())
    def hand_over_twice(self, home: int, borrower: int, cached: bool) -> None:
        """Two prompts with the same beginning go to one process."""
        process = self.processes[home]
        if home == borrower or not process.pool.num_free:
            return
        while process.outbox:
            self.hear(home)
        pages = process.pool.allocate(1)
        if cached:
            process.pool.mark_cached(pages[0])
            process.cached += pages
        process.pool.acquire(pages)
        for _ in range(2):
            self.tries += 1
            key = TransferKey("r", self.tries)
            process.outbox.append(("offer", key, list(pages), process.pool.lend(pages)))
            process.pool.release(pages)
            self.hear(home)
            self.waiting.remove(key)
            self.ledger.claim(key, borrower)
            self.processes[borrower].inbox.append(("adopt", *self.contents[key]))

    @rule(which=st.integers(0, 2))
    def send_returned(self, which: int) -> None:
        process = self.processes[which]
        if pages := process.pool.pop_returned():
            process.outbox.append(("return", pages))

    @rule(which=st.integers(0, 2))
    def recall(self, which: int) -> None:
        process = self.processes[which]
        for page in list(process.pool.idle):
            process.cached.remove(page)
            process.pool.unmark_cached(page)

    @rule(which=st.integers(0, 2))
    def hear(self, which: int) -> None:
        """The coordinator takes the next message of a process."""
        process = self.processes[which]
        if not process.outbox:
            return
        kind, *message = process.outbox.popleft()
        if kind == "offer":
            key, pages, shared = message
            self.ledger.offer(key, which, [pages])
            self.waiting.append(key)
            self.contents = getattr(self, "contents", {}) | {key: (pages, shared)}
        else:
            self.send_home(self.ledger.give_back(which, [message[0]]))

    def send_home(self, found: dict[int, list[list[int]]]) -> None:
        for home, [pages] in found.items():
            self.processes[home].inbox.append(("end", pages))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), withdraws=st.sampled_from([False, False, False, True]))
    def claim(self, data: st.DataObject, withdraws: bool) -> None:
        key = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(key)
        home = self.ledger.offers[key].home
        if withdraws:
            self.send_home(self.ledger.withdraw(key))
            return
        borrower = data.draw(st.sampled_from([which for which in range(3) if which != home]))
        self.ledger.claim(key, borrower)
        self.processes[borrower].inbox.append(("adopt", *self.contents[key]))

    @rule(which=st.integers(0, 2))
    def deliver(self, which: int) -> None:
        process = self.processes[which]
        if not process.inbox:
            return
        kind, *message = process.inbox.popleft()
        if kind == "end":
            process.pool.take_back(message[0])
        else:
            pages, shared = message
            process.pool.borrow(pages, shared)
            process.sequences.append(list(pages))

    @rule(which=st.integers(0, 2))
    def kill(self, which: int) -> None:
        """A process dies: what it sent is heard, what it held goes back, and a successor takes its home."""
        while self.processes[which].outbox:
            self.hear(which)
        self.processes[which].inbox.clear()
        found = self.ledger.died(which)
        self.processes[which] = Process(self.processes[which].pool.home, self.ledger.lent_by(which)[0])
        self.send_home(found)

    @invariant()
    def each_page_has_one_owner(self) -> None:
        for which, process in enumerate(self.processes):
            pool = process.pool
            lent: Counter[int] = Counter(self.ledger.lent_by(which)[0])
            for kind, *message in process.inbox:
                lent.update(message[0] if kind == "end" else ())
            for kind, *message in process.outbox:
                lent.update(message[1] if kind == "offer" else ())
            assert lent == pool._lent, "the home and the ledger count other loans"
            own: Counter[int] = Counter(page for pages in process.sequences for page in pages)
            own.update(process.cached)
            for page in pool.home:
                assert pool._holders[page] == own[page] + lent[page]
                assert (page in pool._free) == (not own[page] and not lent[page])
            assert len(set(pool._free)) == len(pool._free) == pool.num_free
            for page in set(range(1, TOTAL + 1)) - set(pool.home):
                assert pool._holders[page] == own[page]
                assert (page in pool._borrowed) == (own[page] > 0)
                assert (page in pool.idle) == (own[page] > 0 and page in process.cached and own[page] == 1)

    @invariant()
    def what_is_borrowed_is_lent(self) -> None:
        for which, process in enumerate(self.processes):
            held = self.ledger.borrowed_by(which)
            known: Counter[int] = Counter(dict.fromkeys(process.pool._borrowed, 1))
            known.update(process.pool._returned)
            for kind, *message in process.inbox:
                known.update(message[0] if kind == "adopt" else ())
            for kind, *message in process.outbox:
                known.update(message[0] if kind == "return" else ())
            assert {page: count for (_, page), count in held.items()} == dict(known)

    @invariant()
    def a_page_that_may_be_written_has_one_reader(self) -> None:
        writers: Counter[int] = Counter()
        for process in self.processes:
            pool = process.pool
            for page in {page for pages in process.sequences for page in pages}:
                writers[page] += pool.ref_count(page) == 1
        assert max(writers.values(), default=0) <= 1

    def teardown(self) -> None:
        """All sequences end, and every page is free at home."""
        for process in self.processes:
            for pages in process.sequences:
                process.pool.release(pages)
            process.sequences.clear()
            for page in process.cached:
                process.pool.unmark_cached(page)
            process.cached.clear()
        for _ in range(3):
            for which, process in enumerate(self.processes):
                self.send_returned(which)
                while process.outbox:
                    self.hear(which)
            for key in self.waiting:
                self.send_home(self.ledger.withdraw(key))
            self.waiting.clear()
            for which, process in enumerate(self.processes):
                while process.inbox:
                    self.deliver(which)
                for pages in process.sequences:
                    process.pool.release(pages)
                process.sequences.clear()
        for process, count in zip(self.processes, COUNTS, strict=True):
            assert process.pool.num_free == count and not process.pool.num_lent and not process.pool.num_borrowed
        assert not self.ledger.offers and not any(self.ledger.loans.values())


TestLending = Lending.TestCase
TestLending.settings = settings(max_examples=tries(200), stateful_step_count=30)


def test_a_page_that_its_home_reads_too_is_not_written_and_not_zeroed() -> None:
    """Those that `release` returns are zeroed where a request failed."""
    home, other = SharedPagePool(8, 4, range(1, 6)), SharedPagePool(8, 4, range(6, 9))
    pages = home.allocate(2)
    home.mark_cached(pages[0])
    other.borrow(pages, home.lend(pages))
    assert [other.ref_count(page) for page in pages] == [2, 1], "so a write copies the first"
    assert other.release(pages) == pages[1:] and other.pop_returned() == pages


def test_what_is_not_ones_own_is_refused() -> None:
    home = SharedPagePool(8, 4, range(1, 6))
    pages = home.allocate(1)
    with pytest.raises(ValueError, match="is not lent"):
        home.take_back(pages)
    with pytest.raises(ValueError, match="cannot be borrowed"):
        home.borrow(pages, [False])
    home.borrow([7], [False])
    with pytest.raises(ValueError, match="only its home lends it"):
        home.lend([7])
    ledger = PageLedger([[range(1, 6)], [range(6, 9)]])
    ledger.offer(TransferKey("r", 0), 0, [pages])
    with pytest.raises(ValueError, match="is under way"):
        ledger.offer(TransferKey("r", 0), 0, [pages])
    with pytest.raises(ValueError, match="are not of process"):
        ledger.offer(TransferKey("r", 1), 1, [pages])
    ledger.claim(TransferKey("r", 0), 1)
    with pytest.raises(ValueError, match="pages that it has not borrowed"):
        ledger.give_back(1, [[*pages, *pages]])
    assert ledger.give_back(1, [pages]) == {0: [pages]}
