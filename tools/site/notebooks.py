"""Prepare the course's notebooks for the site with saved pictures as outputs: no cell is executed when the site is
built."""

from __future__ import annotations

import ast
import base64
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PICTURES = "pictures"


def read_course(folder: Path) -> dict[str, Any]:
    """Return every notebook of a folder by file name, with saved pictures as the outputs of their cells.

    `pictures/pagemap.png` is what the course's first cell that ends with a `PageMap` showed (`python -m
    tools.notebooks.check --pictures`). Later cells have none, but where there is one for their notebook
    (`pagemap-10_conversations.png`).
    """
    import jupytext
    from nbformat.v4 import new_output

    shown: set[str] = set()
    course = {}
    for path in sorted(folder.glob("*.py")):
        notebook = course[path.name] = jupytext.read(path)
        for cell in notebook.cells:
            widget = widget_shown(cell.source) if cell.cell_type == "code" else None
            if widget is None:
                continue
            name = widget.lower() + (f"-{path.stem}" if widget in shown else "")
            picture = folder / PICTURES / f"{name}.png"
            if name in shown or not picture.is_file():
                continue
            shown |= {widget, name}
            data = {"image/png": base64.b64encode(picture.read_bytes()).decode(), "text/plain": f"a {widget}"}
            cell.metadata["mystnb"] = {"image": {"alt": f"{widget}, as this cell shows it"}}
            cell.outputs = [new_output("display_data", data)]
    return course


def widget_shown(source: str) -> str | None:
    """Return the class name of the widget that a cell's last line shows, created there or earlier in the same cell;
    None if it shows none."""
    try:
        body = ast.parse(source).body
    except SyntaxError:
        return None
    if not body or not isinstance(body[-1], ast.Expr):
        return None
    last = body[-1].value
    if isinstance(last, ast.Name):
        for node in ast.walk(ast.Module(body, [])):
            if isinstance(node, ast.Assign) and last.id in (n for t in node.targets for n in _names(t)):
                return next(_widgets(node.value), None)
        return None
    return next(_widgets(last), None) if not _is_chained_away(last) else None


def _names(target: ast.expr) -> Iterator[str]:
    yield from (node.id for node in ast.walk(target) if isinstance(node, ast.Name))


def _widgets(node: ast.AST) -> Iterator[str]:
    for each in ast.walk(node):
        if isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute):
            owner = each.func.value
            if isinstance(owner, ast.Name) and owner.id == "widgets" and each.func.attr[0].isupper():
                yield each.func.attr


def _is_chained_away(node: ast.expr) -> bool:
    """Return True for `widgets.X(...).figures` and the like: a value of a widget, not the widget."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if isinstance(node.func.value, ast.Name):
            return False
        if node.func.attr != "wait":
            return True
        node = node.func.value
    return isinstance(node, ast.Attribute)


def as_notebook(notebook: Any, moved: Callable[[str], str]) -> str:
    """Return a notebook as JSON, with `moved` applied to the text of its Markdown cells."""
    import nbformat

    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
        if cell.metadata.get("jupyter", {}).get("source_hidden"):
            cell.metadata["tags"] = [*cell.metadata.get("tags", []), "hide-input"]  # how MyST folds a cell
        if cell.cell_type == "markdown":
            cell.source = moved(cell.source)
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return nbformat.writes(notebook)


def title(notebook: Any) -> str:
    """Return the title of a notebook: its first heading."""
    return next(m[1] for cell in notebook.cells if (m := re.match(r"# (.*)", cell.source)))
