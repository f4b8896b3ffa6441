"""Build a form of typed controls for every setting of a pydantic model from its schema."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ipywidgets
from pydantic import BaseModel, ValidationError

from workbench.errors import told_apart
from workbench.widgets.knobs.groups import Group, alert
from workbench.widgets.knobs.kinds import Several
from workbench.widgets.knobs.leaves import Knob, Unreadable
from workbench.widgets.knobs.schema import Maker

OTHERS = "general"


class Knobs:
    """Controls of all settings of `model` but those in `leave`: dotted paths, and `path:kind` for one kind of several.

    `known` offers texts for a setting that is any text. `values` are the settings as JSON; `checked` makes the model of
    them, or None, with what is wrong said at the control. `changed` is called after every change made by the user.
    `widget` shows the groups one at a time, `buttons` to choose between them.
    """

    def __init__(
        self,
        model: type[BaseModel],
        leave: Collection[str] = (),
        known: Mapping[str, Sequence[str]] | None = None,
        changed: Callable[[], None] = lambda: None,
    ):
        self._model, self._tell = model, changed
        self._quiet = 0  # how many are at work that change controls by themselves
        self.group = Maker(leave, known or {}, self.changed, self.quiet).group(model)
        parts, singles = dict[str, Group](), dict[str, Knob]()
        for name, knob in self.group.fields.items():
            if isinstance(knob, Group):
                parts[name] = knob
            elif isinstance(knob, Several):
                parts[name] = Group({name: knob})
            else:
                singles[name] = knob
        self.panels = {**parts, **({OTHERS: Group(singles)} if singles else {})}
        self.buttons: Any = ipywidgets.ToggleButtons(options=list(self.panels), style={"button_width": "auto"})
        self._place = ipywidgets.VBox()
        self._alert = alert("")
        self.widget = ipywidgets.VBox([self.buttons, self._alert, self._place])
        self.buttons.observe(lambda _: self._open(), "value")
        self._open()

    @property
    def values(self) -> dict[str, Any]:
        """Return the settings as JSON values. Raises UnreadableField where a text is not YAML."""
        return self.group.read()

    def write(self, values: Mapping[str, Any]) -> None:
        """Show these settings; those that are not among them stay. WorkbenchError for one that has no control."""
        with self.quiet():
            self.group.write(values)
        self.changed()

    def checked(self, besides: Mapping[str, Any]) -> Any:
        """Return the validated model of these settings and `other_values`, or None with the errors shown."""
        for panel in self.panels.values():
            panel.content()
        self._alert.value = ""
        try:
            return self._model.model_validate({**self.values, **besides})
        except ValidationError as error:
            told = told_apart(error, self._model)
        except Unreadable as error:
            told = [(error.path, str(error))]
        for path, line in told:
            self.complain(path, line)
        return None

    def complain(self, path: Sequence[str], line: str) -> None:
        """Show an error at the field of `path`, or above the form where that field is hidden."""
        for name, panel in self.panels.items():
            inside = path[1:] if path and path[0] == name and name not in panel.fields else path
            if panel.complain(inside, line) and name == self.buttons.value:
                return
        self._alert.value = alert(line).value

    def changed(self) -> None:
        if not self._quiet:
            self._tell()

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Suppress `on_change` while values are written by the program."""
        self._quiet += 1
        try:
            yield
        finally:
            self._quiet -= 1

    def leaves(self) -> list[str]:
        """Return the dotted paths of all settings; those of a union's kind are below its name."""
        return [".".join(path) for path in self.group.leaves()]

    def _open(self) -> None:
        self._place.children = (self.panels[self.buttons.value].widget,)
