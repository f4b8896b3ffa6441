"""A group of form fields with their errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

import ipywidgets

from workbench.errors import WorkbenchError
from workbench.shown import truncate_text
from workbench.widgets.knobs.leaves import FormField, UnreadableField
from workbench.widgets.knobs.values import format_value

COLUMNS = {"display": "grid", "grid_template_columns": "repeat(auto-fill, minmax(24em, 1fr))"}


def error_line(line: str) -> ipywidgets.HTML:
    """Return a line that shows an error, announced at once by screen readers."""
    style = "color:var(--jp-error-color1,#b00020);font-weight:600"
    help_text = f'<div role="alert" style="{style}">✗ {escape(line)}</div>' if line else ""
    return ipywidgets.HTML(help_text)


class FieldGroup:
    """The fields of one model, in as many columns as there is room for; `kind` tells it from its neighbours."""

    def __init__(self, fields: Mapping[str, FormField], kind: str | None = None, help_text: str = ""):
        self.fields, self._kind, self._alerts = fields, kind, dict[str, ipywidgets.HTML]()
        head = (ipywidgets.HTML(f'<div style="opacity:.75">{escape(help_text)}</div>'),) if help_text else ()
        self._cells = ipywidgets.VBox(layout=COLUMNS)
        self.widget = ipywidgets.VBox([*head, self._cells])
        self._lay()

    def read(self) -> dict[str, Any]:
        values: dict[str, Any] = {} if self._kind is None else {"kind": self._kind}
        for name, knob in self.fields.items():
            try:
                values[name] = knob.read()
            except UnreadableField as error:
                raise UnreadableField((name, *error.path), error.reason) from None
        return values

    def write(self, value: Any) -> None:
        for name, knob in self.fields.items():
            if name in value:
                if not knob.accepts(value[name]):
                    raise WorkbenchError(f"{name}: there is no control for {truncate_text(format_value(value[name]), 60)} here")
                knob.write(value[name])

    def accepts(self, value: Any) -> bool:
        return isinstance(value, dict) and (self._kind is None or value.get("kind") == self._kind)

    def field_paths(self) -> Iterator[tuple[str, ...]]:
        for name, knob in self.fields.items():
            yield from ((name, *path) for path in knob.field_paths())

    def show_error(self, path: Sequence[str], line: str) -> bool:
        if not path or path[0] not in self.fields:
            return False
        if not self.fields[path[0]].show_error(path[1:], line):
            self._alerts[path[0]] = error_line(line)
            self._lay()
        return True

    def clear_errors(self) -> None:
        """Clear all errors."""
        if self._alerts:
            self._alerts.clear()
            self._lay()
        for knob in self.fields.values():
            knob.clear_errors()

    def _lay(self) -> None:
        help_text, cells = self._alerts, list[ipywidgets.Widget]()
        for name, knob in self.fields.items():
            cells.append(ipywidgets.VBox([knob.widget, help_text[name]]) if name in help_text else knob.widget)
        self._cells.children = cells
