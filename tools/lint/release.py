"""Check that every file states the same version, and that CITATION.cff has all required fields."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import yaml

import workbench
from tools.lint.tree import ROOT

NEWEST = re.compile(r"^## (\d+\.\d+\.\d+) \((\d{4}-\d\d-\d\d)\)$", re.M)
NAMES = {"name", "family-names", "given-names", "orcid"}  # of an author


def faults(root: Path = ROOT) -> Iterator[str]:
    """Yield files that state another version than the package, and fields that CITATION.cff lacks."""
    version = workbench.__version__
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        yield f"workbench/__init__.py:1: version {version!r}; three numbers"
    citation = yaml.safe_load(_text(root, "CITATION.cff")) or {}
    newest = NEWEST.search(_text(root, "CHANGELOG.md"))
    if newest is None or newest[1] != version:
        yield f"CHANGELOG.md:1: the newest section is {newest and newest[0]!r}; `## {version} (YYYY-MM-DD)`"
    elif date.fromisoformat(newest[2]) != citation.get("date-released"):
        yield f"CITATION.cff:1: date-released is not {newest[2]}, the changelog's; write that"
    wanted = {"version": version, "cff-version": "1.2.0", "type": "software", "license": "MIT"}
    for key, value in wanted.items():
        if citation.get(key) != value:
            yield f"CITATION.cff:1: {key} is {citation.get(key)!r}; {value!r}"
    for key in {"message", "title", "authors"} - citation.keys():
        yield f"CITATION.cff:1: no {key}; the format wants one"
    authors = citation.get("authors") or [{}]
    if not all(set(author) <= NAMES for author in authors) or authors[0].get("name", "?") not in _text(root, "LICENSE"):
        yield f"CITATION.cff:1: authors {authors}; those of LICENSE, by {', '.join(sorted(NAMES))}"
    if version in _text(root, "pyproject.toml"):
        yield "pyproject.toml:1: holds the version; it is read from workbench/__init__.py"


def _text(root: Path, name: str) -> str:
    return (root / name).read_text(encoding="utf-8") if (root / name).exists() else ""
