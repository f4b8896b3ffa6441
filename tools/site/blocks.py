"""Make the blocks that pages ask for by name when the site is built."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from tools.site.events import events_table
from tools.site.packages import package_sections, packages_overview
from tools.site.records import figures_table, machines_table, peers_tables, verdicts_table
from tools.site.reference import backends_table, package_text, public_names, settings_sections
from tools.site.served_fields import served_fields_table
from tools.site.walk import request_walk
from tools.site.zoo import HEADINGS, zoo_figures, zoo_sections, zoo_table
from workbench import parts, testing


def kits(root: Path) -> str:
    """Return the reference of `workbench.testing`, as Markdown."""
    return package_text(testing, testing.__all__, level=3)


def building_blocks(root: Path) -> str:
    """Return the reference of `workbench.parts` by kind of part; a name that belongs to two kinds is described once."""
    text, written = "", set()
    for kind, names in parts.PARTS.items():
        new = sorted(set(names) - written)
        written.update(new)
        text += f"\n## For {HEADINGS.get(kind, kind).lower()}\n{package_text(parts, new, level=3)}"
    return text


# The order of guides in the side bar; one that is not named here comes after them.
GUIDES = (
    "python", "jupyter", "models", "load_a_model", "conversations", "agents", "structured_output", "experiments",
    "workloads", "claims", "attention", "cache_formats", "eviction", "samplers", "speculation", "scheduling",
    "backends", "traces", "serving", "fleets", "apart", "tensor_parallel",
)  # fmt: skip


def guides(root: Path) -> str:
    """Return a table of README's tasks with their guides, the guides that it does not name, and a table of contents."""
    folder = root / "docs" / "guide"
    names = {path.stem for path in folder.glob("*.md")} - {"index"}
    headings = {name: (folder / f"{name}.md").read_text(encoding="utf-8").partition("\n")[0] for name in names}
    rows = re.findall(r"^\| (.*?) \| \[docs/guide/(\w+)\.md\]", (root / "README.md").read_text(encoding="utf-8"), re.M)
    named = {name for _, name in rows}
    rows += [(headings[name].strip("# ").lower(), name) for name in sorted(names - named)]
    table = "\n".join(f"| {task} | [{headings[name].strip('# ')}]({name}.md) |" for task, name in rows)
    ordered = [name for name in GUIDES if name in names] + sorted(names.difference(GUIDES))
    contents = "```{toctree}\n:maxdepth: 1\n:hidden:\n\n" + "\n".join(ordered) + "\n```"
    return f"| you want to | read |\n|---|---|\n{table}\n\n{contents}"


BLOCKS: dict[str, Callable[[Path], str]] = {
    "backends": backends_table,
    "events": events_table,
    "figures": figures_table,
    "guides": guides,
    "machines": machines_table,
    "package_sections": package_sections,
    "packages": packages_overview,
    "parts": building_blocks,
    "peers": peers_tables,
    "python": public_names,
    "request_walk": request_walk,
    "served_fields": served_fields_table,
    "settings": settings_sections,
    "testing": kits,
    "verdicts": verdicts_table,
    "zoo": zoo_table,
    "zoo_figures": zoo_figures,
    "zoo_sections": zoo_sections,
}
