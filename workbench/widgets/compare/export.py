"""Save a widget's content as a file: the kernel makes CSV, JSON and SVG; the browser makes PNG, and downloads the
file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from workbench.errors import describe_error


class ExportButtons(anywidget.AnyWidget):
    """Buttons that save files, one for each of `makers`: functions that return the file's text, or for `png` an SVG to
    be rendered.

    `name` is the files' name without suffix. An error of a maker is shown next to the buttons.
    """

    _esm = (Path(__file__).parent / "export_buttons.js").read_text(encoding="utf-8")
    kinds = traitlets.List(traitlets.Unicode()).tag(sync=True)

    def __init__(self, name: str, **makers: Callable[[], str]):
        super().__init__(kinds=list(makers))
        self._name, self._makers = name, makers
        self.on_msg(lambda _, message, __: self.send({**self.file(message["kind"]), "view": message.get("view")}))

    def file(self, kind: str) -> dict[str, Any]:
        """Return the message with a file's name and content, or with its error."""
        try:
            return {"kind": kind, "name": f"{self._name}.{kind}", "content": self._makers[kind]()}
        except Exception as error:
            return {"kind": kind, "problem": describe_error(error)}
