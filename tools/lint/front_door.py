"""Check that public functions have annotations and an example, and that notebooks import public names only."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import workbench
from tools.lint.tree import ROOT, python

MODULES = ("demo_tools", "testing", "widgets")
OURS = ("workbench", "compiled_kernels", "experiments", "tools")
ALLOWED = ("workbench", "workbench.widgets", "experiments.real_examples")  # whose findings notebook 14 shows
OWNERS = ("Live", "RunnerThread")  # of a runner: the front door makes them


def faults(root: Path = ROOT) -> Iterator[str]:
    """Yield public functions without annotations or an example, and notebooks that import names that are not public."""
    for name in workbench.__all__:
        if name[0].islower() and name not in MODULES:
            yield from (f"workbench/__init__.py:1: {fault}" for fault in undocumented(name, getattr(workbench, name)))
    for path, text in python(root, "notebooks"):
        yield from (f"{path}:{line}: {name}; import `workbench` and its public names" for line, name in by_hand(text))


def undocumented(name: str, function: Any) -> Iterator[str]:
    """Yield what a public function lacks: annotations, or an example in its docstring."""
    signature = inspect.signature(function)
    annotations = [each.annotation for each in signature.parameters.values()]
    if signature.empty in (*annotations, signature.return_annotation):
        yield f"workbench.{name}: no annotation of a parameter or of what it returns; annotate it"
    if f"workbench.{name}(" not in (inspect.getdoc(function) or ""):
        yield f"workbench.{name}: no example in its docstring; show a call"


def by_hand(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of imports of this project's inner modules, and of attributes that reach into a runner."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Import(aliases):
                names = [alias.name for alias in aliases]
            case ast.ImportFrom(str(module)):
                names = [module]
            case ast.Attribute(attr=name) if name in OWNERS:
                names = [f"workbench...{name}"]
            case _:
                continue
        for name in names:
            if name.split(".")[0] in OURS and name not in ALLOWED:
                yield node.lineno, name
