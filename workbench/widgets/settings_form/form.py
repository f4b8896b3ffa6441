"""Build a form with a typed control, with limits, for every setting of a pydantic model.

A field's help is the comment at the setting in the model's source, behind it or right above it, or else the sentence
of the model's docstring that names the setting.
"""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from html import escape
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import ipywidgets
from annotated_types import Ge, Gt, Le, Lt, MultipleOf
from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticUndefined, to_jsonable_python

from workbench.display import truncate_text
from workbench.errors import WorkbenchError, explain_by_path
from workbench.settings import field_comments
from workbench.widgets.settings_form.fields import (
    BoolField,
    Changed,
    ChoiceField,
    FloatField,
    FormField,
    IntField,
    OptionalField,
    TextField,
    UnionField,
    UnionOption,
    UnreadableField,
    YamlField,
    format_value,
)
from workbench.widgets.view import close_tree

GENERAL_GROUP = "general"
COLUMNS = {"display": "grid", "grid_template_columns": "repeat(auto-fill, minmax(min(24em, 100%), 1fr))"}
TYPE_LABELS: dict[type, str] = {int: "a number", float: "a number", str: "a text"}


class SettingsForm:
    """A form with the controls of a model's settings: `values` holds the settings as JSON, `validated` builds the model
    from them.

    `widget` shows one group of settings at a time, chosen with `buttons`.

    Args:
        model: the class of the settings.
        excluded: settings without a control: dotted paths, and `path:kind` for one kind of several.
        suggestions: suggested texts for text settings, by dotted path.
        on_change: called after every change, except under `suppress_changes`.
    """

    def __init__(
        self,
        model: type[BaseModel],
        excluded: Collection[str] = (),
        suggestions: Mapping[str, Sequence[str]] | None = None,
        on_change: Callable[[], None] = lambda: None,
    ):
        self._model, self._on_change = model, on_change
        self._num_suppressing = 0  # number of `suppress_changes` contexts that are open
        self._builder = FormBuilder(excluded, suggestions or {}, self.changed, self.suppress_changes)
        self.group = self._builder.group(model)
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
        self.body = ipywidgets.VBox(
            [self._alert, self._place]
        )  # without the buttons, so that two forms can share one row of buttons
        self.widget = ipywidgets.VBox([self.buttons, self.body])
        self.buttons.observe(lambda _: self._open(), "value")
        self._open()

    @property
    def values(self) -> dict[str, Any]:
        """Return the settings as JSON values. Raises UnreadableField if a text is not YAML."""
        return self.group.read()

    def write(self, values: Mapping[str, Any]) -> None:
        """Write settings into the form; settings that are not given stay. Raises WorkbenchError for a value without a
        control."""
        with self.suppress_changes():
            self.group.write(values)
        self.changed()

    def validated(self, other_values: Mapping[str, Any]) -> Any:
        """Return the validated model of the form's settings and `other_values`, or None with the errors shown."""
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

    def mark(self, paths: Collection[tuple[str, ...]]) -> None:
        """Set the CSS class `wb-differs` on fields at, above or below `paths`; remove it from all others."""
        for name, panel in self.panels.items():
            inside = panel.fields if name == GENERAL_GROUP or name in panel.fields else {name: panel}
            for top, knob in inside.items():
                _mark(knob, (top,), paths)

    def show_error(self, path: Sequence[str], line: str) -> None:
        """Show an error at the field of `path`, or above the form if that field is hidden."""
        for name, panel in self.panels.items():
            inside = path[1:] if path and path[0] == name and name not in panel.fields else path
            if panel.show_error(inside, line) and name == self.buttons.value:
                return
        self._alert.value = error_markup(line)

    def changed(self) -> None:
        if not self._num_suppressing:
            self._on_change()

    @contextmanager
    def suppress_changes(self) -> Iterator[None]:
        """Suppress calls of `on_change` within the `with` block, while the program itself writes values."""
        self._num_suppressing += 1
        try:
            yield
        finally:
            self._num_suppressing -= 1

    def close(self) -> None:
        """Close all controls, including those of hidden options."""
        for part in (self, self.group, *self.panels.values(), *self._builder.fields):
            close_tree(part.widget)

    def field_paths(self) -> list[str]:
        """Return the dotted paths of all settings; a union's kind is a part of the path."""
        return [".".join(path) for path in self.group.field_paths()]

    def _open(self) -> None:
        self._place.children = (self.panels[self.buttons.value].widget,)


def _mark(knob: FormField, path: tuple[str, ...], paths: Collection[tuple[str, ...]]) -> None:
    if isinstance(knob, FieldGroup):
        for name, inner in knob.fields.items():
            _mark(inner, (*path, name), paths)
        return
    differs = any(each[: len(path)] == path or path[: len(each)] == each for each in paths)
    (knob.widget.add_class if differs else knob.widget.remove_class)("wb-differs")


def error_line(line: str) -> ipywidgets.HTML:
    """Return a widget with one line that shows an error, announced at once by screen readers."""
    return ipywidgets.HTML(error_markup(line))


def error_markup(line: str) -> str:
    style = "color:var(--jp-error-color1,#b00020);font-weight:600"
    return f'<div role="alert" style="{style}">✗ {escape(line)}</div>' if line else ""


class FieldGroup:
    """The fields of one model, in as many columns as fit; `kind` identifies the model if it is one of a union."""

    def __init__(self, fields: Mapping[str, FormField], kind: str | None = None, help_text: str = ""):
        self.fields, self._kind, self._alerts = fields, kind, dict[str, ipywidgets.HTML]()
        head = (ipywidgets.HTML(f'<div style="opacity:.75">{escape(help_text)}</div>'),) if help_text else ()
        self._cells = ipywidgets.VBox(layout=COLUMNS)
        self._with_alerts: list[ipywidgets.VBox] = []  # fields and the errors below them
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
                    raise WorkbenchError(
                        f"{name}: there is no control for {truncate_text(format_value(value[name]), 60)} here"
                    )
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
            if path[0] in self._alerts:
                self._alerts[path[0]].value = error_markup(line)
            else:
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
        before, self._with_alerts = self._with_alerts, []
        cells = list[ipywidgets.Widget]()
        for name, knob in self.fields.items():
            if alert := self._alerts.get(name):
                self._with_alerts.append(ipywidgets.VBox([knob.widget, alert]))
            cells.append(self._with_alerts[-1] if alert else knob.widget)
        self._cells.children = cells
        for box in before:
            _, alert = box.children
            if alert not in self._alerts.values():
                close_tree(alert)
            box.children = ()
            close_tree(box)


@dataclass(frozen=True)
class FormBuilder:
    """A builder of a form's fields; see `SettingsForm`. Defaults are written under `suppress_changes`."""

    excluded: Collection[str]
    suggestions: Mapping[str, Sequence[str]]
    on_change: Changed
    suppress_changes: Callable[[], AbstractContextManager[None]]
    fields: list[FormField] = field(default_factory=list)  # all fields built so far

    def group(self, model: type[BaseModel], path: str = "") -> FieldGroup:
        help_text, fields = field_comments(model), dict[str, FormField]()
        bases = (each for each in model.__mro__ if issubclass(each, BaseModel) and each is not BaseModel)
        described = " ".join(each.__doc__ or "" for each in bases)
        kind = None
        for name, setting in model.model_fields.items():
            inside = f"{path}.{name}".lstrip(".")
            if name == "kind" and len(get_args(setting.annotation)) == 1:
                kind = setting.default
            elif inside not in self.excluded:
                words = help_text.get(name) or sentence_about(name, described)
                fields[name] = self._kept(self._field(setting.annotation, setting.metadata, inside, name, words))
                default = setting.get_default(call_default_factory=True)
                if default is not PydanticUndefined:
                    with self.suppress_changes():
                        fields[name].write(to_jsonable_python(default))
        return FieldGroup(fields, kind, inspect.cleandoc(model.__doc__ or "").split("\n\n")[0] if path else "")

    def _kept(self, built: FormField) -> FormField:
        self.fields.append(built)
        return built

    def _field(self, annotation: Any, metadata: Sequence[Any], path: str, name: str, help_text: str) -> FormField:
        """Build the field of one setting with the label `name`."""
        values, typed = _members(annotation, metadata)
        if not typed:
            return ChoiceField(values, name, help_text, self.on_change)
        if len(typed) == 1 and not values:
            return self._plain_field(*typed[0], path, name, help_text)

        def beside(annotation: Any, metadata: Sequence[Any]) -> Callable[[], FormField]:
            return lambda: self._kept(self._plain_field(annotation, metadata, path, "", help_text))

        if len(typed) == 1 and values == [None]:
            return OptionalField(beside(*typed[0]), name, help_text, self.on_change)
        kinds = [UnionOption(format_value(value), value) for value in values]
        kinds += [UnionOption(_label(each), make=beside(each, metadata)) for each, metadata in typed]
        return UnionField(
            [kind for kind in kinds if f"{path}:{kind.label}" not in self.excluded], name, help_text, self.on_change
        )

    def _plain_field(self, annotation: Any, metadata: Sequence[Any], path: str, name: str, help_text: str) -> FormField:
        limits = {type(each): each for each in metadata}

        def end(closed: Any, open_: Any, step: int) -> Any:
            if closed in limits:
                return getattr(limits[closed], closed.__name__.lower())
            return getattr(limits[open_], open_.__name__.lower()) + step if open_ in limits else None

        if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
            return self.group(annotation, path)
        if annotation is bool:
            return BoolField(name, help_text, self.on_change)
        if annotation is int:
            multiple = limits[MultipleOf].multiple_of if MultipleOf in limits else 1
            return IntField(end(Ge, Gt, 1), end(Le, Lt, -1), multiple, name, help_text, self.on_change)
        if annotation is float:
            return FloatField(end(Ge, Gt, 0), end(Le, Lt, 0), name, help_text, self.on_change)
        if annotation is str:
            return TextField(self.suggestions.get(path, ()), name, help_text, self.on_change)
        empty: list | dict = {} if get_origin(annotation) is dict else []
        if not isinstance(empty, get_origin(annotation) or ()) and get_origin(annotation) not in (tuple, list):
            raise TypeError(f"{path}: there is no control for {annotation}")
        return YamlField(empty, name, help_text, self.on_change)


def _members(annotation: Any, metadata: Sequence[Any]) -> tuple[list[Any], list[tuple[Any, list[Any]]]]:
    """Split a setting's annotation into plain values, and types with their limits.

    In a union with bool, False and True are plain values.
    """
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        more = [each for piece in more for each in getattr(piece, "metadata", [piece])]
        return _members(inner, [*metadata, *more])
    if get_origin(annotation) is Literal:
        return list(get_args(annotation)), []
    if annotation in (None, type(None)):
        return [None], []
    if get_origin(annotation) not in (Union, types.UnionType):
        return [], [(annotation, list(metadata))]
    values, typed = [], []
    for each in get_args(annotation):
        mine, types_ = _members(each, metadata)
        values += mine
        typed += types_
    if any(kind is bool for kind, _ in typed):
        values, typed = [False, True, *values], [each for each in typed if each[0] is not bool]
    return sorted(values, key=lambda value: value is not None), typed


def sentence_about(name: str, docstring: str) -> str:
    """Return the first sentence of a docstring that has the setting's name in backticks, on one line; "" if there is
    none."""
    whole = " ".join(docstring.split())
    return next((each for each in re.split(r"(?<=[.:;]) (?=[A-Z`(])", whole) if f"`{name}`" in each), "")


def _label(annotation: Any) -> str:
    kind = getattr(annotation, "model_fields", {}).get("kind")
    return (
        str(kind.default)
        if kind is not None
        else TYPE_LABELS.get(annotation, getattr(annotation, "__name__", "a list"))
    )
