"""Show an operator through its stages, from specification to machine code, and time its backends."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from typing import Any

import ipywidgets
import traitlets

from workbench.waiting import wait_and_serve
from workbench.widgets.kernels import data as kernel_stages
from workbench.widgets.kernels import picture as kernel_picture
from workbench.widgets.kernels.fusion import FusionMarks, mark_fusion, summarize_fusion
from workbench.widgets.kernels.timing import BackendTimingProcess
from workbench.widgets.view import PictureWidget

BACKENDS = ("eager", "inductor", "mlir", "triton")
NOT_MADE = "not made yet: choose the backend"
MAKING = "being made … (a compilation that has begun goes on to its end)"
_COMPILING = threading.Lock()  # compilers are watched by what is of the whole process


class KernelView(PictureWidget):
    """`operator` as `workbench kernels list` names them, `case` one of its own (the first timed one unless given).

    A backend's stages are made when it is chosen, in the background; `make`, or a `stage` given, waits for them. What
    became one kernel or loop has one letter. `measure` times the backends beside each other, in a process of its own;
    nothing is timed before.
    """

    operator = traitlets.Unicode()
    case = traitlets.Unicode()
    backend = traitlets.Unicode()
    stage = traitlets.Unicode()

    def __init__(
        self,
        operator: str = "add_rms_norm",
        *,
        case: str | None = None,
        backends: Iterable[str] = BACKENDS,
        backend: str | None = None,
        stage: str | None = None,
    ):
        super().__init__()
        with kernel_stages.as_workbench_error():
            self.backends = tuple(kernel_stages.validate_name("backend", name, BACKENDS) for name in backends)
            self.operator = kernel_stages.validate_name("operator", operator, kernel_stages.operator_names())
            self.case = kernel_stages.case_name(operator, case)
            self.backend = kernel_stages.validate_name(
                "backend", backend or (self.backends or BACKENDS)[0], self.backends
            )
        self._made: dict[tuple[str, str, str], Any] = {}  # Stages, or why there are none
        self._wanted: deque[tuple[str, str, str]] = deque()
        self._bell = threading.Condition()
        self._thread: threading.Thread | None = None
        self._timing: BackendTimingProcess | None = None
        self._timed: dict[tuple[str, str], dict[str, Any]] = {}
        self.watch("operator", "case", "backend", "stage")
        self.observe(self._changed, ["operator", "case", "backend"])
        self.shown.observe(self._picked, ["picked"])
        self._want()
        if self.backend == "eager" or stage is not None:
            self.make(self.backend)
        if stage is not None:
            with kernel_stages.as_workbench_error():
                self.stage = kernel_stages.validate_name(
                    f"stage of {operator} on {self.backend}", stage, self._texts(self.backend)
                )
        self.show(*self._controls())

    @property
    def text(self) -> str:
        """All of the stage that is shown."""
        texts = self._texts(self.backend)
        return texts.get(self._stage(texts), "")

    def _stage(self, texts: dict[str, str]) -> str:
        """The one that is shown of those that were made; `stage` follows when it is drawn."""
        return self.stage if self.stage in texts else kernel_stages.default_stage(self.backend, texts) if texts else ""

    def make(self, *backends: str) -> KernelView:
        """Have the stages of `backends` (all unless given) made now; a backend that cannot make them says why."""
        with kernel_stages.as_workbench_error():
            names = [
                kernel_stages.validate_name("backend", backend, self.backends) for backend in backends or self.backends
            ]
        keys = [self._want(backend) for backend in names]

        def made(seconds: float | None) -> bool:
            with self._bell:
                return self._bell.wait_for(lambda: not any(key in self._wanted for key in keys), seconds)

        wait_and_serve(made)
        return self

    def measure(self, seconds: float = 0.2, ceilings: bool = True) -> KernelView:
        """Time the backends on this case in the background, `seconds` for each, beside the backend eager. With
        `ceilings`, measure this machine's memory and cores too, for the share of them that is reached."""
        self.stop()
        key, backends = (self.operator, self.case), dict.fromkeys(("eager", *self.backends))

        def on_record() -> None:
            if self._timing is timing and timing.record:
                self._timed[key] = timing.record
            self.throttle.mark()

        timing = self._timing = BackendTimingProcess(*key, tuple(backends), seconds, ceilings, on_record)
        self.throttle.mark()
        return self

    def wait(self, seconds: float | None = None) -> bool:
        """Until nothing is being made or timed, or so many seconds. The saved picture is then the present one."""
        done = wait_and_serve(self._wait, seconds)
        done = (self._timing is None or self._timing.wait(seconds)) and done
        self.throttle.flush()
        self.keep()
        return done

    def _wait(self, seconds: float | None) -> bool:
        with self._bell:
            return self._bell.wait_for(lambda: not self._wanted, seconds)

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
        texts = self._texts(self.backend)
        stage = self._stage(texts)
        made, text = self._of(self.backend), texts.get(stage, "")
        fusion = kernel_stages.fusion_data(made)
        marks = mark_fusion(self.backend, stage, text, fusion, texts.get("post_grad", "")) if text else FusionMarks()
        record = self._timed.get((self.operator, self.case), {})
        shown = kernel_picture.KernelPage(
            f"{self.operator} {self.case}", self.backend, stage, text, marks,
            {backend: self._sizes(backend) for backend in self.backends},
            summarize_fusion(self.backend, texts, fusion) if texts else "",
            f"artifact {made.artifact[:12]}: {made.note}" if texts else "",
            record.get("rows", ()), self._describe_timing(record),
            (self._timing.error,) if self._timing is not None and self._timing.error else (),
        )  # fmt: skip
        return kernel_picture.draw_kernel(shown)

    def redraw(self) -> None:
        """The stages that can be chosen are those that were made."""
        texts = self._texts(self.backend)
        if texts:
            self.stage = self._stage(texts)
        super().redraw()

    def _controls(self) -> tuple[ipywidgets.Widget, ...]:
        operator = ipywidgets.Dropdown(options=kernel_stages.operator_names(), description="operator")
        case = ipywidgets.Dropdown(options=kernel_stages.case_names(self.operator), description="case")
        backend = ipywidgets.Dropdown(options=self.backends, description="backend")
        run = ipywidgets.Button(description="time the backends", tooltip="in a process of its own; takes some seconds",
                                layout={"width": "auto"})  # fmt: skip
        stop = ipywidgets.Button(description="stop", tooltip="end the timing; a compilation goes on to its end")
        run.on_click(lambda _: self.measure())
        stop.on_click(lambda _: self.stop())
        self._case = case
        for control, name in ((operator, "operator"), (case, "case"), (backend, "backend")):
            ipywidgets.link((self, name), (control, "value"))
        return ipywidgets.HBox([operator, case]), ipywidgets.HBox([backend, run, stop])

    def _changed(self, change: dict[str, Any]) -> None:
        if change["name"] == "operator":
            with self.hold_trait_notifications():
                self._case.options = kernel_stages.case_names(self.operator)
        self._want()

    def _picked(self, change: dict[str, Any]) -> None:
        backend, _, stage = str(change["new"]).partition("/")
        self.backend, self.stage = backend, stage

    def _want(self, backend: str | None = None) -> tuple[str, str, str]:
        """Request the stages of this case on `backend`, unless they are made or requested already; return their key.
        Those of the backend eager need no compiling: they are there at once, whatever any view compiles."""
        key = self.operator, self.case, backend or self.backend
        if key[2] == "eager" and key not in self._made:
            self._made[key] = kernel_stages.make_stages(*key)
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
                made = kernel_stages.make_stages(*key)
            with self._bell:
                self._made[key] = made
                self._wanted.remove(key)
                self._bell.notify_all()
            self.throttle.mark()

    def _of(self, backend: str) -> Any:
        return self._made.get((self.operator, self.case, backend))

    def _texts(self, backend: str) -> dict[str, str]:
        made = self._of(backend)
        return {name: each.text for name, each in made.stages.items()} if hasattr(made, "stages") else {}

    def _sizes(self, backend: str) -> dict[str, int] | str:
        made = self._of(backend)
        if made is None:
            return MAKING if (self.operator, self.case, backend) in self._wanted else NOT_MADE
        return made if isinstance(made, str) else {n: text.count("\n") + 1 for n, text in self._texts(backend).items()}

    def _describe_timing(self, record: dict[str, Any]) -> str:
        if self._timing is not None and not self._timing.done and not self._timing.record:
            return "being timed in a process of its own …"
        if not record:
            return ""
        busy = f"; others took {record['others_cpu_share']:.0%} of the processor" if record["others_cpu_share"] else ""
        return f"{record['threads']} threads, {record['environment']['cpu']['model']}, {record['date']}{busy}"
