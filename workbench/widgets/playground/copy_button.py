"""A button that copies a text."""

from __future__ import annotations

from pathlib import Path

import anywidget
import traitlets


class CopyButton(anywidget.AnyWidget):
    """`text` goes into the clipboard, which only the browser can do; without a text it cannot be pressed."""

    _esm = Path(__file__).parent / "copy_button.js"
    label = traitlets.Unicode("Copy").tag(sync=True)
    text = traitlets.Unicode().tag(sync=True)
