"""Show a model's step: its operators, its place under the machine's roofs, and the rows of its experts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from html import escape
from statistics import median
from typing import TYPE_CHECKING, Any

import ipywidgets
import traitlets

from workbench import svg
from workbench.engine.runner_thread import RunnerThread
from workbench.errors import WorkbenchError
from workbench.executors.programs.kernels import as_written
from workbench.trace.events import Event, ExpertsUsed, Stepped
from workbench.units import format_bytes, format_quantity
from workbench.widgets.job import Job
from workbench.widgets.model_graph.data import GraphStep, ValueBytes, model_operators
from workbench.widgets.model_graph.experts import ExpertTable
from workbench.widgets.model_graph.experts_picture import draw_experts
from workbench.widgets.model_graph.graph import NOT_MEASURED, MeasuredSeconds, OperatorGraph, total_cost
from workbench.widgets.model_graph.kernels import capabilities, step_kernels
from workbench.widgets.model_graph.picture import draw_graph
from workbench.widgets.model_graph.roofline import (
    STEP_FIELDS,
    RooflinePoint,
    Roofs,
    points_of,
    points_of_steps,
    roofs_of,
)
from workbench.widgets.model_graph.roofline_picture import draw_points, draw_roofline
from workbench.widgets.model_graph.timing import functions_problem, time_functions, time_operators
from workbench.widgets.recorded import Recorded
from workbench.widgets.view import PictureWidget, button

if TYPE_CHECKING:
    from workbench.engine.runner import Runner
    from workbench.machine.ceilings import MachineCeilings

FUNCTIONS = ("as it runs", "as written")
DTYPES = ("float32", "bfloat16")
MAX_STEPS = 10_000  # kept steps, newest
MAX_EXPERT_STEPS = 300  # kept steps of a runner's experts, newest: all are added up at each redraw
DEFAULT_TOKENS = 256
MIN_WORKING_SET = 2**20  # bytes of the smallest working set that can be timed
LABELS_WIDTH = 80  # pixels for labels left of the roofline's plot
NO_ROOFS = "The roofs of this machine are not known yet: press Measure, or call measure()."


class ModelGraph(PictureWidget):
    """A view of a model's step in three tabs: its operators, its place under the machine's roofs, and the rows of its
    experts.

        ModelGraph(runner, kind="prefill", tokens=512)
        ModelGraph(runner, "runs/a", tab="roofline")
        ModelGraph(runner.stream("def fib(n):"), tab="experts")

    `sources` are a runner, which is shown as it works; runs, benchmark records (with their own ceilings) and
    `RooflinePoint`s for the roofline; events or a recorder for the experts. `tabs` are those that the sources allow.

    `graph`: the operators of a `prefill` of `tokens`, or of a `decode` with a context of `tokens`, with FLOPs and bytes
    of the cost model. A bracket holds the operators of one compiled function. `functions` selects the runner's
    functions ("as it runs"), or the eager modules ("as written"). Equal layers are folded into one: a click on its
    head, or Enter, unfolds them.

    `roofline`: FLOP/s over FLOPs a byte, on logarithmic axes. A point lies below the lower of two roofs, the rate that
    its bytes allow and the rate that its FLOPs allow. A hollow mark is the attainable rate, a filled one the measured
    rate. `works` are the points, `chosen` the index of one.

    `experts`: the rows that each expert of each layer computed since `runner.record_experts()`, in the newest
    `MAX_EXPERT_STEPS` steps of a runner; `expert_step` is the number of the shown step, and any number before the first
    kept step shows the sum of all.

    `measure` measures what the tab shows. `ceilings` are `MachineCeilings`, `Roofs`, or the name of a machine with a
    known data sheet, such as `h100`; default: the stored ceilings of this machine. Raises WorkbenchError for another
    source, a tab without a source, and a step outside the model's context.
    """

    engine_fields = ("_runner",)
    tab = traitlets.Unicode()
    kind: Any = traitlets.Enum(("prefill", "decode"), default_value="decode")
    tokens = traitlets.Int(1)
    functions = traitlets.Enum(FUNCTIONS, default_value=FUNCTIONS[0])
    unfolded = traitlets.Tuple()  # first layer of each set of equal layers that is drawn layer by layer
    points = traitlets.Tuple()  # points of the sources, without the runner's
    chosen = traitlets.Int(None, allow_none=True)  # index of a point
    expert_step = traitlets.Int(-1)
    ceilings: Any = traitlets.Instance(Roofs, ())
    measuring = traitlets.Bool(False)
    error = traitlets.Unicode()
    _runner: Runner | None = None  # None without one, before `__init__` sets it, and after `close`

    def __init__(
        self, *sources: Any, kind: str = "decode", tokens: int | None = None, functions: str = FUNCTIONS[0],
        ceilings: MachineCeilings | Roofs | str | None = None, tab: str = "",
    ):  # fmt: skip
        super().__init__()
        self._timers = dict[GraphStep, dict[str, float]]()
        self._functions: dict[GraphStep, tuple[dict[str, float], dict[str, float]]] = {}
        self._stepped = deque[Stepped](maxlen=MAX_STEPS)
        if kind not in ("prefill", "decode") or functions not in FUNCTIONS:
            raise WorkbenchError(f"a graph of {kind!r} {functions!r}: prefill or decode, {' or '.join(FUNCTIONS)}")
        self._open(sources)
        self.tab, self.kind, self.functions = tab or self.tabs[0], kind, functions
        self.tokens = min(DEFAULT_TOKENS, self._max_tokens) if tokens is None else tokens
        self._has_own_ceilings = ceilings is not None
        self.ceilings = self._stored_ceilings() if ceilings is None else roofs_of(ceilings)
        self.steps = Recorded(self, "expert_step", first=-1, last=-1, step=-1)
        self.watch("tab", "kind", "tokens", "functions", "unfolded", "points", "chosen", "expert_step", "ceilings")
        self.watch("measuring", "error")
        self.shown.on_pick(self._pick)
        self.show(*self._controls(), self.steps)
        if self._runner is not None:  # last: an event causes a redraw, which needs all of these
            self._leave = RunnerThread.attach(self._runner).listen(self._on_event)

    def _open(self, sources: tuple[Any, ...]) -> None:
        """Read the sources, and set `tabs`."""
        runners = [source for source in sources if hasattr(source, "telemetry")]
        if len(runners) > 1:
            raise WorkbenchError("ModelGraph of several runners: give one; of the others, their runs")
        self._runner = runners[0] if runners else None
        self._experts_used = deque[ExpertsUsed](maxlen=MAX_EXPERT_STEPS if runners else MAX_STEPS)
        for source in sources:
            if events := _events_of(source):
                if self._runner is None:
                    ExpertTable.from_events(events)
                self._append(events)
            elif source is not self._runner:
                self.points += tuple(points_of(source))
        spec = None if self._runner is None else self._runner.model.spec
        self._max_tokens = 2**31 if spec is None else spec.max_position_embeddings
        mixture = spec is not None and any(layer.experts for layer in spec.layers)
        there = {
            "graph": self._runner, "roofline": self._runner or self.points or not self._experts_used,
            "experts": mixture or not runners and self._experts_used,
        }  # fmt: skip
        self.tabs = tuple(name for name, source in there.items() if source)

    @property
    def runner(self) -> Runner:
        """Return the runner. Raises WorkbenchError without one, and once the widget is closed."""
        if self._runner is None:
            raise WorkbenchError("ModelGraph: it has no runner, or was closed; make one with a runner")
        return self._runner

    @property
    def step(self) -> GraphStep:
        return GraphStep(self.kind, self.tokens)

    @property
    def graph(self) -> OperatorGraph:
        """Return the graph of the present step."""
        model, store, step = self.runner.model, self.runner.store, self.step
        values = ValueBytes(*model.bytes_per_weight, store.bytes_per_value)
        operators = model_operators(model.spec, step, values)
        plain = as_written()
        kernels = plain if self.functions == "as written" else step_kernels(self.runner, step)
        as_called = {}, self._timers.get(step, {})
        functions, timers = as_called if kernels == plain else self._functions.get(step, ({}, {}))
        whole = self._measured_step(step)
        if whole.seconds is None and (timers or functions):
            whole = MeasuredSeconds(sum((*functions.values(), *timers.values())), "the sum of all calls")
        if self.functions == "as it runs":
            kernel_seconds = [each.kernel_seconds for each in self._steps_like(step) if each.kernel_seconds is not None]
            if kernel_seconds and set(kernels.functions.values()) == {"whole step"}:
                functions = {"whole step": median(kernel_seconds)}
        read, gemm = self.ceilings.read(total_cost(operators).bytes), self.ceilings.gemm(self._dtypes[0])
        return OperatorGraph(model.spec, step, operators, kernels, read, gemm, timers, functions, whole,
                             self._unmeasured(kernels == plain, bool(functions)))  # fmt: skip

    @property
    def works(self) -> list[RooflinePoint]:
        """Return all points of the roofline, each with its roofs."""
        steps = [{name: getattr(step, name) for name in STEP_FIELDS} for step in tuple(self._stepped)]
        own = points_of_steps(steps, self._dtypes[0])
        return [point.with_ceilings(self.ceilings) for point in (*self.points, *own)]

    @property
    def experts(self) -> ExpertTable:
        """Return the rows of each expert. Raises WorkbenchError where no step was recorded."""
        return ExpertTable.from_events(tuple(self._experts_used))

    def redraw(self) -> None:
        numbers = [each.step for each in tuple(self._experts_used)]
        self.steps.extend(min(numbers, default=0) - 1, max(numbers, default=-1))  # the sum is before the first step
        self.steps.title = self._shown_step(numbers)[1]
        for control, tabs in self._tabs_of.items():
            control.layout.display = None if self.tab in tabs else "none"
        super().redraw()

    def picture(self) -> str:
        """Draw the chosen tab."""
        alert = f'<p role="alert">⚠ {escape(self.error)}</p>' if self.error else ""
        measuring = "<p>Being measured … (between two steps of the runner)</p>" if self.measuring else ""
        draw = {"graph": self._graph, "roofline": self._roofline, "experts": self._expert_map}[self.tab]
        return svg.html(alert, measuring, *draw())

    def _roofline(self) -> list[str]:
        works = self.works
        roofs = self.ceilings.relevant_to(works)
        lines = ["○ what the roof allows, ● as measured; a line joins the two."]
        if works and not any(work.seconds for work in works):
            lines = ["○ what the roof allows; nothing was measured."]
        if not (roofs.reads and roofs.gemms):
            lines.insert(0, NO_ROOFS)
        if any(roof.contended for roof in (*roofs.reads, *roofs.gemms)):
            lines.append("Other processes were at work while the roofs were measured: they may be higher.")
        picture = draw_roofline(works, roofs, self.chosen, self.width - LABELS_WIDTH).svg(in_page=True)
        return [picture, f"<p>{' '.join(lines)}</p>", draw_points(works, self.chosen) if works else ""]

    def _expert_map(self) -> list[str]:
        try:
            table = self.experts
        except WorkbenchError as error:
            return [f"<p>{escape(str(error))}</p>"]
        step, caption = self._shown_step(table.steps)
        return [draw_experts(table.layers, table.rows(step), f"rows computed by each expert, {caption}", self.width)]

    def _shown_step(self, numbers: Sequence[int]) -> tuple[int | None, str]:
        """Return the number of the shown step among `numbers`, None for their sum, and its name."""
        step = max((number for number in numbers if number <= self.expert_step), default=None)
        return step, f"all {len(numbers)} steps" if step is None else f"step {step}"

    def _graph(self) -> list[str]:
        graph, runner = self.graph, self.runner
        lines = [f"{graph.spec.name}, {graph.step}: {graph.kernels.description}."]
        if graph.read is None or graph.gemm is None:
            lines.append(NO_ROOFS)
        else:
            computing = format_quantity(graph.gemm.rate, "FLOP/s")
            lines.append(
                f"Predicted: the slower of computing at {computing} ({graph.gemm.name}) and moving at "
                f"{format_bytes(graph.read.rate)}/s ({graph.read.name})."
            )
        able = "".join(f"<li>{escape(name)}: {escape(reason) or 'yes'}</li>" for name, reason in capabilities(runner))
        fold = (
            f'<details data-fold="capabilities"><summary>Backends that can run this model and cache</summary>'
            f"<p>Chosen: {escape(runner.core.backends.reason)}</p><ul>{able}</ul></details>"
        )
        about = "".join(f"<p>{escape(line)}</p>" for line in lines)
        return [about, draw_graph(graph, self.unfolded, self.width), fold]

    def measure(self, wait: bool = True, refresh: bool = False) -> ModelGraph:
        """Measure this machine's memory and compute ceilings where they are unknown (with `refresh`: again), and in the
        tab `graph` the seconds of this step's eager operators or compiled functions.

        It runs between two steps of the runner; operators run on a copy of the modules with a separate cache. Without
        `wait` it runs in the background; with it, an error raises WorkbenchError."""
        if self.measuring:
            return self
        self.measuring, self.error = True, ""
        step = self.step if self.tab == "graph" else None
        job = Job(lambda _: self._measure(step, refresh), self._measured, name="measures a model").start()
        if wait:
            job.wait()
            if self.error:
                raise WorkbenchError(self.error)
        return self

    def _unmeasured(self, as_written: bool, timed: bool) -> str:
        """Return why an operator has no time."""
        if as_written:
            return NOT_MEASURED
        if problem := functions_problem(self.runner):
            return f"{NOT_MEASURED}: {problem}"
        return "beside the compiled functions" if timed else NOT_MEASURED

    def forget(self) -> None:
        """Remove the points and experts of the runner's steps so far."""
        self._stepped.clear()
        self._experts_used.clear()
        self.throttle.mark()

    def _measure(self, step: GraphStep | None, refresh: bool) -> None:
        def work(runner: Any) -> None:
            if step is not None and self.functions == "as it runs" and step_kernels(runner, step).functions:
                self._functions[step] = time_functions(runner, step)
            elif step is not None:
                self._timers[step] = time_operators(runner, step)
            if step is None or refresh or not self._has_own_ceilings:
                from workbench.machine.ceilings import ceilings_for

                self.ceilings = roofs_of(ceilings_for(*self._sizes(), dtypes=self._dtypes, refresh=refresh))

        if self._runner is None:
            work(None)
        else:
            RunnerThread.attach(self._runner).call(work)

    def _measured(self, job: Job) -> None:
        self.error, self.measuring = job.error, False

    def _on_event(self, event: Event) -> None:
        """Keep a step for the next redraw; called in the runner's thread."""
        if isinstance(event, Stepped | ExpertsUsed):
            self._append([event])
            self.throttle.mark()

    def _append(self, events: Sequence[Event]) -> None:
        self._stepped.extend(each for each in events if isinstance(each, Stepped))
        self._experts_used.extend(each for each in events if isinstance(each, ExpertsUsed) and each.layers)

    def _steps_like(self, step: GraphStep) -> list[Stepped]:
        """Return the runner's steps with one sequence and of this kind: equal prefills, or decodes at any context."""
        return [
            each for each in tuple(self._stepped)
            if each.phase == step.kind and each.requests == 1 and each.context_tokens and not each.drafted_tokens
            and (step.kind == "decode" or each.prefill_tokens == step.tokens == each.context_tokens)
        ]  # fmt: skip

    def _measured_step(self, step: GraphStep) -> MeasuredSeconds:
        found = self._steps_like(step) if self.functions == "as it runs" else []
        if not found:
            return MeasuredSeconds(None, NOT_MEASURED)
        contexts = sorted({each.context_tokens for each in found})
        where = f"at contexts of {contexts[0]} to {contexts[-1]}" if step.kind == "decode" else ""
        seconds = median(each.forward_seconds for each in found)
        return MeasuredSeconds(seconds, f"median forward pass of {len(found)} steps {where}".strip())

    def _stored_ceilings(self) -> Roofs:
        from workbench.machine.ceilings import stored_ceilings

        return roofs_of(stored_ceilings(*self._sizes(), dtypes=self._dtypes))

    def _sizes(self) -> list[int]:
        """Return working sets in bytes: within the last-level cache, far beyond it, and the runner's weights."""
        from workbench.machine.processor import last_level_cache

        cache = last_level_cache() or 2**25
        weights = [] if self._runner is None else [self._runner.model.weight_bytes]
        return sorted({max(MIN_WORKING_SET, cache // 2), 4 * cache, *weights})

    @property
    def _dtypes(self) -> tuple[str, ...]:
        """Return the precisions of the roofs; a runner's comes first."""
        own = [] if self._runner is None else [str(self._runner.model.dtype).removeprefix("torch.")]
        return tuple(dict.fromkeys((*own, *DTYPES)))

    @traitlets.validate("tab")
    def _there(self, proposal: Any) -> str:
        if proposal["value"] not in self.tabs:
            raise WorkbenchError(f"tab {proposal['value']!r}: this graph has the tabs {', '.join(self.tabs)}")
        return proposal["value"]

    @traitlets.validate("tokens")
    def _in_context(self, proposal: Any) -> int:
        if not 1 <= proposal["value"] <= self._max_tokens:
            raise WorkbenchError(f"tokens {proposal['value']}: the model has a context of 1 to {self._max_tokens}")
        return proposal["value"]

    def _pick(self, key: str) -> None:
        """Fold or unfold equal layers, or choose a point of the roofline."""
        if self.tab == "roofline":
            self.chosen = None if int(key) == self.chosen else int(key)
        elif key.startswith("fold:"):
            first = int(key.split(":")[1])
            rest = tuple(each for each in self.unfolded if each != first)
            self.unfolded = rest if first in self.unfolded else (*rest, first)

    def _controls(self) -> list[ipywidgets.Widget]:
        buttons, auto = {"button_width": "auto"}, {"width": "auto"}
        tab = ipywidgets.ToggleButtons(options=self.tabs, style=buttons)
        kind = ipywidgets.ToggleButtons(options=("decode", "prefill"), description="step", style=buttons)
        tokens = ipywidgets.BoundedIntText(min=1, max=self._max_tokens, description="tokens")
        functions = ipywidgets.ToggleButtons(options=FUNCTIONS, description="functions", style=buttons)
        tip = "this machine's roofs, and the operators in their tab; some seconds, between two steps of the runner"
        measure = button(lambda: self.measure(wait=False), "Measure", tooltip=tip, layout=auto)
        tip = "remove the points and experts of the runner's steps so far"
        forget = button(self.forget, "Forget the steps", tooltip=tip, layout=auto)
        traitlets.dlink((self, "measuring"), (measure, "disabled"))
        row = [self.linked("kind", kind), self.linked("tokens", tokens), self.linked("functions", functions)]
        step = ipywidgets.HBox(row)
        self._tabs_of: dict[Any, tuple[str, ...]] = {
            step: ("graph",), measure: ("graph", "roofline"), self.steps: ("experts",),
            forget: () if self._runner is None else ("roofline", "experts"),
            tab: self.tabs if len(self.tabs) > 1 else (),
        }  # fmt: skip
        return [self.linked("tab", tab), step, ipywidgets.HBox([measure, forget])]


def _events_of(source: Any) -> list[Event]:
    """Return the events of a recorder, a list or a stream; none of another source."""
    events = getattr(source, "events", source)
    found = list(events) if isinstance(events, list | tuple | Iterator) else []
    return found if found and isinstance(found[0], Event) else []
