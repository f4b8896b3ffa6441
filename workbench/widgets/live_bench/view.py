"""Serve a load of many requests, change it while it runs, and show all of it over one axis of time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from html import escape
from threading import RLock
from typing import TYPE_CHECKING, Any

import ipywidgets
import traitlets

from workbench import svg
from workbench.errors import WorkbenchError, describe_error
from workbench.stop_button import register_stoppable
from workbench.trace.events import Event, Finished, SettingsChanged, Stepped
from workbench.widgets.compare.export import ExportButtons
from workbench.widgets.live_bench.controls import load_controls
from workbench.widgets.live_bench.load import LoadGenerator, measure_capacity
from workbench.widgets.live_bench.log import BenchLog
from workbench.widgets.live_bench.picture import TimeView, describe_moment, draw_bench, draw_statistics
from workbench.widgets.live_bench.statistics import WINDOW_SECONDS, WindowStatistics, window_statistics
from workbench.widgets.live_bench.time_axis import TimeAxis
from workbench.widgets.live_bench.traffic import LONGEST_REQUEST, LoadSettings
from workbench.widgets.pages.data import SnapshotLog, panels_of_runner, snapshot_listener, take_snapshot
from workbench.widgets.pages.picture import draw_page_map
from workbench.widgets.view import MarkupWidget, PictureWidget

if TYPE_CHECKING:
    from workbench.engine.runner import Runner

RUN_SECONDS = 120.0  # of a press on the button; a load that is forgotten ends
SPAN_SECONDS = 12.0  # in sight while the newest is followed
MIN_SPAN_SECONDS = 0.005
REDRAW_SECONDS, STILL_SECONDS = 0.5, 2.0  # between two pictures while requests are served; with reduced motion
CHUNKS = (8, 16, 32, 64, 128, 256, 512)
BENCH_ENGINE = {
    "backend": "eager", "page_size": 16, "pages": 112, "prefix": "radix", "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
}  # fmt: skip
BENCH_SCHEDULE = {"max_num_seqs": 8, "chunk_tokens": 512}  # at the beginning
TRIM_STEPS = 256  # between two looks at old snapshots of pages


class LiveBench(PictureWidget):
    """A load of many requests on a runner, whose settings change while it runs, over one axis of time.

    Requests arrive at `rate` a second whether or not earlier ones have ended (open loop). Unless it is given, what the
    runner serves is measured first, for some seconds, and the load begins at a half of this `capacity`. `long_share` of
    them have long prompts, and with `shared_prefix` all begin alike. `policy`, `chunk_tokens` (prefill tokens of a
    step) and `max_num_seqs` are the scheduler's; each holds from the next step on, and no request is lost. Where
    `max_waiting` wait, more are refused and counted.

    `run`, `stop` and `wait` are the buttons. `cursor` is a time, None for the newest; `selected` two times, of which
    `statistics()` counts what happened. `follow` keeps the newest `span` seconds in sight. Times are seconds since the
    first event. Everything of the last two minutes is kept, older is dropped. All that is shown was measured, drawing
    included: it takes a part of the time that the requests take.

    A `runner` that is given stays open, and everything that it does is shown.
    """

    rate = traitlets.Float(0.0)
    long_share = traitlets.Float(0.1)
    shared_prefix = traitlets.Bool(False)
    policy = traitlets.Unicode("fcfs")
    chunk_tokens = traitlets.Int(512)
    max_num_seqs = traitlets.Int(8)
    running = traitlets.Bool(False)
    follow = traitlets.Bool(True)
    span = traitlets.Float(SPAN_SECONDS)
    window = traitlets.Tuple(traitlets.Float(), traitlets.Float(), default_value=(0.0, SPAN_SECONDS))
    cursor = traitlets.Float(None, allow_none=True)
    selected = traitlets.Tuple(default_value=())
    problem = traitlets.Unicode()

    _load: LoadGenerator | None = None
    _closed = False

    def __init__(self, runner: Runner | None = None, *, max_waiting: int = 24, seed: int = 0, **settings: Any):
        import workbench
        from workbench.engine.runner_thread import RunnerThread

        super().__init__()
        if max_waiting < 1:
            raise WorkbenchError(f"LiveBench: max_waiting must be at least 1, not {max_waiting}")
        self._owns_runner = runner is None
        self._runner = workbench.load("demo", **BENCH_ENGINE) if runner is None else runner
        spec, schedule = self._runner.model.spec, self._runner.config.schedule
        if spec.max_position_embeddings < LONGEST_REQUEST:
            raise WorkbenchError(
                f"LiveBench: its longest requests have {LONGEST_REQUEST} tokens, and the model's context is "
                f"{spec.max_position_embeddings}"
            )
        self._lock = RLock()  # of the log and the picture
        self._fresh: deque[Event] = deque()
        self._log, self._redraw_due = BenchLog(), False
        self._drawing_seconds = 0.0
        self._live = RunnerThread.attach(self._runner)
        if self._owns_runner:
            self._live.call(lambda each: each.set_schedule(**BENCH_SCHEDULE))
        self.capacity: float | None = None  # requests a second, measured before the load
        if "rate" not in settings:
            self.capacity = measure_capacity(
                self._live, LoadSettings(long_share=settings.get("long_share", self.long_share))
            )
        self.rate = settings.get("rate", max(1.0, round(self.capacity or 0.0) / 2))
        present = self._runner.schedule
        self.policy, self.max_num_seqs = getattr(present.policy, "kind", "custom"), present.max_num_seqs
        self.chunk_tokens = present.limits.max_prefill_tokens
        self._panels = panels_of_runner(self._runner)
        self._snapshots = SnapshotLog([self._live.call(lambda each: take_snapshot(each.scheduler, self._panels))])
        self._load = LoadGenerator(self._live, self._load_settings, self._append, self._tick, max_waiting, seed)
        note = snapshot_listener(self._snapshots, self._runner.scheduler, self._panels, lambda: None)
        self._listeners: list[Callable[[], None]] = [self._live.listen(self._append), self._live.listen(note)]
        register_stoppable(self._load)
        self.axis = TimeAxis(self._on_axis)
        self.table = ipywidgets.HTML()
        self.export = ExportButtons(
            "selection", csv=lambda: self._selection_statistics().csv(), png=lambda: self._draw(True)
        )
        self.export.layout.display = "none"
        self._alert = ipywidgets.HTML(layout={"min_height": "0"})
        self._rows = self._controls(schedule.max_num_seqs, schedule.max_num_batched_tokens)
        self.watch("follow", "window", "cursor", "selected", "span")
        for name in ("cursor", "selected"):
            self.observe(lambda _: self._read(), name)
        self.observe(self._on_load, ["rate", "long_share", "shared_prefix"])
        self.observe(self._on_schedule, ["policy", "chunk_tokens", "max_num_seqs"])
        self.observe(self._on_problem, "problem")
        for name, value in settings.items():
            if name not in ("rate", "long_share", "shared_prefix", "policy", "chunk_tokens", "max_num_seqs", "span"):
                raise WorkbenchError(f"LiveBench: no setting {name!r}; see its traits")
            self.set_trait(name, value)
        self.pages = MarkupWidget()
        self.show(*self._rows, self._alert, self.axis, below=(self.table, self.export, self.pages))

    @property
    def log(self) -> BenchLog:
        """Return the log of everything so far."""
        with self._lock:
            self._drain()
            return self._log

    def run(self, seconds: float = RUN_SECONDS) -> None:
        """Have requests arrive for so many seconds, in the background."""
        assert self._load is not None
        if not self._closed:
            self.problem, self.running = "", True
            self._load.start(seconds)

    def stop(self) -> None:
        """End the load and cancel its requests, soon."""
        if self._load is not None:
            self._load.stop()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the load is over and its requests have ended, or so many seconds; return whether they have."""
        assert self._load is not None
        done = self._load.wait(seconds)
        self.throttle.flush()
        self.keep()
        return done

    def statistics(self, begin: float | None = None, end: float | None = None) -> WindowStatistics:
        """Count what happened from `begin` to `end`, in seconds since the first event; all that is kept by default."""
        with self._lock:
            log = self.log
            origin = log.origin or 0.0
            first = max(0.0, log.begin) if begin is None else origin + begin
            return window_statistics(log, first, log.end + 1e-9 if end is None else origin + end)

    def zoom(self, factor: float = 1.0, by: float = 0.0, at: float | None = None) -> None:
        """Scale the window by `factor` around the time `at`, the middle by default, and move it by `by` windows."""
        log, (low, high) = self.log, self._window()
        if log.origin is None:
            return
        last, first = log.end - log.origin, log.begin - log.origin
        wide = min(max((high - low) * factor, MIN_SPAN_SECONDS), max(last - first, SPAN_SECONDS))
        share = 0.5 if at is None else min(max((at - low) / (high - low), 0.0), 1.0)
        low = low + share * (high - low) - share * wide + by * wide
        self._look(min(max(low, first), max(last - wide, first)), wide)

    def show_all(self) -> None:
        """Show everything that is kept, and follow the newest."""
        self.span, self.follow = self.log.kept_seconds, True

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
        was_closed, self._closed = self._closed, True
        if self._load is not None and not was_closed:
            self._load.close()
            for leave in self._listeners:
                leave()
            if self._owns_runner:
                self._live.call(lambda each: each.reset_prefix_cache())
                self._live.close()
                self._runner.close()
        super().close()

    @property
    def _origin(self) -> float:
        return self._log.origin or 0.0

    @property
    def _load_settings(self) -> LoadSettings:
        return LoadSettings(self.rate, self.long_share, self.shared_prefix)

    def _append(self, event: Event) -> None:
        """Keep an event for the next picture, in the thread in which it happened."""
        self._fresh.append(event)
        if isinstance(event, Stepped) and event.step % TRIM_STEPS == 0 and self._log.steps:
            self._snapshots.drop_before(self._log.steps[0].step)
        if isinstance(event, Stepped | Finished | SettingsChanged):
            self._mark_soon()

    def _mark_soon(self) -> None:
        if not self._redraw_due:
            self._redraw_due = True
            self.throttle.mark_later(STILL_SECONDS if self.axis.still else REDRAW_SECONDS)

    def _tick(self) -> None:
        """Let the time go on, in the load's thread, and at its end."""
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

    def _window(self) -> tuple[float, float]:
        """Return the times in sight, in seconds since the first event."""
        if not self.follow:
            return self.window
        log = self.log
        last, first = (0.0, 0.0) if log.origin is None else (log.end - log.origin, log.begin - log.origin)
        if self.span >= log.kept_seconds:
            return first, max(last, first + 1.0)
        return max(first, last - self.span), max(last, first + self.span)

    def _look(self, low: float, wide: float) -> None:
        self.follow, self.window = False, (low, low + wide)

    def _view(self) -> TimeView:
        low, high = (self._origin + each for each in self._window())
        cursor = None if self.cursor is None else self._origin + self.cursor
        chosen = tuple(self._origin + each for each in self.selected)
        return TimeView(low, high, cursor, (chosen[0], chosen[1]) if chosen else None)

    def _draw(self, marks: bool) -> str:
        assert self._load is not None
        snapshots = self._snapshots
        numbers, seconds = snapshots.owner_numbers, self._log.end - self._origin
        note = f"; drawing takes {self._drawing_seconds / seconds:.0%} of a core" if seconds > WINDOW_SECONDS else ""
        note += "" if self.capacity is None else f"; about {self.capacity:.2g} requests/s were served before the load"
        return draw_bench(
            self.log, self._view(), snapshots.snapshots, numbers, self._load.max_waiting, float(self.width), marks, note
        )

    def _draw_pages(self) -> str:
        time = self._log.end if self.cursor is None else self._origin + self.cursor
        step, snapshots = self._log.step_at(time), self._snapshots
        seen = snapshots.at(step.step if step is not None else 0)
        note = "at the cursor" if self.cursor is not None else "the newest"
        return draw_page_map(seen, [seen], snapshots.owner_numbers, note=note, width=float(self.width))

    def _read(self) -> None:
        """Describe the moment of the cursor, and show the selection's figures."""
        with self._lock:
            log = self.log
            moment = log.end if self.cursor is None else self._origin + self.cursor
            self.axis.reading = describe_moment(log, moment)
            self.axis.cursor = None if self.cursor is None else self._origin + self.cursor
            self.axis.selection = [self._origin + each for each in self.selected]
            if self.selected:
                self.table.value = draw_statistics(self._selection_statistics(), self._origin, float(self.width))
            elif self.table.value:
                self.table.value = ""
            self.export.layout.display = None if self.selected else "none"

    def _selection_statistics(self) -> WindowStatistics:
        return self.statistics(*self.selected)

    def _on_axis(self, message: dict[str, Any]) -> None:
        """Take what was done with pointer, wheel or keys; its times are those of the runner's clock."""
        origin = self._origin
        match message:
            case {"cursor": at}:
                self.cursor = None if at is None else at - origin
            case {"move": by}:
                self.cursor = self._moved(self._cursor_time(), by)
            case {"extend": by}:
                begin, end = self.selected or (self._cursor_time(),) * 2
                self._select(begin, self._moved(end, by))
            case {"select": []}:
                self.selected = ()
            case {"select": [begin, end]}:
                self._select(begin - origin, end - origin)
            case {"window": [low, high]}:
                self.zoom(by=(low - origin - self._window()[0]) / (high - low))
            case {"zoom": factor, "at": at}:
                self.zoom(factor, at=None if at is None else at - origin)
            case {"pan": by}:
                self.zoom(by=by)
            case {"all": _}:
                self.show_all()

    def _cursor_time(self) -> float:
        return self._log.end - self._origin if self.cursor is None else self.cursor

    def _moved(self, time: float, by: int) -> float:
        """Return the time `by` steps of the engine later, and at least as many pixels."""
        log, (low, high) = self.log, self._window()
        pixels = by * (high - low) / self.width
        return log.next_step(self._origin + time + pixels, 1 if by > 0 else -1) - self._origin

    def _select(self, anchor: float, end: float) -> None:
        self.selected = (anchor, end)

    def _on_load(self, _: Any) -> None:
        try:
            assert self._load is not None
            self._load.settings = self._load_settings
            self.problem = ""
        except WorkbenchError as error:
            self.problem = str(error)

    def _on_schedule(self, change: dict[str, Any]) -> None:
        """Hand a setting to the scheduler, between two of its steps."""
        name, value = change["name"], change["new"]
        answer = self._live.submit_call(lambda runner: runner.set_schedule(**{name: value}))

        def done(future: Any) -> None:
            error = future.exception()
            self.problem = "" if error is None else describe_error(error)

        answer.add_done_callback(done)

    def _on_problem(self, _: Any) -> None:
        words = escape(self.problem)
        self._alert.value = f'<span role="alert" style="color:#c0392b">{words}</span>' if words else ""

    def _controls(self, max_seqs: int, max_tokens: int) -> list[ipywidgets.Widget]:
        from workbench.scheduler.policies import BUILT_IN_POLICIES

        self._button = ipywidgets.Button(
            description="Run", icon="play", button_style="primary", layout={"width": "7em"}
        )
        self._button.tooltip = f"requests arrive for {RUN_SECONDS:g} s"
        self._button.on_click(lambda _: self.stop() if self.running else self.run())
        self.observe(self._on_running, "running")
        max_rate = max(10.0, round(2 * (self.capacity or self.rate)))  # what cannot be served is right of the middle
        policies = dict.fromkeys([*BUILT_IN_POLICIES, self.policy])
        chunks = sorted({each for each in CHUNKS if each <= max_tokens} | {self.chunk_tokens})
        made = load_controls(self, max_rate, policies, chunks, max_seqs)
        acts: dict[str, tuple[str, Callable[[], None]]] = {
            "+": ("zoom in", lambda: self.zoom(0.5)), "−": ("zoom out", lambda: self.zoom(2.0)),
            "all": ("all that is kept", self.show_all),
            "clear": ("no selection", lambda: self.set_trait("selected", ())),
        }  # fmt: skip
        buttons = []
        for sign, (what, act) in acts.items():
            slim = {"width": "auto", "min_width": "4.5em"}
            buttons.append(ipywidgets.Button(description=sign, tooltip=what, layout=slim))
            buttons[-1].on_click(lambda _, act=act: act())
        rows = (
            [self._button, made["shared_prefix"], made["follow"], *buttons],
            [made[name] for name in ("rate", "long_share", "policy", "chunk_tokens", "max_num_seqs")],
        )
        return [ipywidgets.HBox(row, layout={"flex_flow": "row wrap"}) for row in rows]

    def _on_running(self, _: Any) -> None:
        self._button.description, self._button.icon = ("Stop", "stop") if self.running else ("Run", "play")
        self._button.button_style = "" if self.running else "primary"
        if not self.running and not self._closed:
            self.keep()
