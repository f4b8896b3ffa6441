"""Measure the shape of the source: files, lines, import circles, duplicated class names, a step's files.

    .venv/bin/python -m tools.structure             # a table
    .venv/bin/python -m tools.structure --json

tests/test_structure.py holds the library to what these functions find.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("workbench", "compiled_kernels")
SMALL = 40  # lines; a smaller file that is not a package's front needs a reason
LARGE = 350  # lines; about what one concept takes
HOT = ("EngineCore", "RequestTracker", "Runner")  # of the engine: entered in every step


def modules(root: Path = ROOT, packages: Iterable[str] = PACKAGES) -> dict[str, Path]:
    """Return the library's files by module name, or those of other packages."""
    found = {}
    for package in packages:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


class Names(NamedTuple):
    """Hold what a file imports (at its top, inside functions, for type checkers), and the names that it defines."""

    imports: list[ast.Import | ast.ImportFrom]
    classes: list[str]
    defined: set[str]


@cache
def names_of(path: Path) -> Names:
    """Return the names of a file, which is parsed once."""
    found = Names([], [], set())
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.imports.append(node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.defined.add(node.name)
            found.classes.extend([node.name] * isinstance(node, ast.ClassDef))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.defined.add(node.id)
    return found


def imports(files: dict[str, Path]) -> dict[str, set[str]]:
    """Return the modules that each module imports."""
    graph: dict[str, set[str]] = {name: set() for name in files}
    for name, path in files.items():
        for node in names_of(path).imports:
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    graph[name].add(inner if inner in files else node.module)
            elif isinstance(node, ast.Import):
                graph[name].update(alias.name for alias in node.names)
        graph[name] = {each for each in graph[name] if each in files and each != name}
    return graph


def imported_names(path: Path) -> set[str]:
    """Return the dotted names that a file imports from anywhere, with what is taken from a module."""
    found: set[str] = set()
    for node in names_of(path).imports:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that import one another, directly or through others (Tarjan, 1972)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []
    for start in graph:
        if start in order:
            continue
        work: list[tuple[str, Iterator[str]]] = [(start, iter(sorted(graph[start])))]
        order[start] = low[start] = len(order)
        stack.append(start)
        while work:
            node, following = work[-1]
            for target in following:
                if target not in order:
                    order[target] = low[target] = len(order)
                    stack.append(target)
                    work.append((target, iter(sorted(graph[target]))))
                    break
                if target in stack:
                    low[node] = min(low[node], order[target])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == order[node]:
                    group = []
                    while True:
                        group.append(stack.pop())
                        if group[-1] == node:
                            break
                    if len(group) > 1:
                        found.append(sorted(group))
    return sorted(found)


def imports_from_elsewhere(files: dict[str, Path]) -> list[str]:
    """Return imports of a name from a file that only imports it itself; a package's front may."""
    return [
        f"{name}:{node.lineno}: {node.module} has {alias.name} from elsewhere"
        for name, path in files.items()
        for node in names_of(path).imports
        if isinstance(node, ast.ImportFrom) and node.module in files and files[node.module].name != "__init__.py"
        for alias in node.names
        if alias.name not in names_of(files[node.module]).defined and f"{node.module}.{alias.name}" not in files
    ]


def declared_fields(files: dict[str, Path]) -> dict[tuple[str, str, str], set[str]]:
    """Return the classes that declare a field of each name, type and default; limits of numbers are no types."""
    where: dict[tuple[str, str, str], set[str]] = defaultdict(set)
    for path in files.values():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for field in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(node, ast.ClassDef) and isinstance(field, ast.AnnAssign) and field.value is not None:
                    kind = re.sub(r"Annotated\[(\w+), [^]]*\]", r"\1", ast.unparse(field.annotation))
                    kind = re.sub(r"\b(Count|Seed|NonNegative)\b", "int", kind)
                    where[ast.unparse(field.target), kind, ast.unparse(field.value)].add(node.name)
    return where


def duplicated_classes(files: dict[str, Path]) -> dict[str, list[str]]:
    """Return public class names that occur more than once, with their modules."""
    where: dict[str, list[str]] = defaultdict(list)
    for name, path in files.items():
        for each in names_of(path).classes:
            if not each.startswith("_"):
                where[each].append(name)
    return {name: places for name, places in sorted(where.items()) if len(places) > 1}


class Class(NamedTuple):
    """Hold the names of a class's own methods and of its bases."""

    methods: set[str]
    bases: list[str]


def methods_of_classes(files: dict[str, Path]) -> dict[str, int]:
    """Return the number of each class's methods: its own, those inherited from ours, and of the engine's hot classes
    the functions that take one first."""
    classes: dict[str, Class] = {}
    functions: dict[str, set[str]] = defaultdict(set)
    for module, path in files.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                own = {each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
                classes[node.name] = Class(own, [ast.unparse(base) for base in node.bases])
        for node in tree.body:
            if not isinstance(node, ast.FunctionDef):
                continue
            first = node.args.args[:1]
            if first and first[0].annotation is not None:
                functions[ast.unparse(first[0].annotation)].add(f"{module}.{node.name}")

    def methods(name: str) -> set[str]:
        one = classes.get(name, Class(set(), []))
        return one.methods.union(*map(methods, one.bases))

    return {name: len(methods(name)) + (len(functions[name]) if name in HOT else 0) for name in classes}


def entered(run: Callable[[], object]) -> dict[str, str]:
    """Return the library's files that a call runs through, in the order in which they are entered, and the first
    function of each."""
    found: dict[str, str] = {}

    def trace(frame, event, argument):
        name = frame.f_code.co_filename
        if name.startswith(tuple(f"{ROOT / package}" for package in PACKAGES)):
            found.setdefault(str(Path(name).relative_to(ROOT)), frame.f_code.co_qualname)

    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(None)
    return found


def files_of_a_step() -> dict[str, str]:
    """Return the library's files that one decode step of the demo model runs through (eager backend, second step)."""
    import workbench

    runner = workbench.load("demo", backend="eager")
    events = runner.stream("def fib(n):", max_tokens=4)
    next(event for event in events if event.kind == "decoded")
    return entered(lambda: next(event for event in events if event.kind == "decoded"))


def measured() -> dict[str, int]:
    """Return the figures of the table, by name."""
    files = modules()
    lines = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in files.items()}
    groups = circles(imports(files))
    return {
        "files": len(files),
        "lines": sum(lines.values()),
        "files under 40 lines": sum(
            count < SMALL and files[name].name != "__init__.py" for name, count in lines.items()
        ),
        "files over 350 lines": sum(count > LARGE for count in lines.values()),
        "import circles": len(groups),
        "files in the largest circle": max(map(len, groups), default=0),
        "duplicated class names": len(duplicated_classes(files)),
        "files in a decode step": len(files_of_a_step()),
    }


def listed(items: Iterable[str]) -> str:
    """Return items as lines of a message."""
    return "\n".join(items)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    figures = measured()
    print(json.dumps(figures) if as_json else listed(f"{value:>8,}  {name}" for name, value in figures.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
