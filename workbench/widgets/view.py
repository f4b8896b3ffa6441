"""Base of every widget: controls above a picture that is drawn in Python.

The picture is a function of the widget's state. The same drawing is shown live, saved, exported, printed and tested. Of
a picture that gets longer at its end only new pieces are sent to the browser.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

import anywidget
import ipywidgets
import traitlets

from workbench.widgets.cell_views import note_closed, note_shown, running_shell
from workbench.widgets.saved import saved_picture
from workbench.widgets.throttle import Throttle

HERE = Path(__file__).parent
MIN_WIDTH, MAX_WIDTH = 560, 1600  # pixels of a picture that is drawn for the room there is
DEFAULT_WIDTH = 800  # of one that no browser shows yet, and of one that is saved: for windows of any size
_IS_SAVED = ContextVar("whether the picture is drawn for the notebook's file", default=False)


class MarkupWidget(anywidget.AnyWidget):
    """Markup in the browser. `picked` is the key of what was clicked last, or chosen with Enter."""

    # As text: of a path anywidget keeps a listener for changes, and with it each widget, for good.
    _esm = (HERE / "picture.js").read_text(encoding="utf-8")
    _css = (HERE / "picture.css").read_text(encoding="utf-8")
    content = traitlets.Unicode().tag(sync=True)
    picked = traitlets.Unicode().tag(sync=True)
    name = traitlets.Unicode().tag(sync=True)  # by which the browser knows it again
    folds = traitlets.Unicode().tag(sync=True)  # by which the browser knows what of it was unfolded
    typing = traitlets.Bool(False).tag(sync=True)  # whether the keyboard is in a field or a slider of this widget
    room = traitlets.Int(0).tag(sync=True)  # pixels of width that the browser has for it; 0 before it is shown

    def on_pick(self, handle: Callable[[str], object]) -> None:
        """Call `handle` with the key of whatever is picked from now on; the same may be picked again."""

        def pick(change: Any) -> None:
            if key := change["new"]:
                try:
                    handle(key)
                finally:
                    self.picked = ""

        self.observe(pick, "picked")


class PictureWidget(ipywidgets.VBox):
    """A widget: its own traits are its state, `picture()` draws them.

    A subclass says what it looks like in `picture`, calls `watch` with the traits that change it, and puts its
    controls above with `show`. While work goes on in another thread `throttle.mark()` has it redrawn soon; `keep` makes
    the saved notebook's picture the present one.

    A picture that asks for `width` is drawn again when the room for it changes; others shrink.
    """

    engine_fields: ClassVar[tuple[str, ...]] = ()  # attributes that reach an engine; None in a view that is closed
    _leave: Callable[[], object] | None = None  # ends what the view hears of an engine
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
        """SVG or HTML (from `svg.document` or `svg.html`) of the present state; has no effect and names no file."""
        raise NotImplementedError

    @property
    def width(self) -> int:
        """Pixels that the picture is to be wide: what the browser has room for, within bounds."""
        self._asked_for_width = True
        room = 0 if _IS_SAVED.get() else self.shown.room
        return min(max(room, MIN_WIDTH), MAX_WIDTH) if room else DEFAULT_WIDTH

    def redraw(self) -> None:
        self.shown.content = self.picture()

    def show(self, *controls: ipywidgets.Widget, below: tuple[ipywidgets.Widget, ...] = ()) -> None:
        """Show controls, the picture, and widgets below it."""
        self.children = (*controls, self.shown, *below)
        self.redraw()

    def watch(self, *names: str) -> None:
        """Redraw on changes of these traits, at most ten times a second."""
        self.observe(lambda _: self.throttle.mark(), list(names))

    def keep(self) -> None:
        """Save the present picture in the notebook's output; call it when work is done.

        JupyterLab then makes the view anew: while the keyboard is in one of its fields or sliders, it is postponed.
        """
        self._keep_pending = self.shown.typing
        if self._displayed and not self._keep_pending and self.comm is not None:
            _publish(self._bundle(), self._display_id, update=True)

    def close(self) -> None:
        """Close the widget with its controls, end its work, and let go of its engine."""
        note_closed(self)
        if self._leave is not None:
            self._leave()
        if hasattr(self, "throttle"):  # one that was refused at birth has none, and is closed all the same
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
        if self.comm is not None:  # ipywidgets would close it again, in whichever thread frees it
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


def close_tree(widget: Any) -> None:
    """Close a widget with what is in it, its layout and style included: no widget of ours shares them."""
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
    """Have boxes of a notebook's own note which views a cell shows in them; a box does not tell its children."""
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
    """Markup that grows: `draw` makes the whole, `append` sends new pieces.

    An element with `data-grows="NAME"` has one child for each piece of that name. A browser that
    missed some gets the whole.
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
        """Send the whole; `counts` are its pieces by name, where they differ from those sent before."""
        with self._drawing:
            if counts is not None:
                self._num_sent = dict(counts)
            self.content = self._draw()

    def append(self, name: str, count: int, pieces: Callable[[int], Sequence[str]]) -> None:
        """Send the new ones of `count` pieces; `pieces(n)` makes those from the n-th on."""
        with self._drawing:
            at = self._num_sent.get(name, 0)
            if count > at:
                self._num_sent[name] = count
                message: dict[str, Any] = {"into": name, "at": at, "pieces": list(pieces(at))}
                self.send(message)
