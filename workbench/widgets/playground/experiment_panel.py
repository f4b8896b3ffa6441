"""Show the controls of an experiment on a pair of settings: question, rule, sizes, a run with progress and Stop, and
the verdict."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

import ipywidgets

from workbench import svg
from workbench.errors import WorkbenchError
from workbench.widgets.claims.picture import draw_verdict
from workbench.widgets.playground.pair_experiment import (
    ExperimentRun,
    PairQuestion,
    pair_experiment,
    terminal_command,
    write_experiment,
)
from workbench.widgets.playground.picture import CopyButton
from workbench.widgets.playground.presets import ANY_PAIR
from workbench.widgets.view import MarkupWidget, button

WIDE = {"width": "auto", "flex": "1 1 auto"}
SIZES = {"prompts": (1, 1000), "prompt_tokens": (16, 100_000), "output_tokens": (2, 100_000), "rounds": (1, 1000)}
STYLE = (
    ".wb-pic .wb-experiment{height:112px;overflow:auto;font-size:12px}.wb-pic .wb-experiment p{margin:2px 0}"
    ".wb-pic .wb-experiment code{font-family:var(--jp-code-font-family,monospace);background:none;color:inherit;"
    "overflow-wrap:anywhere}.wb-pic .wb-experiment .v{font-size:15px}"
    "@media print{.wb-pic .wb-experiment{height:auto}}"
)


class ExperimentPanel(ipywidgets.VBox):
    """The controls of an experiment that compares a pair of settings.

    Args:
        sides: returns the experiments of both sides, or None if a setting is invalid.
        folder: folder of the experiments' numbered files.
        on_end: called when a run has ended, in the run's thread.
    """

    def __init__(self, sides: Callable[[], tuple[Any, Any] | None], folder: Path, on_end: Callable[[], None]):
        from workbench.experiment.agreement import AGREEMENT_FIGURES

        self._sides, self._folder, self._on_end = sides, folder, on_end
        self.run_shown: ExperimentRun | None = None
        self._error, self._suggested = "", ("", "")
        self.question = ipywidgets.Text(description="question", layout=dict(WIDE), continuous_update=False)
        self.rule = ipywidgets.Text(description="rule", layout=dict(WIDE), continuous_update=False)
        known = "\n".join(f"{name}: {meaning}" for name, meaning in AGREEMENT_FIGURES.items())
        self.rule.tooltip = f"comparisons joined by and, or; the figures are\n{known}"
        plain = PairQuestion("", "")
        self.sizes = {
            name: ipywidgets.BoundedIntText(
                value=getattr(plain, name), min=low, max=high, description=name.replace("_", " "),
                layout={"width": "13em"}, style={"description_width": "7.5em"},
            )
            for name, (low, high) in SIZES.items()
        }  # fmt: skip
        self.run_button = button(self.run, "Write and run the experiment", icon="flask", layout={"width": "19em"})
        self.stop_button = button(self.stop, "Stop experiment", icon="stop", disabled=True, layout={"width": "13em"})
        self.command = CopyButton(label="Copy the command")
        self.shown = MarkupWidget()
        self.ask("pair", *ANY_PAIR)
        for control in (self.rule, self.question):
            control.observe(lambda _: self.redraw(), "value")
        sizes = ipywidgets.HBox(list(self.sizes.values()), layout={"flex_flow": "row wrap"})
        buttons = ipywidgets.HBox([self.run_button, self.stop_button, self.command], layout={"align_items": "center"})
        super().__init__([self.question, self.rule, sizes, buttons, self.shown])
        self.redraw()

    @property
    def pair_question(self) -> PairQuestion:
        """Return the question, rule and sizes that the controls show."""
        sizes = {name: control.value for name, control in self.sizes.items()}
        return PairQuestion(self.question.value, self.rule.value, **sizes)

    @property
    def running(self) -> bool:
        return self.run_shown is not None and self.run_shown.running

    def ask(self, name: str, question: str, rule: str, keep_edits: bool = False) -> None:
        """Fill in a question and a rule, which the user may edit. The experiment's file gets its name from `name`.

        With `keep_edits` a text that the user edited stays.
        """
        boxes = (self.question, self.rule)
        for box, text, before in zip(boxes, (question, rule), self._suggested, strict=True):
            if not keep_edits or box.value == before:
                box.value = text
        self.name, self._suggested = name, (question, rule)

    def run(self) -> ExperimentRun | None:
        """Write the experiment of the present settings to a file and run it. On an error, show the reason and return
        None."""
        if self.running:
            return self.run_shown
        self._error = ""
        try:
            sides = self._sides()
            if sides is None:
                raise WorkbenchError("a setting is wrong; see the settings")
            file = write_experiment(pair_experiment(*sides, self.pair_question), self._folder, self.name)
        except WorkbenchError as error:
            self._error = str(error)
            self.redraw()
            return None
        self.run_shown = ExperimentRun(file, self._changed)
        self.command.text = terminal_command(file)
        self._changed()
        return self.run_shown

    def stop(self) -> None:
        if self.run_shown is not None:
            self.run_shown.stop()

    def redraw(self) -> None:
        self.shown.content = svg.html(self.picture())

    def picture(self) -> str:
        """Return markup of the present state: the error, the progress, or the verdict."""
        return svg.tag("style", STYLE) + svg.tag("div", *draw_run(self.run_shown, self._error, self._rule_error()),
                                                 class_="wb-experiment", data_scroll="experiment")  # fmt: skip

    def _rule_error(self) -> str:
        from workbench.experiment.agreement import parse_rule

        try:
            parse_rule(self.rule.value)
        except WorkbenchError as error:
            return str(error)
        return ""

    def _changed(self) -> None:
        run, going = self.run_shown, self.running
        self.run_button.disabled, self.stop_button.disabled = going, not going
        self.redraw()
        if run is not None and not going:
            self._on_end()


def draw_run(run: ExperimentRun | None, error: str, rule_error: str) -> list[str]:
    """Return an experiment's run as paragraphs of markup."""
    parts = [svg.tag("p", f"✗ {escape(each)}", role="alert") for each in (error, rule_error) if each]
    if run is None:
        if not parts:
            parts.append(
                svg.tag("p", "The rule is written into the experiment's file before it runs; change it first.")
            )
        return parts
    file = svg.tag("p", "experiment ", svg.tag("code", escape(str(run.file))))
    if run.running:
        return [*parts, svg.tag("p", f"running: {escape(run.progress)}", role="status"), file]
    if run.problem:
        return [*parts, svg.tag("p", f"✗ {escape(run.problem)}", role="status", class_="v"), file]
    for verdict in run.verdicts:
        parts.append(svg.tag("p", draw_verdict(verdict["outcome"]), role="status", class_="v"))
        parts.append(svg.tag("p", escape(f"rule: {verdict['rule']}")))
        parts.append(svg.tag("p", escape(verdict["reason"])))
    if run.remark:
        parts.append(svg.tag("p", escape(run.remark)))
    record = svg.tag("p", "record ", svg.tag("code", escape(str(run.record))))
    return [*parts, file, record]
