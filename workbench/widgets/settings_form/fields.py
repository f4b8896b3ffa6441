"""Define form fields for single settings, optional settings and unions; the values of all fields are JSON.

The fields of a union's option are built when the option is chosen.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import ipywidgets

Changed = Callable[[], None]
LABEL_WIDTH = "11em"
INSIDE, CHECK = {"margin": "0 0 0 2em"}, {"width": "13em", "margin": "0 0 0 4em"}
NOT_SET = "not set"


class UnreadableField(ValueError):
    """The text of a field cannot be read as a value; `path` names the field, `reason` the error."""

    def __init__(self, path: tuple[str, ...], reason: str):
        super().__init__(f"{'.'.join(path)}: {reason}")
        self.path, self.reason = path, reason


class FormField(Protocol):
    """The interface of a form field for one setting, shown by `widget`.

    `read` and `write` use JSON; `accepts` tests whether the field can show a value. `field_paths` yields the paths of
    its settings, relative to its own. `show_error` shows an error at such a path.
    """

    widget: Any

    def read(self) -> Any: ...
    def write(self, value: Any) -> None: ...
    def accepts(self, value: Any) -> bool: ...
    def field_paths(self) -> Iterator[tuple[str, ...]]: ...
    def show_error(self, path: Sequence[str], line: str) -> bool:
        """Show the error and return True; return False if this field cannot show it, so that the caller must."""
        ...

    def clear_errors(self) -> None:
        """Clear all errors."""
        ...


class ValueField:
    """A field of one control, whose value is the setting."""

    kinds: tuple[type, ...] = ()

    def __init__(self, control: Any, name: str, help_text: str, changed: Changed):
        self.widget = control
        control.description, control.tooltip = name, help_text or None
        control.style.description_width = LABEL_WIDTH if name else "0"
        control.observe(lambda _: changed(), "value")

    def read(self) -> Any:
        return self.widget.value

    def write(self, value: Any) -> None:
        self.widget.value = value

    def accepts(self, value: Any) -> bool:
        return type(value) in self.kinds

    def field_paths(self) -> Iterator[tuple[str, ...]]:
        yield ()

    def show_error(self, path: Sequence[str], line: str) -> bool:
        return False

    def clear_errors(self) -> None:
        pass


class ChoiceField(ValueField):
    """A field with a list of plain values to choose from."""

    def __init__(self, options: Sequence[Any], name: str, help_text: str, changed: Changed):
        self._options = list(options)
        control = ipywidgets.Dropdown(options=[(format_value(each), n) for n, each in enumerate(options)], value=0)
        super().__init__(control, name, help_text, changed)

    def read(self) -> Any:
        return self._options[self.widget.value]

    def write(self, value: Any) -> None:
        self.widget.value = next(n for n, each in enumerate(self._options) if equal_json(each, value))

    def accepts(self, value: Any) -> bool:
        return any(equal_json(each, value) for each in self._options)


class BoolField(ValueField):
    kinds = (bool,)

    def __init__(self, name: str, help_text: str, changed: Changed):
        super().__init__(ipywidgets.Checkbox(), name, help_text, changed)


class IntField(ValueField):
    kinds = (int,)

    def __init__(self, least: int | None, most: int | None, step: int, name: str, help_text: str, changed: Changed):
        low, high = -(2**63) if least is None else least, 2**63 - 1 if most is None else most
        start = min(max(0, low), high)
        super().__init__(ipywidgets.BoundedIntText(start, min=low, max=high, step=step), name, help_text, changed)


class FloatField(ValueField):
    """A field with a slider if both limits are known, else a number box. An exclusive limit can be entered, too."""

    kinds = (float, int)

    def __init__(self, least: float | None, most: float | None, name: str, help_text: str, changed: Changed):
        if least is not None and most is not None:
            control = ipywidgets.FloatSlider(most, min=least, max=most, step=(most - least) / 100, readout_format=".3g")
        else:
            low, high = -sys.float_info.max if least is None else least, sys.float_info.max if most is None else most
            control = ipywidgets.BoundedFloatText(min(max(0.0, low), high), min=low, max=high, step=0.1)
        super().__init__(control, name, help_text, changed)

    def read(self) -> Any:
        return float(self.widget.value)

    def write(self, value: Any) -> None:
        self.widget.value = float(value)


class TextField(ValueField):
    """A field for a text; its control suggests the texts of `known`."""

    kinds = (str,)

    def __init__(self, known: Sequence[str], name: str, help_text: str, changed: Changed):
        control = ipywidgets.Combobox(options=tuple(known), ensure_option=False) if known else ipywidgets.Text()
        control.continuous_update = False
        super().__init__(control, name, help_text, changed)


class YamlField(ValueField):
    """A field for a list or mapping as YAML on one line; an empty text means an empty list or mapping."""

    def __init__(self, empty: list | dict, name: str, help_text: str, changed: Changed):
        self._empty, self.kinds = empty, (type(empty),)
        control = ipywidgets.Text(continuous_update=False, placeholder="a, b" if isinstance(empty, list) else "a: b")
        super().__init__(control, name, help_text, changed)

    def read(self) -> Any:
        from workbench.files import UnreadableText, read_yaml

        text = self.widget.value.strip()
        ends = "[]" if isinstance(self._empty, list) else "{}"
        ends = ("", "") if text.startswith(ends[0]) else ends
        try:
            return read_yaml(f"{ends[0]}{text}{ends[1]}") if text else self._empty
        except UnreadableText as error:
            raise UnreadableField((), str(error)) from None

    def write(self, value: Any) -> None:
        self.widget.value = "" if value == self._empty else to_yaml_line(value)


class OptionalField:
    """A field for a setting that may be None: a checkbox, and while it is checked the setting's own field."""

    def __init__(self, make: Callable[[], FormField], name: str, help_text: str, changed: Changed):
        self._make = make
        self._inner: FormField | None = None
        self._check = ipywidgets.Checkbox(description=name, tooltip=help_text or None, indent=False, layout=CHECK)
        self._below = ipywidgets.VBox(layout=INSIDE)
        self._row = ipywidgets.HBox([self._check])
        self.widget = ipywidgets.VBox([self._row, self._below])
        self._check.observe(lambda _: (self._lay(), changed()), "value")

    @property
    def inner(self) -> FormField:
        if self._inner is None:
            self._inner = self._make()
        return self._inner

    def read(self) -> Any:
        return self.inner.read() if self._check.value else None

    def write(self, value: Any) -> None:
        if value is not None:
            self.inner.write(value)
        self._check.value = value is not None

    def accepts(self, value: Any) -> bool:
        return value is None or self.inner.accepts(value)

    def field_paths(self) -> Iterator[tuple[str, ...]]:
        yield from self.inner.field_paths()

    def show_error(self, path: Sequence[str], line: str) -> bool:
        return bool(self._check.value) and self.inner.show_error(path, line)

    def clear_errors(self) -> None:
        if self._inner is not None:
            self._inner.clear_errors()

    def _lay(self) -> None:
        inside = self.inner.widget if self._check.value else None
        below = isinstance(inside, ipywidgets.Box)
        self._row.children = (self._check,) if below or inside is None else (self._check, inside)
        self._below.children = (inside,) if below else ()


class UnionOption(NamedTuple):
    """One option of a union: a plain value, or a field that `make` builds."""

    label: str
    value: Any = None
    make: Callable[[], FormField] | None = None


class UnionField:
    """A field for a setting of several kinds: a list of kinds to choose from, and the fields of the chosen kind."""

    def __init__(self, kinds: Sequence[UnionOption], name: str, help_text: str, changed: Changed):
        self._kinds, self._made = kinds, dict[int, FormField]()
        self._list: Any = ipywidgets.Dropdown(options=[(kind.label, n) for n, kind in enumerate(kinds)], value=0)
        self._list.description, self._list.tooltip = name, help_text or None
        self._list.style.description_width = LABEL_WIDTH
        self._below = ipywidgets.VBox(layout=INSIDE)
        self._row = ipywidgets.HBox([self._list])
        self.widget = ipywidgets.VBox([self._row, self._below])
        self._list.observe(lambda _: (self._lay(), changed()), "value")
        self._lay()

    def read(self) -> Any:
        knob = self._of(self._list.value)
        return knob.read() if knob is not None else self._kinds[self._list.value].value

    def write(self, value: Any) -> None:
        place = self._place(value)
        assert place is not None, value
        if knob := self._of(place):
            knob.write(value)
        self._list.value = place

    def accepts(self, value: Any) -> bool:
        return self._place(value) is not None

    def field_paths(self) -> Iterator[tuple[str, ...]]:
        yield ()  # the list itself
        for place, kind in enumerate(self._kinds):
            if knob := self._of(place):
                yield from ((kind.label, *path) for path in knob.field_paths() if path)

    def show_error(self, path: Sequence[str], line: str) -> bool:
        knob = self._of(self._list.value)
        return knob is not None and knob.show_error(path, line)

    def clear_errors(self) -> None:
        for knob in self._made.values():
            knob.clear_errors()

    def _of(self, place: int) -> FormField | None:
        kind = self._kinds[place]
        if kind.make is not None and place not in self._made:
            self._made[place] = kind.make()
        return self._made.get(place)

    def _place(self, value: Any) -> int | None:
        help_text = value.get("kind") if isinstance(value, dict) else None
        for place, kind in enumerate(self._kinds):
            if help_text is not None and kind.label != help_text:
                continue
            knob = self._of(place)
            if knob.accepts(value) if knob is not None else equal_json(kind.value, value):
                return place
        return None

    def _lay(self) -> None:
        knob = self._of(self._list.value)
        below = knob is not None and isinstance(knob.widget, ipywidgets.Box)
        self._row.children = (self._list,) if knob is None or below else (self._list, knob.widget)
        self._below.children = (knob.widget,) if knob is not None and below else ()


def to_yaml_line(value: Any) -> str:
    """Return JSON values as one line of YAML that reads back equal; texts with unprintable characters are escaped."""
    import yaml

    class OneLine(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def represent(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')

    OneLine.add_representer(str, represent)
    options: dict[str, Any] = {"default_flow_style": True, "allow_unicode": True, "sort_keys": False}
    return yaml.dump(value, Dumper=OneLine, width=sys.maxsize, **options).strip()


def equal_json(one: Any, other: Any) -> bool:
    """Return whether two values are equal as JSON: 1, 1.0 and true differ."""
    return type(one) is type(other) and one == other


def format_value(value: Any) -> str:
    return NOT_SET if value is None else value if isinstance(value, str) else json.dumps(value)
