"""Show the operators of a model's step with FLOPs, bytes, times, and the functions that carry them out."""

from __future__ import annotations

import threading
from collections import deque
from html import escape
from statistics import median
from typing import TYPE_CHECKING, Any

import ipywidgets
import traitlets

from workbench import svg
from workbench.engine.runner_thread import RunnerThread
from workbench.errors import WorkbenchError, describe_error
from workbench.executors.programs.kernels import as_written
from workbench.trace.events import Event, Stepped
from workbench.waiting import join_and_serve
from workbench.widgets.model_graph.data import GraphStep, ValueBytes, model_operators
from workbench.widgets.model_graph.graph import NOT_MEASURED, MeasuredSeconds, OperatorGraph, total_cost
from workbench.widgets.model_graph.kernels import capabilities, step_kernels
from workbench.widgets.model_graph.picture import draw_graph
from workbench.widgets.model_graph.timing import functions_problem, time_functions, time_operators
from workbench.widgets.roofline.view import roofs_of
from workbench.widgets.view import PictureWidget

if TYPE_CHECKING:
    from workbench.engine.runner import Runner
    from workbench.machine.ceilings import MachineCeilings
    from workbench.widgets.roofline.data import Roofs

FUNCTIONS = ("as it runs", "as written")
MAX_STEPS = 1_000  # of the runner, the last ones
NO_ROOFS = "Predicted times need this machine's roofs, which are not known yet: press Time the operators."


class ModelGraph(PictureWidget):
    """The operators of a step of the runner's model: a `prefill` of so many `tokens`, or a `decode` with that context.
    A bracket holds the operators that one compiled function carries out; `functions` are those of the runner, or the
    modules as they are written. Equal layers are folded into one: a click on its head, or Enter, unfolds them.

    FLOPs and bytes are the cost model's, which predicts each step of the runner. `measure` times the operators as they
    are written, on eager, or the compiled functions as they run, beside the runner's cache; the whole step is measured
    as the runner steps. `ceilings` are as in `Roofline`. Raises WorkbenchError for a step that the model cannot have.
    """

    engine_fields = ("_runner",)
    kind: Any = traitlets.Enum(("prefill", "decode"), default_value="decode")
    tokens = traitlets.Int(1)
    functions = traitlets.Enum(FUNCTIONS, default_value=FUNCTIONS[0])
    unfolded = traitlets.Tuple()  # the first layer of each set of equal layers that are drawn one by one
    ceilings: Any = traitlets.Any()
    measuring = traitlets.Bool(False)
    error = traitlets.Unicode()
    _runner: Runner | None = None  # before it is made, and after it is closed

    def __init__(
        self,
        runner: Runner,
        kind: str = "decode",
        tokens: int = 256,
        functions: str = FUNCTIONS[0],
        ceilings: MachineCeilings | Roofs | str | None = None,
    ):
        super().__init__()
        self._runner, self._timers = runner, dict[GraphStep, dict[str, float]]()
        self._functions: dict[GraphStep, tuple[dict[str, float], dict[str, float]]] = {}
        self._recent_steps: deque[Stepped] = deque(maxlen=MAX_STEPS)
        self._leave = lambda: None
        if kind not in ("prefill", "decode") or functions not in FUNCTIONS:
            raise WorkbenchError(f"a graph of {kind!r} {functions!r}: prefill or decode, {' or '.join(FUNCTIONS)}")
        self.kind, self.tokens, self.functions = kind, tokens, functions
        self.ceilings = self._stored_ceilings() if ceilings is None else roofs_of(ceilings)
        self._leave = RunnerThread.attach(runner).listen(self._on_event)
        self.watch("kind", "tokens", "functions", "unfolded", "ceilings", "measuring", "error")
        self.shown.on_pick(self._pick)
        self.show(*self._controls(runner.model.spec.max_position_embeddings))

    @property
    def runner(self) -> Runner:
        """The runner whose steps are drawn. Raises WorkbenchError once the widget is closed."""
        if self._runner is None:
            raise WorkbenchError("ModelGraph: it was closed and has let go of its runner; make a new one")
        return self._runner

    @property
    def step(self) -> GraphStep:
        return GraphStep(self.kind, self.tokens)

    @property
    def graph(self) -> OperatorGraph:
        """The step as it is drawn."""
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
        read, gemm = self.ceilings.read(total_cost(operators).bytes), self.ceilings.gemm(self._dtype)
        return OperatorGraph(model.spec, step, operators, kernels, read, gemm, timers, functions, whole,
                             self._unmeasured(kernels == plain, bool(functions)))  # fmt: skip

    def picture(self) -> str:
        graph, runner = self.graph, self.runner
        alert = f'<p role="alert">⚠ {escape(self.error)}</p>' if self.error else ""
        lines = [f"{graph.spec.name}, {graph.step}: {graph.kernels.description}."]
        if graph.read is None or graph.gemm is None:
            lines.append(NO_ROOFS)
        else:
            computing, moving = (svg.format_tick(roof.rate) for roof in (graph.gemm, graph.read))
            lines.append(
                f"Predicted: the slower of computing at {computing}FLOP/s ({graph.gemm.name}) and moving at "
                f"{moving}B/s ({graph.read.name})."
            )
        if self.measuring:
            lines.append("Being timed … (between two steps of the runner)")
        able = "".join(f"<li>{escape(name)}: {escape(reason) or 'yes'}</li>" for name, reason in capabilities(runner))
        fold = (
            f'<details data-fold="capabilities"><summary>Backends that can carry out this model and cache</summary>'
            f"<p>Chosen: {escape(runner.core.backends.reason)}</p><ul>{able}</ul></details>"
        )
        about = "".join(f"<p>{escape(line)}</p>" for line in lines)
        return svg.html(alert, about, draw_graph(graph, self.unfolded, self.width), fold)

    def measure(self, wait: bool = True) -> ModelGraph:
        """Time the operators of this step as written, or its compiled functions as it runs, and this machine's roofs
        where they are not known. It runs between two steps of the runner, on a copy of the modules and a cache of its
        own; without `wait` in the background."""
        if self.measuring:
            return self
        self.measuring, self.error = True, ""
        worker = threading.Thread(
            target=self._measure, args=(self.step, self._is_compiled()), name="times operators", daemon=True
        )
        worker.start()
        if wait:
            join_and_serve(worker)
            if self.error:
                raise WorkbenchError(self.error)
        return self

    def _is_compiled(self) -> bool:
        """Return whether the drawn step is of compiled functions."""
        return self.functions == "as it runs" and bool(step_kernels(self.runner, self.step).functions)

    def _unmeasured(self, as_written: bool, timed: bool) -> str:
        """Return why an operator has no time."""
        if as_written:
            return NOT_MEASURED
        if problem := functions_problem(self.runner):
            return f"{NOT_MEASURED}: {problem}"
        return "beside the compiled functions" if timed else NOT_MEASURED

    def _measure(self, step: GraphStep, is_compiled: bool) -> None:
        def work(runner: Runner) -> None:
            if is_compiled:
                self._functions[step] = time_functions(runner, step)
            else:
                self._timers[step] = time_operators(runner, step)
            if not (self.ceilings.reads and self.ceilings.gemms):
                from workbench.machine.ceilings import ceilings_for

                self.ceilings = roofs_of(ceilings_for(*self._sizes(), dtypes=(self._dtype,)))

        try:
            RunnerThread.attach(self.runner).call(work)
        except Exception as error:
            self.error = describe_error(error)
        finally:
            self.measuring = False

    def _on_event(self, event: Event) -> None:
        """In the thread that owns the runner: only kept here, drawn elsewhere."""
        if isinstance(event, Stepped):
            self._recent_steps.append(event)
            self.throttle.mark()

    def _steps_like(self, step: GraphStep) -> list[Stepped]:
        """The runner's steps of one sequence and of this kind: prefills of as many tokens, decodes at any context."""
        return [
            each for each in tuple(self._recent_steps)
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

        return roofs_of(stored_ceilings(*self._sizes(), dtypes=(self._dtype,)))

    def _sizes(self) -> list[int]:
        return [self.runner.model.weight_bytes]

    @property
    def _dtype(self) -> str:
        return str(self.runner.model.dtype).removeprefix("torch.")

    @traitlets.validate("tokens")
    def _in_context(self, proposal: Any) -> int:
        tokens, most = proposal["value"], self.runner.model.spec.max_position_embeddings
        if not 1 <= tokens <= most:
            raise WorkbenchError(f"tokens {tokens}: the model has a context of 1 to {most}")
        return tokens

    def _pick(self, key: str) -> None:
        """Fold or unfold equal layers."""
        if key.startswith("fold:"):
            first = int(key.split(":")[1])
            rest = tuple(each for each in self.unfolded if each != first)
            self.unfolded = rest if first in self.unfolded else (*rest, first)

    def _controls(self, most: int) -> tuple[ipywidgets.Widget, ...]:
        buttons = {"button_width": "auto"}
        kind = ipywidgets.ToggleButtons(options=("decode", "prefill"), description="step", style=buttons)
        tokens = ipywidgets.BoundedIntText(min=1, max=most, description="tokens")
        functions = ipywidgets.ToggleButtons(options=FUNCTIONS, description="functions", style=buttons)
        tip = (
            "operators as the modules are written, on eager, or the compiled functions; some seconds, between two steps"
        )
        measure = ipywidgets.Button(description="Time the operators", tooltip=tip, layout={"width": "auto"})
        measure.on_click(lambda _: self.measure(wait=False))
        for control, name in ((kind, "kind"), (tokens, "tokens"), (functions, "functions")):
            ipywidgets.link((self, name), (control, "value"))
        traitlets.dlink((self, "measuring"), (measure, "disabled"))
        return ipywidgets.HBox([kind, tokens]), ipywidgets.HBox([functions, measure])
