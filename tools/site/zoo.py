"""The table of the zoo: `experiments/zoo/*.yaml`, with the newest record of each entry where there is one."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from workbench.display import Table

KINDS = {
    "attention": "Attention",
    "format": "Cache formats",
    "eviction": "Eviction",
    "sampling": "Sampling",
    "draft": "Drafts for speculation",
    "schedule": "Scheduling",
}
EMPTY = "There is no entry in `experiments/zoo/` yet."
OUTCOMES = ("holds", "holds-with-limits", "refuted", "not-testable-here")


def entries(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return (name, settings) of every entry of a folder, by name. A folder that is absent is an empty one."""
    return [(path.stem, yaml.safe_load(path.read_text(encoding="utf-8"))) for path in sorted(folder.glob("*.yaml"))]


def records(folder: Path, name: str) -> Iterator[dict[str, Any]]:
    """Yield the records of an entry, the newest first."""
    for path in sorted(folder.glob(f"records/{name}-[0-9]*.json"), reverse=True):
        yield json.loads(path.read_text(encoding="utf-8"))


def found_in(value: Any, name: str) -> Any:
    """Return the first value called `name` in a record, whatever it lies in; None where there is none."""
    if isinstance(value, Mapping):
        if name in value:
            return value[name]
        value = value.values()
    elif not isinstance(value, list):
        return None
    return next((found for each in value if (found := found_in(each, name)) is not None), None)


def source_of(folder: Path, name: str) -> tuple[str, int]:
    """Return an entry's docstring, and the lines of its file without it."""
    path = folder / f"{name}.py"
    if not path.is_file():
        return "", 0
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    doc = (ast.get_docstring(tree, clean=False) or "").strip()  # equations keep their indentation
    lines = text.splitlines()[tree.body[0].end_lineno if doc else 0 :]
    return doc, len("\n".join(lines).strip().splitlines())


def zoo_table(root: Path) -> str:
    """Return one table of all entries: name, kind, paper, lines, bytes, speed, KL, outcome."""
    folder = root / "experiments" / "zoo"
    rows = []
    for name, entry in sorted(entries(folder), key=lambda each: (list(KINDS).index(each[1]["kind"]), each[0])):
        record = next(records(folder, name), {})
        figures = found_in(record, "figures") or {}
        _, lines = source_of(folder, name)
        shown = [_number(figures.get(key)) for key in ("bytes_ratio", "decode_time_ratio", "kl")]
        shown[1] = shown[1] or _number(figures.get("time_ratio"))
        link = f"[{entry['technique']}](#{_anchor(entry['technique'])})"
        rows.append((link, entry["kind"], lines, *shown, outcome(record)))
    if not rows:
        return EMPTY
    headings = ("technique", "kind", "lines", "bytes", "time", "KL", "here")
    return f"{len(rows)} entries.\n\n{Table('', rows, headings).markdown()}"


def zoo_sections(root: Path) -> str:
    """Return a section for each entry, by kind: docstring, the line that turns it on, claim, rule, what held."""
    folder, text = root / "experiments" / "zoo", []
    for kind, heading in KINDS.items():
        mine = [(name, entry) for name, entry in entries(folder) if entry["kind"] == kind]
        if mine:
            text.append(f"## {heading}\n")
        for name, entry in mine:
            doc, _ = source_of(folder, name)
            use = yaml.safe_dump(entry["use"], default_flow_style=True, width=10_000, sort_keys=False).strip()
            record = next(records(folder, name), {})
            text.append(
                f"### {entry['technique']}\n\n{entry['paper']}\n\n{_paragraphs(doc)}\n\n"
                f"Turn it on: `{use}` (`experiments/zoo/{name}.py`).\n\n"
                f"- **The paper claims:** {entry['claim']}\n- **It holds here if:** `{entry['rule']}`\n"
                f"- **Here:** {outcome(record)}. {entry.get('held') or ''}\n"
            )
            if figures := found_in(record, "figures"):
                shown = [(f"`{key}`", _number(value)) for key, value in figures.items() if _number(value)]
                text.append(Table("", shown, ("figure", "measured")).markdown())
    return "\n".join(text)


def outcome(record: Mapping[str, Any]) -> str:
    """Return a record's outcome in words; that it has not been run where there is no record."""
    found = found_in(record, "outcome")
    return str(found).replace("-", " ") if found in OUTCOMES else "not run yet"


def _number(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, int | float) and not isinstance(value, bool) else ""


def _anchor(heading: str) -> str:
    kept = "".join(c for c in heading.lower() if c.isalnum() or c in " -_")
    return kept.strip().replace(" ", "-")


def _paragraphs(doc: str) -> str:
    """Return a docstring as Markdown: its prose as it is, indented blocks (equations) fenced."""
    parts = []
    for part in doc.split("\n\n"):
        indented = all(line.startswith("  ") for line in part.splitlines())
        parts.append(f"```text\n{part}\n```" if indented and part else part)
    return "\n\n".join(parts)
