"""Snapshots of pages, step by step, thinned beyond a maximum."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

from workbench.trace.events import Event, StepPlanned, Stepped
from workbench.widgets.pages.snapshot import PagePanel, PageSnapshot
from workbench.widgets.pages.taking import take_snapshot

MAX_SNAPSHOTS = 1024  # snapshots kept; beyond them every second one of the older half is let go


class SnapshotLog:
    """`snapshots` in the order of their steps; it is replaced, never changed, and may be read from any thread.
    `numbers` are those of the owners, as they came."""

    def __init__(self, snapshots: Sequence[PageSnapshot] = (), max_snapshots: int = MAX_SNAPSHOTS):
        self.snapshots: tuple[PageSnapshot, ...] = ()
        self.owner_numbers: dict[str, int] = {}
        self.num_thinned = 0  # let go
        self._most = max_snapshots
        for each in snapshots:
            self.add(each)

    def add(self, snapshot: PageSnapshot) -> None:
        """`seen` stands last: what is left after a step is preempted to the step that begins with it."""
        for owner in snapshot.owners:
            self.owner_numbers.setdefault(owner.name, len(self.owner_numbers))
        kept = self.snapshots
        while kept and kept[-1].step >= snapshot.step:
            kept = kept[:-1]
        kept = (*kept, snapshot)
        if len(kept) > self._most:
            half = self._most // 2
            self.num_thinned += half // 2
            kept = (*kept[:half:2], *kept[half:])
        self.snapshots = kept

    def at(self, step: int) -> PageSnapshot:
        """The last one at `step` or before it; the first where all are later."""
        kept = self.snapshots
        return kept[max(0, bisect_right(kept, step, key=lambda each: each.step) - 1)]


def snapshot_listener(
    log: SnapshotLog, scheduler: Any, panels: tuple[PagePanel, ...], on_change: Callable[[], None]
) -> Callable[[Event], None]:
    """Hears every event of a runner, in the thread that owns it, and notes what each step is computed on, and what is
    left when all is done."""

    def hear(event: Event) -> None:
        last = log.snapshots[-1] if log.snapshots else None
        if isinstance(event, StepPlanned):
            ends = {span.sequence: span.start + span.tokens for span in event.spans}
            log.add(take_snapshot(scheduler, panels, ends, last))
        elif isinstance(event, Stepped) and not scheduler.busy:
            log.add(take_snapshot(scheduler, panels, None, last))
        else:
            return
        on_change()

    return hear
