"""Show an operator through its stages, from specification to machine code, and time its backends."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from typing import Any

import ipywidgets
import traitlets

from workbench.widgets.kernels import picture as kernel_picture
from workbench.widgets.kernels import stages as kernel_stages
from workbench.widgets.kernels.fused import marked, summary
from workbench.widgets.kernels.marked import Marked
from workbench.widgets.kernels.timing import Timing
from workbench.widgets.view import View

LANES = ("eager", "inductor", "mlir", "triton")
LATER = "not made yet: choose the lane"
MAKING = "being made … (a compilation that has begun goes on to its end)"
_COMPILING = threading.Lock()  # compilers are watched by what is of the whole process


class KernelView(View):
    """`operator` as `workbench kernels list` names them, `case` one of its own (the first timed one unless given).

    A lane's stages are made when it is chosen, in the background; `make`, or a `stage` given, waits for them. What
    became one kernel or loop has one letter. `measure` times the lanes beside each other, in a process of its own;
    nothing is timed before.
    """

    operator = traitlets.Unicode()
    case = traitlets.Unicode()
    lane = traitlets.Unicode()
    stage = traitlets.Unicode()

    def __init__(
        self,
        operator: str = "add_rms_norm",
        *,
        case: str | None = None,
        lanes: Iterable[str] = LANES,
        lane: str | None = None,
        stage: str | None = None,
    ):
        super().__init__()
        with kernel_stages.told():
            self.lanes = tuple(kernel_stages.known("lane", name, LANES) for name in lanes)
            self.operator = kernel_stages.known("operator", operator, kernel_stages.operators())
            self.case = kernel_stages.case_name(operator, case)
            self.lane = kernel_stages.known("lane", lane or (self.lanes or LANES)[0], self.lanes)
        self._made: dict[tuple[str, str, str], Any] = {}  # Stages, or why there are none
        self._wanted: deque[tuple[str, str, str]] = deque()
        self._bell = threading.Condition()
        self._thread: threading.Thread | None = None
        self._timing: Timing | None = None
        self._timed: dict[tuple[str, str], dict[str, Any]] = {}
        self.watch("operator", "case", "lane", "stage")
        self.observe(self._changed, ["operator", "case", "lane"])
        self.shown.observe(self._picked, ["picked"])
        self._want()
        if self.lane == "eager" or stage is not None:
            self.make(self.lane)
        if stage is not None:
            with kernel_stages.told():
                self.stage = kernel_stages.known(f"stage of {operator} on {self.lane}", stage, self._texts(self.lane))
        self.show(*self._controls())

    @property
    def text(self) -> str:
        """All of the stage that is shown."""
        texts = self._texts(self.lane)
        return texts.get(self._stage(texts), "")

    def _stage(self, texts: dict[str, str]) -> str:
        """The one that is shown of those that were made; `stage` follows when it is drawn."""
        return self.stage if self.stage in texts else kernel_stages.first(self.lane, texts) if texts else ""

    def make(self, *lanes: str) -> KernelView:
        """Have the stages of `lanes` (all unless given) made now; a lane that cannot make them says why."""
        with kernel_stages.told():
            names = [kernel_stages.known("lane", lane, self.lanes) for lane in lanes or self.lanes]
        keys = [self._want(lane) for lane in names]
        with self._bell:
            self._bell.wait_for(lambda: not any(key in self._wanted for key in keys))
        return self

    def measure(self, seconds: float = 0.2, ceilings: bool = True) -> KernelView:
        """Time the lanes on this case in the background, `seconds` for each, beside the lane eager; and, for the share
        of them that is reached, what this machine's memory and cores can do."""
        self.stop()
        key, lanes = (self.operator, self.case), dict.fromkeys(("eager", *self.lanes))

        def told() -> None:
            if self._timing is timing and timing.record:
                self._timed[key] = timing.record
            self.pulse.mark()

        timing = self._timing = Timing(*key, tuple(lanes), seconds, ceilings, told)
        self.pulse.mark()
        return self

    def wait(self, seconds: float | None = None) -> bool:
        """Until nothing is being made or timed, or so many seconds. The saved picture is then the present one."""
        with self._bell:
            done = self._bell.wait_for(lambda: not self._wanted, seconds)
        done = (self._timing is None or self._timing.wait(seconds)) and done
        self.pulse.flush()
        self.keep()
        return done

    def stop(self) -> None:
        """End the timing, and what is not yet begun to be made; a compilation that has begun goes on to its end."""
        if self._timing is not None:
            self._timing.stop()
        with self._bell:
            while len(self._wanted) > 1:
                self._wanted.pop()

    def close(self) -> None:
        if hasattr(self, "_wanted"):
            self.stop()
        super().close()

    def picture(self) -> str:
        texts = self._texts(self.lane)
        stage = self._stage(texts)
        made, text = self._of(self.lane), texts.get(stage, "")
        fusion = kernel_stages.fusion(made)
        marks = marked(self.lane, stage, text, fusion, texts.get("post_grad", "")) if text else Marked()
        record = self._timed.get((self.operator, self.case), {})
        shown = kernel_picture.Shown(
            f"{self.operator} {self.case}", self.lane, stage, text, marks,
            {lane: self._sizes(lane) for lane in self.lanes},
            summary(self.lane, texts, fusion) if texts else "",
            f"artifact {made.artifact[:12]}: {made.note}" if texts else "",
            record.get("rows", ()), self._timing_told(record),
            (self._timing.error,) if self._timing is not None and self._timing.error else (),
        )  # fmt: skip
        return kernel_picture.drawn(shown)

    def redraw(self) -> None:
        """The stages that can be chosen are those that were made."""
        texts = self._texts(self.lane)
        if texts:
            self.stage = self._stage(texts)
        super().redraw()

    def _controls(self) -> tuple[ipywidgets.Widget, ...]:
        operator = ipywidgets.Dropdown(options=kernel_stages.operators(), description="operator")
        case = ipywidgets.Dropdown(options=kernel_stages.cases(self.operator), description="case")
        lane = ipywidgets.Dropdown(options=self.lanes, description="lane")
        run = ipywidgets.Button(description="time the lanes", tooltip="in a process of its own; takes some seconds")
        stop = ipywidgets.Button(description="stop", tooltip="end the timing; a compilation goes on to its end")
        run.on_click(lambda _: self.measure())
        stop.on_click(lambda _: self.stop())
        self._case = case
        for control, name in ((operator, "operator"), (case, "case"), (lane, "lane")):
            ipywidgets.link((self, name), (control, "value"))
        return ipywidgets.HBox([operator, case]), ipywidgets.HBox([lane, run, stop])

    def _changed(self, change: dict[str, Any]) -> None:
        if change["name"] == "operator":
            with self.hold_trait_notifications():
                self._case.options = kernel_stages.cases(self.operator)
        self._want()

    def _picked(self, change: dict[str, Any]) -> None:
        lane, _, stage = str(change["new"]).partition("/")
        self.lane, self.stage = lane, stage

    def _want(self, lane: str | None = None) -> tuple[str, str, str]:
        """Have it made, unless it is or will be; its key. Of the lane eager nothing is compiled: it is there at once,
        whatever this view or another compiles."""
        key = self.operator, self.case, lane or self.lane
        if key[2] == "eager" and key not in self._made:
            self._made[key] = kernel_stages.stages(*key)
        with self._bell:
            if key in self._made or key in self._wanted:
                return key
            self._wanted.append(key)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="kernel stages", daemon=True)
                self._thread.start()
        return key

    def _work(self) -> None:
        while True:
            with self._bell:
                if not self._wanted:
                    self._thread = None
                    return
                key = self._wanted[0]
            with _COMPILING:
                made = kernel_stages.stages(*key)
            with self._bell:
                self._made[key] = made
                self._wanted.remove(key)
                self._bell.notify_all()
            self.pulse.mark()

    def _of(self, lane: str) -> Any:
        return self._made.get((self.operator, self.case, lane))

    def _texts(self, lane: str) -> dict[str, str]:
        made = self._of(lane)
        return {name: each.text for name, each in made.stages.items()} if hasattr(made, "stages") else {}

    def _sizes(self, lane: str) -> dict[str, int] | str:
        made = self._of(lane)
        if made is None:
            return MAKING if (self.operator, self.case, lane) in self._wanted else LATER
        return made if isinstance(made, str) else {n: text.count("\n") + 1 for n, text in self._texts(lane).items()}

    def _timing_told(self, record: dict[str, Any]) -> str:
        if self._timing is not None and not self._timing.done and not self._timing.record:
            return "being timed in a process of its own …"
        if not record:
            return ""
        busy = f"; others took {record['others_cpu_share']:.0%} of the processor" if record["others_cpu_share"] else ""
        return f"{record['threads']} threads, {record['environment']['cpu']['model']}, {record['date']}{busy}"
