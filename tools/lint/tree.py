"""Read every text of the checkout once, for all guards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
READ = ("workbench", "compiled_kernels", "tests", "experiments", "tools", "benchmarks", "notebooks", "docs")
READ_KINDS = (".py", ".md", ".ipynb")


@cache
def texts(root: Path = ROOT) -> dict[str, str]:
    """Return every text that people read, by path: code, Markdown, and the cells' sources of notebooks."""
    paths = [*root.glob("*.md"), *(path for folder in READ for path in (root / folder).rglob("*"))]
    found = {}
    for path in sorted(each for each in paths if each.suffix in READ_KINDS):
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".ipynb":
            text = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
        found[path.relative_to(root).as_posix()] = text
    return found


def python(root: Path, folder: str) -> Iterator[tuple[str, str]]:
    """Yield (path, text) of the Python files below a folder."""
    yield from (
        (path, text) for path, text in texts(root).items() if path.startswith(f"{folder}/") and path.endswith(".py")
    )


def pages(root: Path) -> dict[str, str]:
    """Return README and the hand-written pages of docs/, by path."""
    return {
        path: text
        for path, text in texts(root).items()
        if path == "README.md" or path.startswith("docs/") and path.endswith(".md")
    }


def line_of(text: str, words: str) -> int:
    """Return the number of the line on which `words` first occur in `text`; 1 if they do not occur."""
    return text.count("\n", 0, max(text.find(words), 0)) + 1
