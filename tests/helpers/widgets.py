"""What tests of widgets look at: controls by their names, and a picture's words and elements."""

from __future__ import annotations

import html
import io
import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

from workbench.cli import main

SVG = "{http://www.w3.org/2000/svg}"


def inside(widget: Any) -> Iterator[Any]:
    """Yield what stands in a box, at any depth."""
    for child in getattr(widget, "children", ()):
        yield child
        yield from inside(child)


def controls(widget: Any) -> dict[str, Any]:
    """Return the controls of a view by what stands beside them."""
    return {each.description: each for each in inside(widget) if getattr(each, "description", "")}


def words(picture: str, between: str = " ") -> str:
    """Return the text of a picture, without markup and style; with one space wherever there was some, or as it is."""
    plain = html.unescape(re.sub(r"<style>.*?</style>|<[^>]*>", between, picture, flags=re.S))
    return " ".join(plain.replace("\xa0", " ").split()) if between else plain


def root_of(picture: str) -> ET.Element:
    """Parse a picture as XML: nothing of it is left to a browser's guess."""
    return ET.fromstring(picture.replace("<br>", "<br/>").replace("&nbsp;", " "))


def marks(picture: str, attribute: str = "data-key") -> list[dict[str, str]]:
    """Return the attributes of each element that has this one."""
    return [each.attrib for each in root_of(picture).iter() if attribute in each.attrib]


def notebook(cells: tuple[str, ...]) -> str:
    """Return the .ipynb of these code cells, none of which has run."""
    made = [
        {"cell_type": "code", "id": f"c{n}", "metadata": {}, "execution_count": None, "outputs": [], "source": source}
        for n, source in enumerate(cells)
    ]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": kernel, "cells": made})


class CommandInProcess:
    """Stands for `CommandProcess` where a test asks what comes of a command: `wait` runs it in this process."""

    def __init__(self, arguments: Sequence[str], on_change: Callable[[], None]):
        self.progress_lines: list[str] = []
        self.returncode: int | None = None
        self.stdout, self._arguments, self._news = "", list(arguments), on_change

    def stop(self) -> None:
        self.returncode = -2
        self._news()

    def wait(self) -> int:
        if self.returncode is None:
            out, err = io.StringIO(), io.StringIO()
            with redirect_stdout(out), redirect_stderr(err):
                code = main(self._arguments)
            self.stdout, self.progress_lines, self.returncode = out.getvalue(), err.getvalue().splitlines(), code
            self._news()
        return self.returncode
