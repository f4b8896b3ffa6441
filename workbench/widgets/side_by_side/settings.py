"""Two settings forms side by side, with one row of buttons; settings that differ are marked in both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape
from typing import Any

import ipywidgets
import traitlets

from workbench.widgets.playground.history import setting_changes
from workbench.widgets.playground.settings import EXCLUDED_SETTINGS, setting_suggestions
from workbench.widgets.settings_form.fields import UnreadableField, to_yaml_line
from workbench.widgets.settings_form.form import SettingsForm
from workbench.widgets.side_by_side.data import SIDES

EXCLUDED = EXCLUDED_SETTINGS | {"sampling.seed"}  # it is one for both sides


class PairForms:
    """The settings of both sides. `initial` are those that they began with, as JSON."""

    def __init__(self, initial: Any, on_change: Callable[[], None]):
        from workbench.experiment.experiment import Experiment

        self.initial: dict[str, Any] = initial.model_dump(mode="json")
        self._on_change, self._is_writing = on_change, False
        suggestions = setting_suggestions()
        self.sides = [SettingsForm(Experiment, EXCLUDED, suggestions, on_change=self._changed) for _ in SIDES]
        left, right = self.sides
        left.buttons.value = "cache"
        traitlets.link((left.buttons, "value"), (right.buttons, "value"))
        copies = [ipywidgets.Button(description=text, layout={"width": "auto"}) for text in
                  ("Copy the left to the right", "Copy the right to the left")]  # fmt: skip
        for n, button in enumerate(copies):
            button.on_click(lambda _, n=n: self.copy(n))
        columns = [
            ipywidgets.VBox([ipywidgets.HTML(f"<b>{name}</b>"), form.body], layout={"flex": "1 1 0", "min_width": "0"})
            for name, form in zip(SIDES, self.sides, strict=True)
        ]
        place = ipywidgets.HBox(columns)
        self.widget = ipywidgets.VBox([left.buttons, ipywidgets.HBox(copies), place])
        place.add_class("wb-narrow")
        self.write(self.initial, self.initial)

    def write(self, left: Mapping[str, Any], right: Mapping[str, Any]) -> None:
        """Show these settings on both sides. WorkbenchError for one that has no control."""
        self._is_writing = True
        try:
            for form, values in zip(self.sides, (left, right), strict=True):
                form.write(values)
        finally:
            self._is_writing = False
        self._changed()

    def copy(self, side: int) -> None:
        """Give the other side the settings of this one."""
        values = self.sides[side].values
        self.write(values, values)

    def experiment(self, side: int, common: Mapping[str, Any]) -> Any:
        """Return the experiment of a side, or None with the errors shown. `common` has the seed besides its values."""
        values = {name: value for name, value in common.items() if name != "seed"}
        found = self.sides[side].validated(values)
        if found is None:
            return None
        return found.model_copy(update={"sampling": found.sampling.model_copy(update={"seed": common["seed"]})})

    @property
    def changes(self) -> dict[str, tuple[Any, Any]]:
        """Return the settings that differ, by path, as (left, right); none where one cannot be read."""
        try:
            left, right = (form.values for form in self.sides)
        except UnreadableField:
            return {}
        return setting_changes(left, right)

    def describe_changes(self) -> str:
        """Return one line of markup with the settings that differ."""
        changes = self.changes
        if not changes:
            return "the settings of both sides are equal"
        return "differ: " + "; ".join(
            f"<b>{escape(path)}</b> {escape(format_setting(left))} | {escape(format_setting(right))}"
            for path, (left, right) in changes.items()
        )

    def show_changes(self) -> None:
        """Show the group of the first setting that differs."""
        group = next(iter(self.changes), "").split(".")[0]
        if group in self.sides[0].panels:
            self.sides[0].buttons.value = group

    def close(self) -> None:
        for form in self.sides:
            form.close()

    def _changed(self) -> None:
        if self._is_writing or not hasattr(self, "widget"):
            return
        paths = [tuple(path.split(".")) for path in self.changes]
        for form in self.sides:
            form.mark(paths)
        self._on_change()


def format_setting(value: Any) -> str:
    """Return a setting's value on one line; of a group of settings its kind."""
    if isinstance(value, dict) and "kind" in value:
        return str(value["kind"])
    line = value if isinstance(value, str) else to_yaml_line(value)
    return line.removesuffix("\n...").split("\n")[0][:60]
