"""Draw prefill, decode and kernels under a machine's roofs, predicted beside measured."""

from __future__ import annotations

import threading
from collections import deque
from html import escape
from typing import TYPE_CHECKING, Any

import ipywidgets
import traitlets

from workbench import svg
from workbench.errors import WorkbenchError, describe_error
from workbench.trace.events import Event, Stepped
from workbench.waiting import join_and_serve
from workbench.widgets.roofline import picture as roofline_picture
from workbench.widgets.roofline.data import STEP_FIELDS, Roof, RooflinePoint, Roofs, points_of, points_of_steps
from workbench.widgets.view import PictureWidget

if TYPE_CHECKING:
    from workbench.machine.ceilings import Ceiling, MachineCeilings

DTYPES = ("float32", "bfloat16")
MAX_STEPS = 5_000  # of a runner, the last ones
SEVERAL = 2**20  # bytes: the least working set whose reading can be timed


class Roofline(PictureWidget):
    """Show FLOP/s over FLOPs a byte, on logarithmic axes: a point lies below the lower of two roofs, the rate that its
    bytes allow and the rate that its FLOPs allow. A hollow mark is the attainable rate, a filled one the measured rate.

    `sources` are a runner (its steps appear as it works), runs, records of benches (their ceilings come with them), or
    `RooflinePoint`s. `ceilings` are `MachineCeilings`, `Roofs`, or the name of a machine whose data sheet is known,
    such as `h100`; unless given, those of this machine that were measured before. `measure` measures this machine's.
    Raises WorkbenchError for anything else as a source.
    """

    engine_fields = ("runner",)
    ceilings = traitlets.Instance(Roofs, ())
    points = traitlets.Tuple()  # of the sources, but for what a runner adds
    chosen = traitlets.Int(None, allow_none=True)  # the place of a point
    measuring = traitlets.Bool(False)
    error = traitlets.Unicode()

    def __init__(self, *sources: Any, ceilings: MachineCeilings | Roofs | str | None = None):
        super().__init__()
        runners = [source for source in sources if hasattr(source, "telemetry")]
        if len(runners) > 1:
            raise WorkbenchError("a roofline of several runners: give one; of the others, their runs")
        self.runner: Any = runners[0] if runners else None
        self.points = tuple(p for source in sources if source is not self.runner for p in points_of(source))
        self._recent_steps: deque[Stepped] = deque(maxlen=MAX_STEPS)
        self.ceilings = self._cached_ceilings() if ceilings is None else roofs_of(ceilings)
        if self.runner is not None:
            from workbench.engine.runner_thread import RunnerThread

            self._leave = RunnerThread.attach(self.runner).listen(self._on_event)
        wide: Any = {"width": "auto"}
        tip = "a few seconds, while nothing else runs"
        button = ipywidgets.Button(description="Measure this machine", tooltip=tip, layout=wide)
        button.on_click(lambda _: self.measure(wait=False))
        tip = "what the runner did until now"
        forget = ipywidgets.Button(description="Forget the steps", tooltip=tip, layout=wide)
        forget.on_click(lambda _: self.forget())
        traitlets.dlink((self, "measuring"), (button, "disabled"))
        self.shown.on_pick(self._pick)
        self.watch("ceilings", "points", "chosen", "measuring", "error")
        self.show(ipywidgets.HBox([button, forget] if self.runner is not None else [button]))

    @property
    def works(self) -> list[RooflinePoint]:
        """All points, each with the roofs that hold for it."""
        steps = [{name: getattr(step, name) for name in STEP_FIELDS} for step in tuple(self._recent_steps)]
        mine = points_of_steps(steps, self._dtype) if steps else []
        return [point.with_ceilings(self.ceilings) for point in (*self.points, *mine)]

    def picture(self) -> str:
        works = self.works
        roofs = self.ceilings.relevant_to(works)
        message = "measuring this machine … (goes on to its end, some seconds)" if self.measuring else ""
        if not (roofs.reads and roofs.gemms) and not message:
            message = "The roofs are not known yet: press Measure this machine, or call measure()."
        alert = f'<p role="alert">⚠ {escape(self.error)}</p>' if self.error else ""
        picture = roofline_picture.draw_roofline(works, roofs, self.chosen, self.width)
        words = "○ what the roof allows, ● as measured; a line joins the two."
        if any(roof.contended for roof in (*roofs.reads, *roofs.gemms)):
            words += " Other processes were at work while the roofs were measured: they may be higher."
        return svg.html(
            alert, f"<p>{message}</p>" if message else "", picture, f"<p>{words}</p>",
            roofline_picture.draw_table(works, self.chosen) if works else "",
        )  # fmt: skip

    def measure(self, wait: bool = True, refresh: bool = False) -> None:
        """Measure what this machine reads and multiplies at best, unless that was done before (with `refresh`, even
        then): between two steps of the runner, and to its end. Without `wait` in the background."""
        if self.measuring:
            return
        self.measuring, self.error = True, ""
        worker = threading.Thread(target=self._measure, args=(refresh,), name="measures ceilings", daemon=True)
        worker.start()
        if wait:
            join_and_serve(worker)
            if self.error:
                raise WorkbenchError(self.error)

    def forget(self) -> None:
        """The runner's steps until now are no points any more."""
        self._recent_steps.clear()
        self.throttle.mark()

    def _on_event(self, event: Event) -> None:
        """In the thread that owns the runner: only kept here, drawn elsewhere."""
        if isinstance(event, Stepped):
            self._recent_steps.append(event)
            self.throttle.mark()

    def _measure(self, refresh: bool) -> None:
        from workbench.machine.ceilings import ceilings_for

        def work(_: Any) -> MachineCeilings:
            return ceilings_for(*self._sizes(), dtypes=DTYPES, refresh=refresh)

        try:
            if self.runner is None:
                self.ceilings = roofs_of(work(None))
            else:
                from workbench.engine.runner_thread import RunnerThread

                self.ceilings = roofs_of(RunnerThread.attach(self.runner).call(work))
        except Exception as error:
            self.error = describe_error(error)
        finally:
            self.measuring = False

    def _cached_ceilings(self) -> Roofs:
        from workbench.machine.ceilings import stored_ceilings

        return roofs_of(stored_ceilings(*self._sizes(), dtypes=DTYPES))

    def _sizes(self) -> list[int]:
        """Working sets within the last cache and far beyond it, and the runner's weights."""
        from workbench.machine.processor import last_level_cache

        cache = last_level_cache() or 2**25
        weights = [] if self.runner is None else [self.runner.model.weight_bytes]
        return sorted({max(SEVERAL, cache // 2), 4 * cache, *weights})

    @property
    def _dtype(self) -> str:
        return str(self.runner.model.dtype).removeprefix("torch.")

    def _pick(self, key: str) -> None:
        place = int(key)
        self.chosen = None if place == self.chosen else place


def roofs_of(ceilings: MachineCeilings | Roofs | str) -> Roofs:
    """Ceilings that were measured, or those of a machine's data sheet. Raises WorkbenchError for an unknown name."""
    if isinstance(ceilings, Roofs):
        return ceilings
    if isinstance(ceilings, str):
        from workbench.simulate.roofline import named_hardware

        sheet = named_hardware(ceilings)
        note = f"from the {sheet.source}"
        read = Roof(f"{sheet.name} memory", sheet.bandwidth, sheet.memory, note)
        return Roofs((read,), (Roof("bfloat16", sheet.flops, 0, note),))
    return Roofs(
        *(
            tuple(_roof(each) for each in dict.fromkeys(kind))
            for kind in (ceilings.read_ceilings, ceilings.gemm_ceilings)
        )
    )


def _roof(ceiling: Ceiling) -> Roof:
    from workbench.machine.processor import is_contended
    from workbench.memory.report import format_bytes

    size, others = ceiling.working_set_bytes, ceiling.others_cpu_share
    name = f"{ceiling.level} ({format_bytes(size)})" if ceiling.kind == "read" else ceiling.dtype
    busy = "" if others is None else f", others took {others:.0%} of the processor"
    note = f"Median of {ceiling.repeats} by {ceiling.method}, {ceiling.threads} threads{busy}"
    return Roof(name, ceiling.value, size, note, is_contended(others))
