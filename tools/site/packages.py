"""Draw each package of the code from its imports: a picture with arcs from each file down to what it imports."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from html import escape
from pathlib import Path

from tools.structure import imports, modules

ROW = 44  # pixels of a row: the style sheet has the same
MIN_REACH, MAX_REACH = 14, 112  # pixels to the left: of an arc to the next row, of the longest arc of many rows
# The front doors: they import, or are begun from, everything.
LEFT_OUT = ("workbench", "workbench.__main__")
Graph = Mapping[str, Iterable[str]]


@dataclass
class Package:
    """A package: its files and inner packages, importers first, and the packages above and below it."""

    name: str  # workbench/kv_cache; `workbench` is the package of the top level's own files
    summary: str = ""
    nodes: list[str] = field(default_factory=list)  # `manager.py`, `apart/`
    summaries: dict[str, str] = field(default_factory=dict)
    edges: dict[str, set[str]] = field(default_factory=dict)
    below: list[str] = field(default_factory=list)
    above: list[str] = field(default_factory=list)
    inner: list[Package] = field(default_factory=list)  # packages in the package


def package_of(module: str) -> str:
    """Return the package of a module: the folder below `workbench` that contains it, or `compiled_kernels`."""
    top, *rest = module.split(".")
    return f"{top}/{rest[0]}" if top == "workbench" and len(rest) > 1 else top


@lru_cache(maxsize=1)
def read_packages(root: Path) -> list[Package]:
    """Return every package of the checkout, each before the packages that it imports."""
    files = {name: path for name, path in modules(root).items() if name not in LEFT_OUT}
    by_module = {name: Package(name.replace(".", "/")) for name in files if files[name].name == "__init__.py"}
    by_module["workbench"] = Package("workbench")
    for name, path in files.items():
        owner, _, last = name.rpartition(".")
        sentence = first_sentence(path)
        if name in by_module:
            by_module[name].summary = sentence
        if owner in by_module and not (owner == "workbench" and name in by_module):
            node = f"{last}/" if name in by_module else f"{last}.py"
            by_module[owner].summaries[node] = sentence
            by_module[owner].edges[node] = set()
    outer: dict[str, set[str]] = {}
    for name, imported in imports(files).items():
        home = package_of(name) if name not in by_module else package_of(f"{name}.x")
        below = outer.setdefault(home, set())
        for other in imported:
            there = package_of(other) if other not in by_module else package_of(f"{other}.x")
            below |= {there} - {home}
            _add_edge(name, other, by_module)
    for name, package in by_module.items():
        package.nodes = downwards(package.edges)
        owner = name.rpartition(".")[0]
        if owner in by_module and owner != "workbench" and package.nodes:
            by_module[owner].inner.append(package)
    packages = {package.name: package for name, package in by_module.items() if package.nodes and package.name in outer}
    for name, package in packages.items():
        package.below = sorted(outer[name] & set(packages))
        package.above = sorted(other for other in packages if name in outer[other])
    return [packages[name] for name in downwards({name: outer[name] for name in packages})]


def _add_edge(importer: str, imported: str, by_module: Mapping[str, Package]) -> None:
    """Add an edge to the innermost package that holds both modules, between those of its nodes that they lie in."""
    one, two = importer.split("."), imported.split(".")
    depth = next((n for n, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
    package = by_module.get(".".join(one[:depth]))
    if package is None or depth in (len(one), len(two)):  # a package's front and what lies in it
        return
    nodes = [f"{parts[depth]}{'/' if '.'.join(parts[: depth + 1]) in by_module else '.py'}" for parts in (one, two)]
    if all(node in package.edges for node in nodes):
        package.edges[nodes[0]].add(nodes[1])


def first_sentence(path: Path) -> str:
    """Return the first sentence of a file's docstring."""
    words = " ".join((ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n\n")[0].split())
    words = words.replace("`", "")
    end = words.find(". ")
    return words if end < 0 else words[: end + 1]


def downwards(edges: Graph) -> list[str]:
    """Return the names in an order in which importers come before what they import, as near as possible; import circles
    are cut."""
    order: list[str] = []
    state: dict[str, int] = {}

    def visit(name: str) -> None:
        state[name] = 1
        for other in sorted(edges[name], reverse=True):
            if other not in state and other in edges:
                visit(other)
        order.append(name)

    reached = {other for name in edges for other in edges[name]}
    for name in sorted(edges, key=lambda name: (name in reached, name), reverse=True):
        if name not in state:
            visit(name)
    return order[::-1]


def direct(order: list[str], edges: Graph) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return the arcs of a picture as pairs of rows: downward arcs that no longer path implies, and all upward arcs."""
    row = {name: n for n, name in enumerate(order)}
    pairs = [(row[name], row[other]) for name in edges for other in edges[name] if other in row]
    down = {n: {b for a, b in pairs if a == n and b > a} for n in row.values()}
    below: dict[int, set[int]] = {}
    for n in sorted(down, reverse=True):
        below[n] = down[n].union(*(below[other] for other in down[n]))
    kept = [(n, o) for n, others in down.items() for o in others if not any(o in below[via] for via in others)]
    return sorted(kept), sorted(pair for pair in pairs if pair[1] < pair[0])


def picture(nodes: list[str], edges: Graph, summaries: Mapping[str, str], links: Mapping[str, str]) -> str:
    """Return one picture as HTML: a row for each node, and arcs on the left from importers down to what they import.

    Its colours are the page's, so it follows light and dark. `links` are addresses of nodes.
    """
    down, up = direct(nodes, edges)
    arcs = [*down, *up]
    longest = max((abs(b - a) for a, b in arcs), default=0)
    left, height = _reach(longest, longest) + 12, ROW * len(nodes)
    paths = []
    for a, b in sorted(arcs, key=lambda arc: -abs(arc[0] - arc[1])):
        reach, side = _reach(abs(b - a), longest), 4 if b > a else -4
        top, bottom = ROW * a + ROW / 2 + side, ROW * b + ROW / 2 - side
        x = left - reach * 4 / 3
        path = f"M{left:.0f},{top:g}C{x:.1f},{top:g} {x:.1f},{bottom:g} {left - 3:.0f},{bottom:g}"
        paths.append(f'<path class="f{a} t{b}{"" if b > a else " up"}" d="{path}" marker-end="url(#arc-head)"/>')
    title = f"imports among {len(nodes)} parts: " + "; ".join(f"{nodes[a]} imports {nodes[b]}" for a, b in arcs)
    svg = (
        f'<svg width="{left:.0f}" height="{height}" viewBox="0 0 {left:.0f} {height}" role="img" '
        f'aria-label="{escape(title)}">{"".join(paths)}</svg>'
    )
    rows = []
    for n, name in enumerate(nodes):
        shown = f"<code>{escape(name)}</code>"
        if name in links:
            shown = f'<a href="{escape(links[name])}">{shown}</a>'
        says = escape(summaries.get(name, ""))
        rows.append(f'<li class="n{n}" tabindex="0"><span>{shown}</span> <small title="{says}">{says}</small></li>')
    return f'<div class="arcs">{svg}<ol>{"".join(rows)}</ol></div>'


def _reach(rows: int, longest: int) -> float:
    """Return the pixels that an arc over `rows` rows reaches to the left: longer arcs lie around shorter ones."""
    widest = min(MAX_REACH, MIN_REACH * max(longest, 1) ** 0.75)
    return MIN_REACH + (widest - MIN_REACH) * ((rows - 1) / max(longest - 1, 1)) ** 0.8 if rows else 0


def hover_style(rows: int) -> str:
    """Return the style sheet that highlights the arcs of the row under the pointer: its own downward arcs, and the arcs
    that reach it."""
    lines = []
    for n in range(rows):
        here = f".arcs:has(.n{n}:is(:hover,:focus))"
        lines.append(f"{here} .f{n}{{stroke:var(--arc-down);opacity:1}}{here} .t{n}{{stroke:var(--arc-up);opacity:1}}")
    return "\n".join(lines)


def anchor(package: str) -> str:
    """Return the anchor that MyST gives to the heading of a package's section."""
    return package.replace("/", "").lower()


def packages_overview(root: Path) -> str:
    """Return the picture of all packages, as HTML."""
    packages = read_packages(root)
    edges = {package.name: set(package.below) for package in packages}
    links = {package.name: f"#{anchor(package.name)}" for package in packages}
    summaries = {package.name: package.summary for package in packages}
    return picture(list(summaries), edges, summaries, links)


def package_sections(root: Path) -> str:
    """Return a section for each package: its picture, and links to the packages above and below it."""
    packages = read_packages(root)
    longest = max(map(len, [packages, *(package.nodes for package in packages)]))
    text = [f"<style>{hover_style(longest)}</style>\n{HEAD}\n"]
    known = {package.name for package in packages}
    for package in sorted(packages, key=lambda package: package.name):
        text.append(f"## {package.name}\n\n{package.summary}\n" if package.summary else f"## {package.name}\n")
        for words, others in (("Imports", package.below), ("Imported by", package.above)):
            listed = ", ".join(f"[{other}](#{anchor(other)})" for other in others if other in known)
            if listed:
                text.append(f"{words} {listed}.\n")
        text.append(picture(package.nodes, package.edges, package.summaries, {}) + "\n")
        text += [_folded(inner) for inner in package.inner]
    return "\n".join(text)


def _folded(package: Package) -> str:
    """Return the picture of an inner package, folded, with those inside of it."""
    inside = "".join(_folded(inner) for inner in package.inner).replace("\n", "")
    shown = picture(package.nodes, package.edges, package.summaries, {})
    return (
        f"<details><summary><code>{package.name}</code> {escape(package.summary)}</summary>{shown}{inside}</details>\n"
    )


HEAD = (
    '<svg width="0" height="0" style="position:absolute" aria-hidden="true"><defs>'
    '<marker id="arc-head" viewBox="0 0 6 6" '
    'refX="5" refY="3" markerWidth="5" markerHeight="5" orient="auto"><path d="M0,0L6,3L0,6z"/></marker></defs></svg>'
)
