"""What every widget of the workbench is: controls, and a picture that is drawn in Python.

The picture is a function of the widget's state. It is shown live, it is what a saved, exported or printed notebook
shows, and it is what a test looks at: there is no second drawing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import uuid4

import anywidget
import ipywidgets
import traitlets

from workbench.widgets.pulse import Pulse

HERE = Path(__file__).parent


class Picture(anywidget.AnyWidget):
    """Markup in the browser. `picked` is the key of what was clicked last, or chosen with Enter."""

    _esm = HERE / "picture.js"
    _css = HERE / "picture.css"
    content = traitlets.Unicode().tag(sync=True)
    picked = traitlets.Unicode().tag(sync=True)


class View(ipywidgets.VBox):
    """A widget: its own traits are its state, `picture()` draws them.

    A subclass says what it looks like in `picture`, calls `watch` with the traits that change it, and puts its
    controls above with `show`. While work goes on in another thread `pulse.mark()` has it redrawn soon; `keep` makes
    the saved notebook's picture the present one.
    """

    def __init__(self, **traits: Any):
        super().__init__(**traits)
        self.shown = Picture()
        self.pulse = Pulse(self.redraw)
        self._display_id, self._displayed = uuid4().hex, False
        self.add_class("wb")
        self.add_class(f"wb-{type(self).__name__.lower()}")

    def picture(self) -> str:
        """SVG or HTML (from `kit.svg` or `kit.html`) of the present state; has no effect and names no file."""
        raise NotImplementedError

    def redraw(self) -> None:
        self.shown.content = self.picture()

    def show(self, *controls: ipywidgets.Widget, below: tuple[ipywidgets.Widget, ...] = ()) -> None:
        """Controls, the picture, and what stands below it."""
        self.children = (*controls, self.shown, *below)
        self.redraw()

    def watch(self, *names: str) -> None:
        """A change of these traits is drawn, no more than ten times a second."""
        self.observe(lambda _: self.pulse.mark(), list(names))

    def keep(self) -> None:
        """What the notebook holds of this widget when it is saved is the present picture; call it when work is done.
        (The view is made anew, so what has the keyboard's focus loses it: not for every change.)"""
        if self._displayed:
            _publish(self._bundle(), self._display_id, update=True)

    def close(self) -> None:
        if hasattr(self, "pulse"):  # one that was refused at birth has none, and is closed all the same
            self.pulse.stop()
        super().close()

    def _bundle(self) -> dict[str, Any]:
        picture = self.picture()
        kind = "image/svg+xml" if picture.startswith("<svg") else "text/html"
        live: Any = super()._repr_mimebundle_()
        return {**live, kind: picture}

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        return self._bundle()

    def _ipython_display_(self) -> None:
        self._displayed = True
        _publish(self._bundle(), self._display_id, update=False)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def _publish(bundle: dict[str, Any], display_id: str, update: bool) -> None:
    from IPython.display import publish_display_data

    publish_display_data(bundle, transient={"display_id": display_id}, update=update)
