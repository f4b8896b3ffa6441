"""Typed controls for every setting of a pydantic model, made from its schema: they are written down nowhere else."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import ipywidgets
from annotated_types import Ge, Gt, Le, Lt, MultipleOf
from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticUndefined, to_jsonable_python

from workbench.errors import told_apart
from workbench.widgets.field_comments import comments_of
from workbench.widgets.knob_groups import Group, Kind, Maybe, Several, alert
from workbench.widgets.knob_leaves import Choice, Flag, Knob, Number, Unreadable, Whole, Words, Written, spoken

OTHERS = "general"
WORDS: dict[type, str] = {int: "a number", float: "a number", str: "a text", bool: "yes or no"}


class Knobs:
    """Controls of all settings of `model` but those in `leave`: dotted paths, and `path:kind` for one kind of several.

    `known` offers texts for a setting that is any text. `values` are the settings as JSON; `checked` makes the model of
    them, or None, with what is wrong said at the control. `changed` is called after every change that somebody makes.
    `widget` shows the groups one at a time, `buttons` to choose between them.
    """

    def __init__(
        self,
        model: type[BaseModel],
        leave: Collection[str] = (),
        known: Mapping[str, Sequence[str]] | None = None,
        changed: Callable[[], None] = lambda: None,
    ):
        self._model, self._leave, self._known, self._tell = model, leave, known or {}, changed
        self._quiet = 0  # how many are at work that change controls by themselves
        self.group = _group(self, model, "")
        parts, singles = dict[str, Group](), dict[str, Knob]()
        for name, knob in self.group.fields.items():
            if isinstance(knob, Group):
                parts[name] = knob
            elif isinstance(knob, Several):
                parts[name] = Group({name: knob})
            else:
                singles[name] = knob
        self.panels = {**parts, **({OTHERS: Group(singles)} if singles else {})}
        self.buttons = ipywidgets.ToggleButtons(options=list(self.panels), style={"button_width": "auto"})
        self._place = ipywidgets.VBox()
        self._alert = alert("")
        self.widget = ipywidgets.VBox([self.buttons, self._alert, self._place])
        self.buttons.observe(lambda _: self._open(), "value")
        self._open()

    @property
    def values(self) -> dict[str, Any]:
        """Unreadable where a text is not YAML."""
        return self.group.read()

    def write(self, values: Mapping[str, Any]) -> None:
        """Show these settings; those that are not among them stay. WorkbenchError for one that has no control."""
        with self.quiet():
            self.group.write(values)
        self.changed()

    def checked(self, besides: Mapping[str, Any]) -> Any:
        """The model of these settings and those `besides`; None where they are wrong, which is told."""
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
        """Say what is wrong at the control of `path`, or above all where that is not in sight."""
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
        """Changes that nobody made are not told."""
        self._quiet += 1
        try:
            yield
        finally:
            self._quiet -= 1

    def leaves(self) -> list[str]:
        """The dotted paths of all that can be set; a kind's own settings are below its name."""
        return [".".join(path) for path in self.group.leaves()]

    def _open(self) -> None:
        self._place.children = (self.panels[self.buttons.value].widget,)


def _group(knobs: Knobs, model: type[BaseModel], path: str) -> Group:
    told, fields = comments_of(model), dict[str, Knob]()
    kind = None
    for name, field in model.model_fields.items():
        inside = f"{path}.{name}".lstrip(".")
        if name == "kind" and len(get_args(field.annotation)) == 1:
            kind = field.default
        elif inside not in knobs._leave:
            fields[name] = _knob(knobs, field.annotation, field.metadata, inside, name, told.get(name, ""))
            default = field.get_default(call_default_factory=True)
            if default is not PydanticUndefined:
                with knobs.quiet():
                    fields[name].write(to_jsonable_python(default))
    return Group(fields, kind, inspect.cleandoc(model.__doc__ or "").split("\n\n")[0] if path else "")


def _knob(knobs: Knobs, annotation: Any, metadata: Sequence[Any], path: str, name: str, told: str) -> Knob:
    """The control of one setting; `name` is empty where it stands beside one that is named."""
    values, typed = _members(annotation, metadata)
    if not typed:
        return Choice(values, name, told, knobs.changed)
    if len(typed) == 1 and not values:
        return _plain(knobs, *typed[0], path, name, told)

    def beside(annotation: Any, metadata: Sequence[Any]) -> Callable[[], Knob]:
        return lambda: _plain(knobs, annotation, metadata, path, "", told or name)

    if len(typed) == 1 and values == [None]:
        return Maybe(beside(*typed[0]), name, told, knobs.changed)
    kinds = [Kind(spoken(value), value) for value in values]
    kinds += [Kind(_label(each), make=beside(each, metadata)) for each, metadata in typed]
    return Several([kind for kind in kinds if f"{path}:{kind.label}" not in knobs._leave], name, told, knobs.changed)


def _plain(knobs: Knobs, annotation: Any, metadata: Sequence[Any], path: str, name: str, told: str) -> Knob:
    limits = {type(each): each for each in metadata}

    def end(closed: Any, open_: Any, step: int) -> Any:
        if closed in limits:
            return getattr(limits[closed], closed.__name__.lower())
        return getattr(limits[open_], open_.__name__.lower()) + step if open_ in limits else None

    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return _group(knobs, annotation, path)
    if annotation is bool:
        return Flag(name, told, knobs.changed)
    if annotation is int:
        multiple = limits[MultipleOf].multiple_of if MultipleOf in limits else 1
        return Whole(end(Ge, Gt, 1), end(Le, Lt, -1), multiple, name, told, knobs.changed)
    if annotation is float:
        return Number(end(Ge, Gt, 0), end(Le, Lt, 0), name, told, knobs.changed)
    if annotation is str:
        return Words(knobs._known.get(path, ()), name, told, knobs.changed)
    empty: list | dict = {} if get_origin(annotation) is dict else []
    if not isinstance(empty, get_origin(annotation) or ()) and get_origin(annotation) not in (tuple, list):
        raise TypeError(f"{path}: there is no control for {annotation}")
    return Written(empty, name, told, knobs.changed)


def _members(annotation: Any, metadata: Sequence[Any]) -> tuple[list[Any], list[tuple[Any, list[Any]]]]:
    """What a setting may be: plain values, and types with their limits. Yes or no among others is two values."""
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


def _label(annotation: Any) -> str:
    kind = getattr(annotation, "model_fields", {}).get("kind")
    return str(kind.default) if kind is not None else WORDS.get(annotation, getattr(annotation, "__name__", "a list"))
