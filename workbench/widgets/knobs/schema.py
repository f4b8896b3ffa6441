"""Build form fields from a pydantic schema: one per type, with its limits."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MultipleOf
from pydantic import BaseModel
from pydantic_core import PydanticUndefined, to_jsonable_python

from workbench.widgets.knobs.field_comments import field_comments
from workbench.widgets.knobs.groups import FieldGroup
from workbench.widgets.knobs.kinds import UnionOption, OptionalField, UnionField
from workbench.widgets.knobs.leaves import Changed, ChoiceField, BoolField, FormField, FloatField, IntField, TextField, YamlField
from workbench.widgets.knobs.values import format_value

TYPE_LABELS: dict[type, str] = {int: "a number", float: "a number", str: "a text"}


@dataclass(frozen=True)
class FormBuilder:
    """Builder of a form's fields; see `SettingsForm`. Defaults are written under `suppress_changes`."""

    excluded: Collection[str]
    suggestions: Mapping[str, Sequence[str]]
    on_change: Changed
    suppress_changes: Callable[[], AbstractContextManager[None]]

    def group(self, model: type[BaseModel], path: str = "") -> FieldGroup:
        help_text, fields = field_comments(model), dict[str, FormField]()
        kind = None
        for name, field in model.model_fields.items():
            inside = f"{path}.{name}".lstrip(".")
            if name == "kind" and len(get_args(field.annotation)) == 1:
                kind = field.default
            elif inside not in self.excluded:
                fields[name] = self._field(field.annotation, field.metadata, inside, name, help_text.get(name, ""))
                default = field.get_default(call_default_factory=True)
                if default is not PydanticUndefined:
                    with self.suppress_changes():
                        fields[name].write(to_jsonable_python(default))
        return FieldGroup(fields, kind, inspect.cleandoc(model.__doc__ or "").split("\n\n")[0] if path else "")

    def _field(self, annotation: Any, metadata: Sequence[Any], path: str, name: str, help_text: str) -> FormField:
        """Build the field of one setting; `name` is empty beside a field that is named."""
        values, typed = _members(annotation, metadata)
        if not typed:
            return ChoiceField(values, name, help_text, self.on_change)
        if len(typed) == 1 and not values:
            return self._plain_field(*typed[0], path, name, help_text)

        def beside(annotation: Any, metadata: Sequence[Any]) -> Callable[[], FormField]:
            return lambda: self._plain_field(annotation, metadata, path, "", help_text or name)

        if len(typed) == 1 and values == [None]:
            return OptionalField(beside(*typed[0]), name, help_text, self.on_change)
        kinds = [UnionOption(format_value(value), value) for value in values]
        kinds += [UnionOption(_label(each), make=beside(each, metadata)) for each, metadata in typed]
        return UnionField([kind for kind in kinds if f"{path}:{kind.label}" not in self.excluded], name, help_text, self.on_change)

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
    """Split a setting's annotation into plain values and types with their limits.

    A bool among other types becomes two values.
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


def _label(annotation: Any) -> str:
    kind = getattr(annotation, "model_fields", {}).get("kind")
    return str(kind.default) if kind is not None else TYPE_LABELS.get(annotation, getattr(annotation, "__name__", "a list"))
