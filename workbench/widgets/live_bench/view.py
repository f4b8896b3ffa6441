"""Serve a load of many requests, change it while it runs, and show it over one time axis."""

from __future__ import annotations

import time
from collections import deque
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import ipywidgets
import traitlets

from workbench import svg
from workbench.errors import WorkbenchError, nearest
from workbench.trace.events import Event, Finished, SettingsChanged, Stepped
from workbench.units import format_percent
from workbench.widgets.compare.export import ExportButtons
from workbench.widgets.live_bench.controls import control_rows
from workbench.widgets.live_bench.load import LoadGenerator, attach_runner, measure_capacity
from workbench.widgets.live_bench.log import KEPT_SECONDS, BenchLog
from workbench.widgets.live_bench.picture import describe_moment, draw_bench, draw_statistics, kept_words
from workbench.widgets.live_bench.schedule import SETTINGS, ScheduleSettings
from workbench.widgets.live_bench.statistics import WINDOW_SECONDS, WindowStatistics, kept_statistics
from workbench.widgets.live_bench.traffic import LoadSettings
from workbench.widgets.pages.data import SnapshotLog, panels_of_runner, snapshot_listener, take_snapshot
from workbench.widgets.pages.picture import draw_page_map
from workbench.widgets.settings_form.form import error_markup
from workbench.widgets.time_axis.navigation import TimeNavigation
from workbench.widgets.view import MarkupWidget

if TYPE_CHECKING:
    from workbench.engine.runner import Runner

RUN_SECONDS = 120.0  # duration of a load; bounded, so that a forgotten load ends
REDRAW_SECONDS, STILL_SECONDS = 0.5, 2.0  # between two redraws while requests are served; with reduced motion
SPAN_SECONDS = 12.0  # visible while the newest event is followed
TRIM_STEPS = 256  # steps between two deletions of old page snapshots
LOAD_TRAITS = ("rate", "long_share", "shared_prefix")


class LiveBench(TimeNavigation):
    """A view of a load of many requests on a runner over one time axis, with settings that can be changed while it
    runs.

    Requests arrive at `rate` a second whether or not earlier ones have ended (open loop). Without a given `rate` the
    runner's `capacity` (requests a second) is measured first, for some seconds, and the load begins at half of it. A
    fraction `long_share` of the requests have long prompts; with `shared_prefix` all prompts begin alike. `policy`,
    `chunk_tokens` (prefill tokens of a step) and `max_num_seqs` belong to the scheduler; a change takes effect at the
    next step and loses no request. While `max_waiting` requests wait, new ones are refused and counted. These traits
    and `span` may be given as `settings`; an invalid value is refused and changes nothing.

    `run` and `stop` are the button's methods. `cursor` is a time, or None for the newest; `selected` holds begin and
    end of the time that the table summarizes. `follow` keeps the newest `span` seconds visible. Times are seconds since
    the first event. The last two minutes are kept. All figures are measured, drawing included: it takes processor time
    from the requests.

    A given `runner` stays open, and all of its requests are shown.
    """

    engine_fields = ("_live", "_runner", "_schedule", "_load")
    rate = traitlets.Float(0.0)
    long_share = traitlets.Float(0.1)
    shared_prefix = traitlets.Bool(False)
    policy = traitlets.Unicode("interleaved")
    chunk_tokens = traitlets.Int(512)
    max_num_seqs = traitlets.Int(8)
    running = traitlets.Bool(False)
    problem = traitlets.Unicode()
    span = traitlets.Float(SPAN_SECONDS)

    kept_seconds = KEPT_SECONDS
    min_window = SPAN_SECONDS

    _load: LoadGenerator | None = None
    _schedule: ScheduleSettings | None = None
    _closed = False

    def __init__(self, runner: Runner | None = None, *, max_waiting: int = 24, seed: int = 0, **settings: Any):
        super().__init__()
        self._resources = ExitStack()  # ended in reverse order by `close`
        try:
            for name in settings:
                known = (*LOAD_TRAITS, *SETTINGS, "span")
                if name not in known:
                    raise WorkbenchError(f"LiveBench: no setting {name!r}{nearest(name, known)}; see its traits")
            if max_waiting < 1:
                raise WorkbenchError(f"LiveBench: max_waiting must be at least 1, not {max_waiting}")
            self._live = attach_runner(runner, self._resources)
            self._runner = self._live.runner
            self._set(settings)
            rows = self._build()
            self._listen(max_waiting, seed)
            self.show(*rows, self._alert, self.axis, below=(self.table, self.export, self.pages))
        except BaseException:
            self.close()
            raise

    def _set(self, settings: dict[str, Any]) -> None:
        """Apply the settings, and measure the capacity if no rate is given."""
        self._schedule = ScheduleSettings(self._live)
        for name, value in self._schedule.in_force.items():
            self.set_trait(name, value)
        self.observe(self._on_schedule, SETTINGS)
        for name, value in settings.items():
            self.set_trait(name, value)
        self.capacity: float | None = None  # requests a second, measured before the load
        if "rate" not in settings:
            self.capacity = measure_capacity(self._live, LoadSettings(long_share=self.long_share))
            self.rate = max(1.0, round(self.capacity) / 2)

    def _build(self) -> list[ipywidgets.Widget]:
        """Create axis, table and page map; return the rows of controls."""
        assert self._schedule is not None
        self.table = ipywidgets.HTML()
        self.export = ExportButtons(
            "selection", csv=lambda: self._selection_statistics().csv(), png=lambda: self._draw(True)
        )
        self.export.layout.display = "none"
        self._alert = ipywidgets.HTML(layout={"min_height": "0"})
        self.pages = MarkupWidget()
        self.watch("cursor", "selected")
        self.observe(self._on_load, LOAD_TRAITS)
        self.observe(self._on_problem, "problem")
        self.observe(self._on_running, "running")
        max_rate = max(10.0, round(2 * (self.capacity or self.rate)))  # the slider's middle is the capacity
        tip = f"requests arrive for {RUN_SECONDS:g} s"
        return control_rows(self, tip, max_rate, self._schedule.policies, self._runner.config.schedule)

    def _listen(self, max_waiting: int, seed: int) -> None:
        """Log the runner's events from now on, and create the load generator."""
        self._fresh: deque[Event] = deque()
        self._log, self._redraw_due = BenchLog(), False
        self._drawing_seconds = 0.0
        panels = panels_of_runner(self._runner)
        self._snapshots = SnapshotLog([self._live.call(lambda each: take_snapshot(each.scheduler, panels))])
        note = snapshot_listener(self._snapshots, self._runner.scheduler, panels, lambda: None)
        self._load = LoadGenerator(self._live, self._load_settings, self._append, self._tick, max_waiting, seed)
        for listener in (self._append, note):
            self._resources.callback(self._live.listen(listener))
        self._resources.callback(self._load.close)  # runs before those two: the log gets the ends of its requests

    @traitlets.validate("rate", "long_share")
    def _validate_load(self, proposal: Any) -> float:
        LoadSettings(**{proposal["trait"].name: proposal["value"]})
        return proposal["value"]

    @traitlets.validate(*SETTINGS)
    def _validate_schedule(self, proposal: Any) -> Any:
        if self._schedule is not None:
            self._schedule.check(proposal["trait"].name, proposal["value"])
        return proposal["value"]

    @property
    def log(self) -> BenchLog:
        """Return the log, with all events so far."""
        with self._lock:
            self._drain()
            return self._log

    def run(self, seconds: float = RUN_SECONDS) -> None:
        """Start the load in the background: requests arrive for `seconds`."""
        assert self._load is not None
        if not self._closed:
            self.problem, self.running = "", True
            self._load.start(seconds)

    def stop(self) -> None:
        """End the load soon and cancel its requests."""
        if self._load is not None:
            self._load.stop()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the load and its requests have ended, at most `seconds`; return whether they have ended."""
        assert self._load is not None
        done = self._load.wait(seconds)
        self.throttle.flush()
        self.keep()
        return done

    def statistics(self, begin: float | None = None, end: float | None = None) -> WindowStatistics:
        """Return the statistics from `begin` to `end`, in seconds since the first event (default: all kept events).

        Without events all counts are 0. `dropped` is the requested time that the log no longer keeps, in seconds.
        """
        with self._lock:
            log = self.log
            first = log.begin if begin is None else self._origin + begin
            newest = log.end if log.origin is None else log.end + 1e-9  # the last event belongs to it
            return kept_statistics(log, first, max(first, newest) if end is None else self._origin + end)

    def redraw(self) -> None:
        began = time.thread_time()
        with self._lock:
            self._redraw_due = False
            if self._closed:
                return
            self.shown.content = self._draw(marks=False)
            self.pages.content = self._draw_pages()
            self._read()
            self.running = self._load is not None and self._load.running
            if self._load is not None and self._load.error:
                self.problem = self._load.error
        self._drawing_seconds += time.thread_time() - began

    def picture(self) -> str:
        with self._lock:
            parts = [self._draw(marks=True), self._draw_pages()]
            if self.selected:
                parts.insert(1, draw_statistics(self._selection_statistics(), self._origin, float(self.width)))
            return svg.html(*parts)

    def close(self) -> None:
        """End the load, its requests and its threads, and free the pages."""
        self._closed = True
        self._resources.close()
        super().close()

    @property
    def _load_settings(self) -> LoadSettings:
        return LoadSettings(self.rate, self.long_share, self.shared_prefix)

    def _append(self, event: Event) -> None:
        """Queue an event for the next redraw; called in the thread that emits it."""
        self._fresh.append(event)
        if isinstance(event, Stepped) and event.step % TRIM_STEPS == 0:
            for first in self._log.steps[:1]:  # another thread may drop it meanwhile
                self._snapshots.drop_before(first.step)
        if isinstance(event, Stepped | Finished | SettingsChanged):
            self._mark_soon()

    def _mark_soon(self) -> None:
        if not self._redraw_due:
            self._redraw_due = True
            self.throttle.mark_later(STILL_SECONDS if self.axis.still else REDRAW_SECONDS)

    def _tick(self) -> None:
        """Record queued events and move the log's end to now; called in the load's thread, and at the load's end."""
        with self._lock:
            self._drain()
            if self._log.origin is not None:
                self._log.advance(self._runner.clock())
        if self._load is not None and self._load.running:
            self._mark_soon()
        else:
            self.throttle.mark()

    def _drain(self) -> None:
        while self._fresh:
            self._log.record(self._fresh.popleft())

    def _draw(self, marks: bool) -> str:
        assert self._load is not None
        snapshots = self._snapshots
        with self._lock:
            log = self.log
            seconds = log.end - self._origin
            note = ""
            if seconds > WINDOW_SECONDS:
                note = f"; drawing takes {format_percent(self._drawing_seconds / seconds)} of a core"
            if self.capacity is not None:
                note += f"; about {self.capacity:.2g} requests/s were served before the load"
            return draw_bench(
                log, self._view(), snapshots.snapshots, snapshots.owner_numbers, self._load.max_waiting,
                float(self.width), marks, note,
            )  # fmt: skip

    def _draw_pages(self) -> str:
        with self._lock:
            log, snapshots = self.log, self._snapshots
            step = log.step_at(log.end if self.cursor is None else self._origin + self.cursor)
            seen = snapshots.at(step.step if step is not None else 0)
            note = "the newest" if self.cursor is None else "at the cursor"
            if self.cursor is not None and step is None and log.has_dropped:
                note = f"the oldest, {kept_words(log)}"
            return draw_page_map(seen, [seen], snapshots.owner_numbers, note=note, width=float(self.width))

    def _times(self) -> tuple[float, float, float]:
        log = self.log
        return (0.0, 0.0, 0.0) if log.origin is None else (log.origin, log.begin, log.end)

    def _step_begins(self) -> list[float]:
        return [step.begin for step in self.log.steps]

    def _describe(self, time: float) -> str:
        return describe_moment(self.log, time)

    def _read(self) -> None:
        """Describe the time at the cursor, and show the selection's figures."""
        with self._lock:
            super()._read()
            if self.selected:
                self.table.value = draw_statistics(self._selection_statistics(), self._origin, float(self.width))
            elif self.table.value:
                self.table.value = ""
            self.export.layout.display = None if self.selected else "none"

    def _selection_statistics(self) -> WindowStatistics:
        return self.statistics(*self.selected)

    def _on_load(self, _: Any) -> None:
        assert self._load is not None
        self._load.settings = self._load_settings
        self.problem = ""

    def _on_schedule(self, change: dict[str, Any]) -> None:
        """Change a scheduler setting between two steps; a refused setting returns to the value in force."""
        assert self._schedule is not None
        name = change["name"]

        def done(problem: str, value: Any) -> None:
            self.set_trait(name, value)
            self.problem = problem

        self._schedule.change(name, change["new"], done)

    def _on_problem(self, _: Any) -> None:
        self._alert.value = error_markup(self.problem)

    def _on_running(self, _: Any) -> None:
        if not self.running and not self._closed:
            self.keep()
