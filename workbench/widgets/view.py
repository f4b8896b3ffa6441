"""Define the base of every widget: controls above a picture that is drawn in Python.

The picture is a function of the widget's state. The same drawing is shown live, saved, exported, printed and tested. A
picture that grows at its end sends only its new pieces to the browser.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from uuid import uuid4

import anywidget
import ipywidgets
import traitlets

from workbench.widgets.cell_views import note_closed, note_shown, running_shell
from workbench.widgets.saved import saved_picture
from workbench.widgets.throttle import Throttle

HERE = Path(__file__).parent
MIN_WIDTH, MAX_WIDTH = 560, 1600  # pixels; bounds of a picture drawn for the browser's width
DEFAULT_WIDTH = 800  # pixels; for a saved picture, and before a browser shows it
Control = TypeVar("Control", bound=ipywidgets.Widget)
_IS_SAVED = ContextVar("whether the picture is drawn for the notebook's file", default=False)


class MarkupWidget(anywidget.AnyWidget):
    """A widget that shows markup in the browser. `picked` is the key of the element that was clicked last, or chosen
    with Enter."""

    # As text: given a path, anywidget would keep a file listener, and with it every widget, in memory for good.
    _esm = (HERE / "picture.js").read_text(encoding="utf-8")
    _css = (HERE / "picture.css").read_text(encoding="utf-8")
    content = traitlets.Unicode().tag(sync=True)
    picked = traitlets.Unicode().tag(sync=True)
    name = traitlets.Unicode().tag(sync=True)  # key by which the browser recognizes this widget when it is shown anew
    folds = traitlets.Unicode().tag(sync=True)  # key under which the browser remembers unfolded elements
    typing = traitlets.Bool(False).tag(sync=True)  # whether the keyboard is in a field or a slider of this widget
    room = traitlets.Int(0).tag(sync=True)  # pixels of width that the browser has for it; 0 before it is shown

    def on_pick(self, handle: Callable[[str], object]) -> None:
        """Call `handle` with the key of each element picked from now on; one element may be picked repeatedly."""

        def pick(change: Any) -> None:
            if key := change["new"]:
                try:
                    handle(key)
                finally:
                    self.picked = ""

        self.observe(pick, "picked")


class PictureWidget(ipywidgets.VBox):
    """The base of all widgets: a widget's own traits are its state, and `picture()` draws them.

    A subclass draws itself in `picture`, calls `watch` with the traits that change the picture, and adds its controls
    with `show`. Work in another thread calls `throttle.mark()` for a redraw soon; `keep` saves the present picture in
    the notebook.

    A picture that reads `width` is redrawn when the browser's width changes; other pictures are scaled down.
    """

    engine_fields: ClassVar[tuple[str, ...]] = ()  # attributes that reference an engine; None after `close`
    steps: Any = None  # the `Recorded` control of a view that goes through a record
    _leave: Callable[[], object] | None = None  # removes the view's listener from an engine
    _asked_for_width = False

    def __init__(self, **traits: Any):
        super().__init__(**traits)
        _note_boxes()
        self.shown = MarkupWidget(name=uuid4().hex)
        self.throttle = Throttle(self.redraw)
        self._display_id, self._displayed, self._keep_pending = uuid4().hex, False, False
        self.shown.observe(lambda _: self.keep() if self._keep_pending else None, "typing")
        self.shown.observe(lambda _: self.throttle.mark() if self._asked_for_width else None, "room")
        self.add_class("wb")
        self.add_class(f"wb-{type(self).__name__.lower()}")

    def picture(self) -> str:
        """Draw the present state and return it as SVG or HTML (`svg.document`, `svg.html`). It has no side effects and
        contains no file names."""
        raise NotImplementedError

    @property
    def width(self) -> int:
        """Return the width of the picture in pixels: the browser's width, within `MIN_WIDTH` and `MAX_WIDTH`."""
        self._asked_for_width = True
        room = 0 if _IS_SAVED.get() else self.shown.room
        return min(max(room, MIN_WIDTH), MAX_WIDTH) if room else DEFAULT_WIDTH

    def redraw(self) -> None:
        step = self.steps and self.steps.step
        self.shown.content = self.picture()
        if self.steps:
            self.steps.drawn = step

    def show(self, *controls: ipywidgets.Widget, below: tuple[ipywidgets.Widget, ...] = ()) -> None:
        """Show controls, the picture, and widgets below it."""
        self.children = (*controls, self.shown, *below)
        self.redraw()

    def linked(self, name: str, control: Control) -> Control:
        """Return `control`, after linking its value with the trait `name`: each follows the other."""
        traitlets.link((self, name), (control, "value"))
        return control

    def watch(self, *names: str) -> None:
        """Redraw the picture on changes of these traits, at most ten times a second."""
        self.observe(lambda _: self.throttle.mark(), list(names))

    def keep(self) -> None:
        """Save the present picture in the notebook's output; call it when work is done.

        JupyterLab then creates the view anew, so saving waits while the keyboard is in a field or slider of the view.
        """
        self._keep_pending = self.shown.typing
        if self._displayed and not self._keep_pending and self.comm is not None:
            _publish(self._bundle(), self._display_id, update=True)

    def close(self) -> None:
        """Close the widget and its controls, end its work, and drop its references to an engine."""
        note_closed(self)
        if self._leave is not None:
            self._leave()
        if hasattr(self, "throttle"):  # absent where `__init__` raised early; the widget is closed all the same
            self.throttle.stop()
        for child in (*self.children, *([self.shown] if hasattr(self, "shown") else [])):
            close_tree(child)
        self.layout.close()
        super().close()
        if hasattr(self, "throttle"):
            self.throttle.flush_pending()  # a redraw under way needs the engine
        for name in ("_leave", *self.engine_fields):
            setattr(self, name, None)

    def __del__(self) -> None:
        if self.comm is not None:  # after `close`, ipywidgets would close it again, in the thread that frees it
            super().__del__()

    def _bundle(self) -> dict[str, Any]:
        live: Any = super()._repr_mimebundle_()
        token = _IS_SAVED.set(True)
        try:
            return {**live, **saved_picture(self.picture())}
        finally:
            _IS_SAVED.reset(token)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        return self._bundle()

    def _ipython_display_(self) -> None:
        self._displayed = True
        note_shown(self)
        _publish(self._bundle(), self._display_id, update=False)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def button(act: Callable[[], object], description: str, **options: Any) -> ipywidgets.Button:
    """Return a button that calls `act`."""
    made = ipywidgets.Button(description=description, **options)
    made.on_click(lambda _: act())
    return made


def close_tree(widget: Any) -> None:
    """Close a widget with its children, layout and style, which no other widget shares."""
    for part in (*getattr(widget, "children", ()), getattr(widget, "layout", None), getattr(widget, "style", None)):
        if isinstance(part, ipywidgets.Widget):
            close_tree(part)
    widget.close()


def views_in(box: ipywidgets.Box) -> list[PictureWidget]:
    """Return the views in a box, at any depth."""
    found: list[PictureWidget] = []
    for child in box.children:
        if isinstance(child, PictureWidget):
            found.append(child)
        elif isinstance(child, ipywidgets.Box):
            found += views_in(child)
    return found


def _note_boxes() -> None:
    """Make ipywidgets' boxes note the views shown in them: a box that is displayed does not notify its children."""
    formatter = getattr(running_shell(), "display_formatter", None)
    if formatter is None or ipywidgets.Box in formatter.mimebundle_formatter.type_printers:
        return

    def show(box: ipywidgets.Box) -> Any:
        for view in views_in(box):
            note_shown(view)
        return box._repr_mimebundle_()

    formatter.mimebundle_formatter.for_type(ipywidgets.Box, show)


def _publish(bundle: dict[str, Any], display_id: str, update: bool) -> None:
    from IPython.display import publish_display_data

    publish_display_data(bundle, transient={"display_id": display_id}, update=update)


class GrowingPicture(MarkupWidget):
    """A widget with markup that grows: `draw` returns the whole markup, `append` sends new pieces.

    An element with `data-grows="NAME"` has one child for each piece of that name. A browser that missed pieces gets the
    whole markup.
    """

    def __init__(self, draw: Callable[[], str]):
        super().__init__(folds=uuid4().hex)
        self._draw, self._num_sent = draw, dict[str, int]()
        self._drawing = threading.RLock()
        self.on_msg(lambda *_: self.send_all())

    @property
    def region_names(self) -> set[str]:
        return set(self._num_sent)

    def send_all(self, counts: Mapping[str, int] | None = None) -> None:
        """Send the whole markup; `counts` is its new number of pieces by name (default: unchanged)."""
        with self._drawing:
            if counts is not None:
                self._num_sent = dict(counts)
            self.content = self._draw()

    def append(self, name: str, count: int, pieces: Callable[[int], Sequence[str]]) -> None:
        """Send the pieces added since the last call, up to `count`; `pieces(n)` returns those from index n on."""
        with self._drawing:
            at = self._num_sent.get(name, 0)
            if count > at:
                self._num_sent[name] = count
                message: dict[str, Any] = {"into": name, "at": at, "pieces": list(pieces(at))}
                self.send(message)
