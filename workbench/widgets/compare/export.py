"""Buttons that save what is shown as a file: the kernel makes CSV and SVG, the browser the PNG and the download."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from workbench.errors import describe_error


class ExportButtons(anywidget.AnyWidget):
    """A button for each of `makers`: `csv` makes the file's text, `png` an SVG that the browser turns into pixels.

    `name` is the files' name without its ending. An error of a maker is shown beside the buttons.
    """

    _esm = (Path(__file__).parent / "export_buttons.js").read_text(encoding="utf-8")
    kinds = traitlets.List(traitlets.Unicode()).tag(sync=True)

    def __init__(self, name: str, **makers: Callable[[], str]):
        super().__init__(kinds=list(makers))
        self._name, self._makers = name, makers
        self.on_msg(lambda _, message, __: self.send({**self.file(message["kind"]), "view": message.get("view")}))

    def file(self, kind: str) -> dict[str, Any]:
        """Return the message that the browser makes a file of."""
        try:
            return {"kind": kind, "name": f"{self._name}.{kind}", "content": self._makers[kind]()}
        except Exception as error:
            return {"kind": kind, "problem": describe_error(error)}
