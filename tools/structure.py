"""Read the structure of the source: modules, imports and import circles, duplicated class names, and the files that a
run enters.

tests/test_structure.py checks the library by what these functions return.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("workbench", "compiled_kernels")
HOT = ("EngineCore", "RequestTracker", "Runner")  # of the engine: entered in every step


def modules(root: Path = ROOT, packages: Iterable[str] = PACKAGES) -> dict[str, Path]:
    """Return the files of the library's packages (or of `packages`) by module name."""
    found = {}
    for package in packages:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


class Names(NamedTuple):
    """The imports of a file (at its top, inside functions, for type checkers), its class names, and all names that it
    defines."""

    imports: list[ast.Import | ast.ImportFrom]
    classes: list[str]
    defined: set[str]


@cache
def names_of(path: Path) -> Names:
    """Return the imports and names of a file, which is parsed only once."""
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
    """Return the dotted names that a file imports, including each name that is taken from a module."""
    found: set[str] = set()
    for node in names_of(path).imports:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that import one another, directly or through other modules (Tarjan, 1972)."""
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
    """Return the imports of a name from a file that does not define it but only imports it; imports from a package's
    `__init__.py` are allowed."""
    return [
        f"{name}:{node.lineno}: {node.module} has {alias.name} from elsewhere"
        for name, path in files.items()
        for node in names_of(path).imports
        if isinstance(node, ast.ImportFrom) and node.module in files and files[node.module].name != "__init__.py"
        for alias in node.names
        if alias.name not in names_of(files[node.module]).defined and f"{node.module}.{alias.name}" not in files
    ]


def declared_fields(files: dict[str, Path]) -> dict[tuple[str, str, str], set[str]]:
    """Return the classes that declare a field, by the field's name, type and default; types that differ only in numeric
    limits count as equal."""
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
    """Return the public class names that occur more than once, with the modules that define them."""
    where: dict[str, list[str]] = defaultdict(list)
    for name, path in files.items():
        for each in names_of(path).classes:
            if not each.startswith("_"):
                where[each].append(name)
    return {name: places for name, places in sorted(where.items()) if len(places) > 1}


class Class(NamedTuple):
    """The names of a class's own methods, and the names of its base classes."""

    methods: set[str]
    bases: list[str]


def methods_of_classes(files: dict[str, Path]) -> dict[str, int]:
    """Return the number of methods of each class: its own and those inherited within the library. For the engine's hot
    classes, functions that take an instance as first argument count too."""
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
    """Return the library's files that a call enters, in order, each with the first function entered in it."""
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
