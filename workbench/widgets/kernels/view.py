"""Show the stages of an operator from its specification to machine code, and time its backends."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from functools import partial
from typing import Any

import ipywidgets
import traitlets

from workbench.units import format_percent
from workbench.widgets.job import Job
from workbench.widgets.kernels import data as kernel_stages
from workbench.widgets.kernels import picture as kernel_picture
from workbench.widgets.kernels.fusion import FusionMarks, mark_fusion, summarize_fusion
from workbench.widgets.kernels.timing import BackendTimingProcess
from workbench.widgets.view import PictureWidget, button

BACKENDS = ("eager", "inductor", "mlir", "triton")
NOT_MADE = "not made yet: choose the backend"
MAKING = "being made … (a compilation that has begun goes on to its end)"
_COMPILING = threading.Lock()  # the capture of a compiler's stages is process-wide


class KernelView(PictureWidget):
    """A view of the stages of an `operator` (see `workbench kernels list`) on a `case` (default: its first timed case).

    A backend's stages are made in the background when it is chosen; `make`, or a given `stage`, waits for them. The
    lines of one kernel or loop nest have one letter. `measure` times all backends in a separate process.
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
        self._made: dict[tuple[str, str, str], Any] = {}  # CompilerStages, or why there are none
        self._jobs: dict[tuple[str, str, str], Job] = {}  # they make stages, one after the other
        self._timing: BackendTimingProcess | None = None
        self._timed: dict[tuple[str, str], dict[str, Any]] = {}
        self.watch("operator", "case", "backend", "stage")
        self.observe(self._changed, ["operator", "case", "backend"])
        self.shown.on_pick(self._picked)
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
        """Return the full text of the shown stage."""
        texts = self._texts(self.backend)
        return texts.get(self._stage(texts), "")

    def _stage(self, texts: dict[str, str]) -> str:
        """Return the shown stage: `stage` if the backend has it, else a default; "" without stages."""
        return self.stage if self.stage in texts else kernel_stages.default_stage(self.backend, texts) if texts else ""

    def make(self, *backends: str) -> KernelView:
        """Make the stages of `backends` (default: all) and wait for them; a backend that fails shows its reason."""
        with kernel_stages.as_workbench_error():
            names = [
                kernel_stages.validate_name("backend", backend, self.backends) for backend in backends or self.backends
            ]
        for key in [self._want(backend) for backend in names]:
            if (job := self._jobs.get(key)) is not None:
                job.wait()
        return self

    def measure(self, seconds: float = 0.2, ceilings: bool = True) -> KernelView:
        """Time the backends, and eager, on this case in the background, `seconds` for each.

        With `ceilings`, measure this machine's memory and compute ceilings, too, and show the share that is reached."""
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
        """Wait for stages and timing, at most `seconds` for each, and save the picture; return whether all is done."""
        jobs = (*self._jobs.values(), *([self._timing] if self._timing is not None else []))
        done = all([job.wait(seconds) for job in jobs])
        self.throttle.flush()
        self.keep()
        return done

    def stop(self) -> None:
        """Stop the timing and drop requested compilations; a compilation that has begun goes on to its end."""
        if self._timing is not None:
            self._timing.stop()
        for job in tuple(self._jobs.values()):
            job.stop()

    def close(self) -> None:
        if hasattr(self, "_jobs"):
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
        """Set `stage` to a stage that exists, and redraw."""
        texts = self._texts(self.backend)
        if texts:
            self.stage = self._stage(texts)
        super().redraw()

    def _controls(self) -> tuple[ipywidgets.Widget, ...]:
        operator = ipywidgets.Dropdown(options=kernel_stages.operator_names(), description="operator")
        case = ipywidgets.Dropdown(options=kernel_stages.case_names(self.operator), description="case")
        backend = ipywidgets.Dropdown(options=self.backends, description="backend")
        tip = "in a separate process; takes some seconds"
        run = button(self.measure, "time the backends", tooltip=tip, layout={"width": "auto"})
        stop = button(self.stop, "stop", tooltip="end the timing; a compilation goes on to its end")
        self._case = case
        choice = ipywidgets.HBox([self.linked("operator", operator), self.linked("case", case)])
        return choice, ipywidgets.HBox([self.linked("backend", backend), run, stop])

    def _changed(self, change: dict[str, Any]) -> None:
        if change["name"] == "operator":
            with self.hold_trait_notifications():
                self._case.options = kernel_stages.case_names(self.operator)
        self._want()

    def _picked(self, key: str) -> None:
        backend, _, stage = key.partition("/")
        self.backend, self.stage = backend, stage

    def _want(self, backend: str | None = None) -> tuple[str, str, str]:
        """Request the stages of this case on `backend` unless they are made or requested already; return their key.

        Eager stages need no compilation and are made at once."""
        key = self.operator, self.case, backend or self.backend
        if key[2] == "eager" and key not in self._made:
            self._made[key] = kernel_stages.make_stages(*key)
        job = self._jobs.get(key)
        if key not in self._made and (job is None or job.stopped):
            self._jobs[key] = job = Job(partial(self._make, key), partial(self._end, key), name="kernel stages")
            job.start()
        return key

    def _make(self, key: tuple[str, str, str], job: Job) -> None:
        with _COMPILING:
            if not job.stopped and key not in self._made:
                self._made[key] = kernel_stages.make_stages(*key)

    def _end(self, key: tuple[str, str, str], job: Job) -> None:
        if job.error:
            self._made[key] = job.error
        if self._jobs.get(key) is job:
            del self._jobs[key]
        self.throttle.mark()

    def _of(self, backend: str) -> Any:
        return self._made.get((self.operator, self.case, backend))

    def _texts(self, backend: str) -> dict[str, str]:
        made = self._of(backend)
        return {name: each.text for name, each in made.stages.items()} if hasattr(made, "stages") else {}

    def _sizes(self, backend: str) -> dict[str, int] | str:
        made = self._of(backend)
        if made is None:
            return MAKING if (self.operator, self.case, backend) in self._jobs else NOT_MADE
        return made if isinstance(made, str) else {n: text.count("\n") + 1 for n, text in self._texts(backend).items()}

    def _describe_timing(self, record: dict[str, Any]) -> str:
        if self._timing is not None and not self._timing.done and not self._timing.record:
            return "being timed in a separate process …"
        if not record:
            return ""
        others = record["others_cpu_share"]
        busy = f"; others took {format_percent(others)} of the processor" if others else ""
        return f"{record['threads']} threads, {record['environment']['cpu']['model']}, {record['date']}{busy}"
