"""Form fields of optional settings and of unions; the fields of a kind are built when it is chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import ipywidgets

from workbench.widgets.knobs.leaves import LABEL_STYLE, Changed, FormField
from workbench.widgets.knobs.values import equal_json

INSIDE, CHECK = {"margin": "0 0 0 2em"}, {"width": "13em", "margin": "0 0 0 4em"}


class OptionalField:
    """A setting that may be left out: a checkbox, and beside it what stands there if not."""

    def __init__(self, make: Callable[[], FormField], name: str, help_text: str, changed: Changed):
        self._make = make
        self._inner: FormField | None = None
        self._check = ipywidgets.Checkbox(description=name, tooltip=help_text or name, indent=False, layout=CHECK)
        self._below = ipywidgets.VBox(layout=INSIDE)
        self._row = ipywidgets.HBox([self._check])
        self.widget = ipywidgets.VBox([self._row])
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
        self.widget.children = (self._row, self._below) if below else (self._row,)


class UnionOption(NamedTuple):
    """One of several: a plain value, or what `make` makes."""

    label: str
    value: Any = None
    make: Callable[[], FormField] | None = None


class UnionField:
    """One of several kinds of setting: a list to choose from, and the chosen kind's own settings."""

    def __init__(self, kinds: Sequence[UnionOption], name: str, help_text: str, changed: Changed):
        self._kinds, self._made = kinds, dict[int, FormField]()
        self._list: Any = ipywidgets.Dropdown(options=[(kind.label, n) for n, kind in enumerate(kinds)], value=0)
        self._list.description, self._list.style, self._list.tooltip = name, LABEL_STYLE, help_text or name
        self._below = ipywidgets.VBox(layout=INSIDE)
        self._row = ipywidgets.HBox([self._list])
        self.widget = ipywidgets.VBox([self._row])
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
        self.widget.children = (self._row, self._below) if below else (self._row,)
