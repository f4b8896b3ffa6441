"""Show a settings form for each column under one row of buttons, and mark the settings that differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from html import escape
from typing import Any

import ipywidgets
import traitlets

from workbench.errors import WorkbenchError
from workbench.widgets.playground.data import SIDES
from workbench.widgets.playground.history import format_setting, setting_changes
from workbench.widgets.playground.settings import EXCLUDED_SETTINGS, setting_suggestions
from workbench.widgets.settings_form.fields import UnreadableField
from workbench.widgets.settings_form.form import SettingsForm
from workbench.widgets.view import button


class SettingsColumns:
    """The settings forms of one or two columns; `widget` shows them, and `changes` are the settings that differ.

    Args:
        initial: the first experiment of each column.
        on_change: called after every change.
    """

    def __init__(self, initial: Sequence[Any], on_change: Callable[[], None]):
        self._on_change, self._is_writing = on_change, False
        model, suggestions = type(initial[0]), setting_suggestions()
        excluded = EXCLUDED_SETTINGS | {"sampling.seed"}  # the columns share one
        self.forms = [SettingsForm(model, excluded, suggestions, self._changed) for _ in initial]
        self.buttons = self.forms[0].buttons
        self.buttons.value = "sampling"
        if len(initial) == 1:
            self.widget = self.forms[0].widget
        else:
            traitlets.link((self.buttons, "value"), (self.forms[1].buttons, "value"))
            self.widget = self._side_by_side()
        self.write(*(each.model_dump(mode="json") for each in initial))

    def write(self, *columns: Mapping[str, Any]) -> None:
        """Write the settings of each column into its form. Raises WorkbenchError for another number of columns (before
        anything is written), and for a value without a control."""
        if len(columns) != len(self.forms):
            raise WorkbenchError(f"settings of {len(columns)} columns: there are {len(self.forms)}")
        self._is_writing = True
        try:
            for form, values in zip(self.forms, columns, strict=True):
                form.write(values)
        finally:
            self._is_writing = False
        self._changed()

    def copy(self, column: int) -> None:
        """Copy the settings of a column (0: left, 1: right) to the other one."""
        self.write(*[self.forms[column].values] * 2)

    def experiments(self, common: Mapping[str, Any], seed: int) -> tuple[Any, ...] | None:
        """Return the experiment of each column; None if a field is invalid, whose error is then shown at the field.

        `common` are the values of settings without a control."""
        found = [form.validated(common) for form in self.forms]
        if None in found:
            return None
        return tuple(
            each.model_copy(update={"sampling": each.sampling.model_copy(update={"seed": seed})}) for each in found
        )

    def show_error(self, column: int, error: str) -> None:
        """Show an error at the setting whose path the error begins with."""
        path = error.partition(":")[0].partition(" ")[0].split(".")
        self.forms[column].show_error(path, error)

    @property
    def changes(self) -> dict[str, tuple[Any, Any]]:
        """Return the settings that differ as (left, right) by path; none if a field cannot be read."""
        try:
            left, right = self.forms[0].values, self.forms[-1].values
        except UnreadableField:
            return {}
        return setting_changes(left, right)

    def describe_changes(self) -> str:
        """Return one line of markup that lists the settings that differ."""
        changes = "; ".join(
            f"<b>{escape(path)}</b> {escape(format_setting(left))} | {escape(format_setting(right))}"
            for path, (left, right) in self.changes.items()
        )
        return f"differ: {changes}" if changes else "the settings of both sides are equal"

    def show_changes(self) -> None:
        """Open the group of the first setting that differs."""
        group = next(iter(self.changes), "").split(".")[0]
        if group in self.forms[0].panels:
            self.buttons.value = group

    def close(self) -> None:
        for form in self.forms:
            form.close()

    def _side_by_side(self) -> ipywidgets.VBox:
        copies = [
            button(partial(self.copy, n), text, layout={"width": "auto"})
            for n, text in enumerate(("Copy the left to the right", "Copy the right to the left"))
        ]
        place = columns_box([form.body for form in self.forms])
        place.add_class("wb-narrow")
        return ipywidgets.VBox([self.buttons, ipywidgets.HBox(copies), place])

    def _changed(self) -> None:
        if self._is_writing or not hasattr(self, "widget"):
            return
        paths = [tuple(path.split(".")) for path in self.changes]
        for form in self.forms:
            form.mark(paths)
        self._on_change()


def columns_box(parts: Sequence[ipywidgets.Widget]) -> ipywidgets.HBox:
    """Return a box with the parts in columns of equal width, under the names of the sides."""
    return ipywidgets.HBox([
        ipywidgets.VBox([ipywidgets.HTML(f"<b>{name}</b>"), part], layout={"flex": "1 1 0", "min_width": "0"})
        for name, part in zip(SIDES, parts, strict=True)
    ])  # fmt: skip
