"""Make the page of the zoo: every entry of `experiments/zoo/` with its docstring, its rule and its measurements."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

from workbench.claims.comparison import FIGURES, KINDS
from workbench.claims.zoo import Zoo, ZooItem, open_zoo
from workbench.display import Table

HEADINGS = {
    "attention": "Attention",
    "format": "Cache formats",
    "eviction": "Eviction",
    "sampling": "Sampling",
    "draft": "Drafts for speculation",
    "program": "Programs",
    "schedule": "Scheduling",
    "workload": "Workloads",
}
EMPTY = "There is no entry in `experiments/zoo/` yet."
CODE = ("rule", "use", "instead of", "try")  # lines that are code


def opened(root: Path) -> Zoo:
    """Return the zoo of a checkout; without entries if the folder has none."""
    folder = root / "experiments" / "zoo"
    return open_zoo(folder) if any(folder.glob("*.yaml")) else Zoo([])


def zoo_table(root: Path) -> str:
    """Return one table of all entries, each with a link to its section."""
    zoo = opened(root)
    if not len(zoo):
        return EMPTY
    rows = []
    for item in zoo:
        kind, _, technique, paper, lines, laws, *figures, verdict = item.cells()
        rows.append((f"[{technique}](#{anchor(str(technique))})", kind, paper, lines, laws, *figures, verdict))
    headings = ("technique", "kind", "paper", "lines", "laws", "bytes", "speed", "KL", "verdict")
    return f"{zoo.counts}.\n\n{Table('', rows, headings).markdown()}"


def zoo_figures(root: Path) -> str:
    """Return a table of the figures that rules may use. Kinds with the same figures share their rows."""
    kinds: dict[str, tuple[dict[str, str], list[str]]] = {}
    for kind in KINDS:
        kinds.setdefault(str(FIGURES[kind]), (FIGURES[kind], []))[1].append(kind)
    rows = [
        (", ".join(named), f"`{name}`", says) for figures, named in kinds.values() for name, says in figures.items()
    ]
    return Table("", rows, ("kind", "figure", "what it says")).markdown()


def zoo_sections(root: Path) -> str:
    """Return a section for each entry, by kind."""
    zoo = opened(root)
    text = []
    for kind in KINDS:
        items = list(zoo.of_kind(kind))
        text += [f"## {HEADINGS[kind]}\n"] * bool(items) + ["\n".join(_section(item)) for item in items]
    return "\n".join(text)


def _section(item: ZooItem) -> Iterator[str]:
    yield f"### {item.settings.technique}\n\n{paragraphs(item.entry.docstring)}\n"
    lines = [
        (name, f"`{text}`" if name in CODE and not text.startswith("the ") else text) for name, text in item.lines()
    ]
    yield Table("", lines, ("about", item.name)).markdown()
    figures = [(f"`{name}`", value, says) for name, value, says in item.figure_rows() if value is not None]
    if figures:
        yield Table("", figures, ("figure", "here", "what it says")).markdown()


def anchor(heading: str) -> str:
    """Return the anchor that MyST gives to a heading."""
    kept = "".join(c for c in heading.lower() if c.isalnum() or c in " -_")
    return kept.strip().replace(" ", "-")


def paragraphs(doc: str) -> str:
    """Return a docstring as Markdown: prose unchanged, indented blocks (equations) as fenced blocks."""
    parts: list[str] = []
    for part in doc.split("\n\n"):
        indented = all(line.startswith("  ") or not line for line in part.splitlines())
        parts.append(f"```text\n{dedent(part)}\n```" if indented and part.strip() else part)
    return "\n\n".join(parts)
