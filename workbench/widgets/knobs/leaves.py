"""Form fields of single settings; values are JSON, `accepts` tests whether a value can be shown."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import ipywidgets

from workbench.widgets.knobs.values import to_yaml_line, equal_json, format_value

Changed = Callable[[], None]
LABEL_STYLE = {"description_width": "11em"}


class UnreadableField(ValueError):
    """A field holds text that is no value; `path` names the field, `reason` the error."""

    def __init__(self, path: tuple[str, ...], reason: str):
        super().__init__(f"{'.'.join(path)}: {reason}")
        self.path, self.reason = path, reason


class FormField(Protocol):
    """A setting: `widget` shows it. `read` and `write` speak JSON; `takes` says whether it can show a value; `leaves`
    are the paths below its own that it sets; `complain` says below it what is wrong, at a path of its own."""

    widget: Any

    def read(self) -> Any: ...
    def write(self, value: Any) -> None: ...
    def accepts(self, value: Any) -> bool: ...
    def field_paths(self) -> Iterator[tuple[str, ...]]: ...
    def show_error(self, path: Sequence[str], line: str) -> bool:
        """Show the error here and return True, or return False to leave it to the caller."""
        ...

    def clear_errors(self) -> None:
        """Clear all errors."""
        ...


class ValueField:
    """One control whose value is the setting."""

    kinds: tuple[type, ...] = ()

    def __init__(self, control: Any, name: str, help_text: str, changed: Changed):
        self.widget = control
        control.description, control.tooltip = name, help_text or name
        control.style = LABEL_STYLE if name else {"description_width": "0"}
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
    """One of a few values, each of them plain."""

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
    """A slider where both ends are known, else a box. An end that itself is not allowed can be chosen."""

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
    """A text; `known` are some that are offered."""

    kinds = (str,)

    def __init__(self, known: Sequence[str], name: str, help_text: str, changed: Changed):
        control = ipywidgets.Combobox(options=tuple(known), ensure_option=False) if known else ipywidgets.Text()
        control.continuous_update = False
        super().__init__(control, name, help_text, changed)


class YamlField(ValueField):
    """A list or a mapping, in YAML's words on one line; nothing at all is an empty one."""

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
