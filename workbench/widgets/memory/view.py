"""Show a model's memory by formula: weights, cache and activations; with a runner also as measured."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import traitlets

from workbench import svg
from workbench.errors import WorkbenchError
from workbench.trace.events import Event, Stepped, StepPlanned
from workbench.widgets.memory import picture as memory_picture
from workbench.widgets.memory.controls import available_bytes, describe_fit, settings_model, settings_of_runner
from workbench.widgets.memory.picture import MemoryBar, MemoryTableRow
from workbench.widgets.settings_form.form import SettingsForm
from workbench.widgets.view import PictureWidget

if TYPE_CHECKING:
    from workbench.engine.runner import Runner
    from workbench.memory.report import ModelMemory
    from workbench.model.spec import ModelSpec

AS_GIVEN = "as given"
SETTINGS = ("model", "memory", "context", "batch", "weights", "cache", "dtype", "step_tokens", "page_size")


class MemoryCalculator(PictureWidget):
    """A view of the memory of a model that serves `batch` sequences of `context` tokens, with the figures of `workbench
    model memory`.

    `model` is `demo`, `shape:NAME`, a folder, a config.json, or a ModelSpec. With a `runner` the model is the runner's,
    and a table compares predicted and measured bytes. `settings` are the traits: context (default: the model's own),
    batch, dtype, weights, cache, step_tokens, page_size, and memory: `h100`, `this machine`, or a size such as `24GiB`.
    Raises WorkbenchError for an unknown model or setting.
    """

    engine_fields = ("runner",)
    model = traitlets.Unicode()
    context = traitlets.Int(1024, min=1)
    batch = traitlets.Int(1, min=1)
    dtype = traitlets.Unicode("bfloat16")
    weights = traitlets.Unicode("dense")
    cache = traitlets.Unicode("dense")
    memory = traitlets.Unicode("h100")
    step_tokens = traitlets.Int(512, min=1)
    page_size = traitlets.Int(1, min=1)
    error = traitlets.Unicode()  # error of the last change of model or memory

    def __init__(self, model: str | Path | ModelSpec | None = None, runner: Runner | None = None, **settings: Any):
        super().__init__()
        self.runner = runner
        self._given = None if isinstance(model, str | Path) else model
        if runner is not None:
            self._given = self._given or runner.model.spec
            settings = settings_of_runner(runner) | settings
        elif model is None:
            model = "demo"
        asked = str(model) if isinstance(model, str | Path) else AS_GIVEN
        self._spec, self._remarks = self._spec_of_name(asked)
        self._available = available_bytes(str(settings.get("memory", self.memory)))
        for name, value in ({"model": asked, "context": self._spec.max_position_embeddings} | settings).items():
            if not self.has_trait(name):
                raise WorkbenchError(f"MemoryCalculator has no setting {name!r}; it has {', '.join(SETTINGS)}")
            setattr(self, name, value)
        self.count(self.cache)  # invalid settings raise here
        self._last: dict[str, Event] = {}
        if runner is not None:
            from workbench.engine.runner_thread import RunnerThread

            self._leave = RunnerThread.attach(runner).listen(self._on_event)
        self.observe(self._look_up, ["model", "memory"])
        self.shown.on_pick(lambda cache: self.set_trait("cache", cache))
        self.watch("error", *SETTINGS)
        self.form = SettingsForm(settings_model([AS_GIVEN] * (self._given is not None)), on_change=self._on_form)
        self.form.write({name: getattr(self, name) for name in SETTINGS})
        self.observe(lambda change: self.form.write({change["name"]: change["new"]}), SETTINGS)
        self.show(self.form.group.widget)

    def close(self) -> None:
        super().close()
        if hasattr(self, "form"):  # absent where `__init__` raised early
            self.form.close()

    def _on_form(self) -> None:
        for name, value in self.form.values.items():
            if value != "":  # a field that was just opened
                setattr(self, name, value)

    @property
    def found(self) -> dict[str, Any]:
        """Return the report of `model memory --json` for the present settings. Raises WorkbenchError for invalid
        ones."""
        from workbench.memory.report import memory_report

        caption = {"dtype": self.dtype, "weights": self.weights, "cache": self.cache}
        return memory_report(self.count(self.cache), caption, self._remarks, self._available)

    def count(self, cache: str) -> ModelMemory:
        """Return the memory under the present settings, but with the cache format `cache`."""
        from workbench.memory.report import estimate_memory

        return estimate_memory(
            self._spec, context=self.context, batch=self.batch, dtype=self.dtype, weights=self.weights, cache=cache,
            step_tokens=self.step_tokens, page_size=self.page_size,
        )  # fmt: skip

    def picture(self) -> str:
        from workbench.kv_cache.format import FORMATS

        alert = f'<p role="alert">⚠ {escape(self.error)}</p>' if self.error else ""
        stacks = [self._bar(name) for name in FORMATS]
        title = f"{self._spec.name}: {self._spec.num_parameters:,} parameters"
        caption = (
            f"{self.batch:,} × {self.context:,} tokens, weights {self.weights}, {self.dtype}; one bar per cache format"
        )
        head = f"<p><b>{escape(title)}</b><br>{escape(caption)}</p>"
        bars = memory_picture.draw_bars(stacks, self._available, f"{title}, {caption}", self.width)
        return svg.html(alert, head, bars, self._summary(), self._measured())

    def _bar(self, cache: str) -> MemoryBar:
        try:
            found = self.count(cache).memory
        except WorkbenchError as error:
            return MemoryBar(cache, (), cache == self.cache, cache, str(error))
        sizes = found.weight_bytes, found.cache_bytes, found.activation_bytes
        return MemoryBar(f"cache {cache}", sizes, cache == self.cache, cache)

    def _summary(self) -> str:
        from workbench.memory.report import cache_terms, describe_estimate

        try:
            counted, found = self.count(self.cache), self.found
        except WorkbenchError as error:
            return f'<p role="alert">⚠ {escape(str(error))}</p>'
        memory, words, parts = counted.memory, describe_estimate(counted, self.step_tokens), cache_terms(counted)
        each = [MemoryTableRow("", f"a sequence: {term.name}", term.bytes, str(term)) for term in parts]
        cache = f"{self.batch:,} × {memory.sequence_bytes:,} bytes"
        lines = [
            MemoryTableRow("W", "weights", memory.weight_bytes, words["weights"]),
            MemoryTableRow("C", "cache", memory.cache_bytes, cache), *each,
            MemoryTableRow("", "a token", memory.cache_bytes_per_token, "while every layer keeps it"),
            MemoryTableRow("A", "activations", memory.activation_bytes, words["activations"]),
        ]  # fmt: skip
        remarks = "".join(f"<li>{escape(each)}</li>" for each in found["remarks"])
        return (
            memory_picture.draw_parts(lines, memory.total_bytes)
            + f"<p>{escape(describe_fit(found))}</p><ul>{remarks}</ul>"
        )

    def _measured(self) -> str:
        if self.runner is None:
            return ""
        from workbench.memory.measured import compare_memory, compare_step_memory

        rows = compare_memory(self.runner)
        formed, stepped = self._last.get("step_planned"), self._last.get("stepped")
        if isinstance(formed, StepPlanned) and isinstance(stepped, Stepped) and formed.step == stepped.step:
            rows = *rows, compare_step_memory(self.runner, formed, stepped)
        return memory_picture.draw_measured([(e.name, e.predicted, e.measured, e.note) for e in rows])

    def _on_event(self, event: Event) -> None:
        """Keep a step's events for the next redraw; called in the runner's thread."""
        if isinstance(event, StepPlanned | Stepped):
            self._last[event.kind] = event
            self.throttle.mark()

    def _spec_of_name(self, name: str) -> tuple[ModelSpec, list[str]]:
        from workbench.memory.report import read_spec_and_remarks

        return (self._given, []) if name == AS_GIVEN and self._given is not None else read_spec_and_remarks(name)

    def _look_up(self, change: dict) -> None:
        """Look up a model or a memory; an unknown one is an error and changes nothing."""
        try:
            if change["name"] == "model":
                self._spec, self._remarks = self._spec_of_name(change["new"])
            else:
                self._available = available_bytes(change["new"])
        except WorkbenchError as error:
            self.error = str(error)
        else:
            self.error = ""
