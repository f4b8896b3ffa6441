"""Compute a model's memory by formula: weights, cache and activations; of a runner also as measured."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import traitlets

from workbench import svg
from workbench.errors import WorkbenchError
from workbench.trace.events import Event, Stepped, StepPlanned
from workbench.widgets.memory import picture as memory_picture
from workbench.widgets.memory.controls import available_bytes, build_controls, describe_fit, settings_of_runner
from workbench.widgets.memory.picture import MemoryBar, MemoryTableRow
from workbench.widgets.view import PictureWidget

if TYPE_CHECKING:
    from workbench.engine.runner import Runner
    from workbench.memory.report import ModelMemory
    from workbench.model.spec import ModelSpec

AS_GIVEN = "as given"
SETTINGS = ("context", "batch", "dtype", "weights", "cache", "step_tokens", "page_size")


class MemoryCalculator(PictureWidget):
    """Bytes of a model that serves `batch` sequences of `context` tokens: the figures of `workbench memory`.

    `model` is `demo`, `shape:NAME`, a folder, a config.json, or a ModelSpec; with a `runner` it is the runner's, and
    what its tensors take stands beside what was predicted. `settings` are the traits: context (the model's own unless
    given), batch, dtype, weights, cache, step_tokens, page_size, and memory: `h100`, `this machine`, or a size such as
    `24GiB`. Raises WorkbenchError for a model that is not there and settings that are not known.
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
    error = traitlets.Unicode()  # what was wrong with the model or the memory that was asked for last

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
                raise WorkbenchError(f"MemoryCalculator has no setting {name!r}; it has {', '.join(SETTINGS)}, memory")
            setattr(self, name, value)
        self.count(self.cache)  # invalid settings raise here
        self._last: dict[str, Event] = {}
        if runner is not None:
            from workbench.engine.runner_thread import RunnerThread

            self._leave = RunnerThread.attach(runner).listen(self._on_event)
        self.observe(self._look_up, ["model", "memory"])
        self.shown.observe(lambda change: change["new"] and self._pick(change["new"]), "picked")
        self.watch("model", "memory", "error", *SETTINGS)
        self.show(*build_controls(self, [AS_GIVEN] * (self._given is not None)))

    @property
    def found(self) -> dict[str, Any]:
        """The present settings as `workbench memory --json` tells them. Raises WorkbenchError for what cannot be."""
        from workbench.memory.report import memory_report

        caption = {"dtype": self.dtype, "weights": self.weights, "cache": self.cache}
        return memory_report(self.count(self.cache), caption, self._remarks, self._available)

    def count(self, cache: str) -> ModelMemory:
        """The present settings counted, with a cache of that format."""
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
            f"{self.batch:,} × {self.context:,} tokens, weights {self.weights}, {self.dtype}; a bar a cache format"
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
            memory_picture.draw_table(lines, memory.total_bytes)
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
        """In the thread that owns the runner: only kept here, drawn elsewhere."""
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

    def _pick(self, cache: str) -> None:
        self.cache, self.shown.picked = cache, ""
