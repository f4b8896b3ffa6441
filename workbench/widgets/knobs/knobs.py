"""Build a form of typed controls for every setting of a pydantic model from its schema."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ipywidgets
from pydantic import BaseModel, ValidationError

from workbench.errors import explain_by_path
from workbench.widgets.knobs.groups import FieldGroup, error_line
from workbench.widgets.knobs.kinds import UnionField
from workbench.widgets.knobs.leaves import FormField, UnreadableField
from workbench.widgets.knobs.schema import FormBuilder

GENERAL_GROUP = "general"


class SettingsForm:
    """Controls of all settings of `model` but those in `leave`: dotted paths, and `path:kind` for one kind of several.

    `known` offers texts for a setting that is any text. `values` are the settings as JSON; `checked` makes the model of
    them, or None, with what is wrong said at the control. `changed` is called after every change made by the user.
    `widget` shows the groups one at a time, `buttons` to choose between them.
    """

    def __init__(
        self,
        model: type[BaseModel],
        excluded: Collection[str] = (),
        suggestions: Mapping[str, Sequence[str]] | None = None,
        on_change: Callable[[], None] = lambda: None,
    ):
        self._model, self._on_change = model, on_change
        self._num_suppressing = 0  # how many are at work that change controls by themselves
        self.group = FormBuilder(excluded, suggestions or {}, self.changed, self.suppress_changes).group(model)
        parts, singles = dict[str, FieldGroup](), dict[str, FormField]()
        for name, knob in self.group.fields.items():
            if isinstance(knob, FieldGroup):
                parts[name] = knob
            elif isinstance(knob, UnionField):
                parts[name] = FieldGroup({name: knob})
            else:
                singles[name] = knob
        self.panels = {**parts, **({GENERAL_GROUP: FieldGroup(singles)} if singles else {})}
        self.buttons: Any = ipywidgets.ToggleButtons(options=list(self.panels), style={"button_width": "auto"})
        self._place = ipywidgets.VBox()
        self._alert = error_line("")
        self.widget = ipywidgets.VBox([self.buttons, self._alert, self._place])
        self.buttons.observe(lambda _: self._open(), "value")
        self._open()

    @property
    def values(self) -> dict[str, Any]:
        """Return the settings as JSON values. Raises UnreadableField where a text is not YAML."""
        return self.group.read()

    def write(self, values: Mapping[str, Any]) -> None:
        """Show these settings; those that are not among them stay. WorkbenchError for one that has no control."""
        with self.suppress_changes():
            self.group.write(values)
        self.changed()

    def validated(self, other_values: Mapping[str, Any]) -> Any:
        """Return the validated model of these settings and `other_values`, or None with the errors shown."""
        for panel in self.panels.values():
            panel.clear_errors()
        self._alert.value = ""
        try:
            return self._model.model_validate({**self.values, **other_values})
        except ValidationError as error:
            errors = explain_by_path(error, self._model)
        except UnreadableField as error:
            errors = [(error.path, str(error))]
        for path, line in errors:
            self.show_error(path, line)
        return None

    def show_error(self, path: Sequence[str], line: str) -> None:
        """Show an error at the field of `path`, or above the form where that field is hidden."""
        for name, panel in self.panels.items():
            inside = path[1:] if path and path[0] == name and name not in panel.fields else path
            if panel.show_error(inside, line) and name == self.buttons.value:
                return
        self._alert.value = error_line(line).value

    def changed(self) -> None:
        if not self._num_suppressing:
            self._on_change()

    @contextmanager
    def suppress_changes(self) -> Iterator[None]:
        """Suppress `on_change` while values are written by the program."""
        self._num_suppressing += 1
        try:
            yield
        finally:
            self._num_suppressing -= 1

    def field_paths(self) -> list[str]:
        """Return the dotted paths of all settings; those of a union's kind are below its name."""
        return [".".join(path) for path in self.group.field_paths()]

    def _open(self) -> None:
        self._place.children = (self.panels[self.buttons.value].widget,)
