"""Blocks of pages that are made when the site is built, by the name that a page calls them by."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path

from tools.reference import package_text
from tools.site.events import events_table
from tools.site.records import figures_table, machines_table, peers_tables, verdicts_table
from tools.site.rooms import room_sections, rooms_overview
from tools.site.zoo import zoo_sections, zoo_table


def _public(package: str) -> Callable[[Path], str]:
    """Return a block with the public names of a package; empty where this checkout has no such package."""

    def text(root: Path) -> str:
        if importlib.util.find_spec(package) is None:
            return ""
        module = importlib.import_module(package)
        return package_text(module, getattr(module, "__all__", None))

    return text


# The order of guides in the side bar; one that is not named here comes after them.
GUIDES = (
    "python", "jupyter", "load_a_model", "conversations", "agents", "structured_output", "experiments", "attention",
    "cache_formats", "eviction", "samplers", "speculation", "scheduling", "backends", "traces", "serving", "fleets",
    "apart", "tensor_parallel",
)  # fmt: skip


def guides(root: Path) -> str:
    """Return a table of README's tasks with their guides, guides that it does not name yet, and a table of contents."""
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
    "events": events_table,
    "figures": figures_table,
    "guides": guides,
    "machines": machines_table,
    "parts": _public("workbench.parts"),
    "peers": peers_tables,
    "room_sections": room_sections,
    "rooms": rooms_overview,
    "testing": _public("workbench.testing"),
    "verdicts": verdicts_table,
    "zoo": zoo_table,
    "zoo_sections": zoo_sections,
}
