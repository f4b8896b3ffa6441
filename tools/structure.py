"""Measure the shape of the source: files, lines, import circles, duplicated class names, private words, a step's files.

    .venv/bin/python -m tools.structure             # a table
    .venv/bin/python -m tools.structure --json

tests/test_structure.py holds the library to what these functions find.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("workbench", "compiled_kernels")
SMALL = 40  # lines; a smaller file that is not a package's front needs a reason
LARGE = 350  # lines; about what one concept takes

# Words that this project once used for the field's, each with what replaced it (shared glossary). An identifier is cut
# into words at underscores and capitals; a phrase holds for docstrings and comments too.
PRIVATE_WORDS = {
    "lane": "backend",
    "told": "emitted, reported",
    "nobody": "no request, no caller",
    "somebody": "a request, a caller",
    "whoever": "the request that",
    "wishes": "SchedulerDecision",
    "lawful": "validate_decision",
    "granting": "allocate",
    "unshare": "copy_on_write",
    "heirs": "children",
    "mates": "SequenceGroup",
    "spared": "starvation_limit",
    "holdings": "KVCacheManager",
    "foretold": "predicted",
    "surroundings": "environment",
    "teller": "event adapter",
    "chooser": "Sampler",
    "pulse": "throttle",
}
PRIVATE_PHRASES = {
    r"set[- ]backs?\b": "preempt",
    r"\bin (?:any|varying) company\b": "in any batch composition",
    r"\bkept promises?\b": "SLO attainment",
}
RELATIVE = re.compile(r"(?:What|Which|Who|Whose|Whom|Whether|How|Why|Where|When|That)\b")


def modules(root: Path = ROOT) -> dict[str, Path]:
    """Return the library's files by module name."""
    found = {}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(files: dict[str, Path]) -> dict[str, set[str]]:
    """Return the modules that each module imports: at its top, inside functions, and for type checkers."""
    graph: dict[str, set[str]] = {name: set() for name in files}
    for name, path in files.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    graph[name].add(inner if inner in files else node.module)
            elif isinstance(node, ast.Import):
                graph[name].update(alias.name for alias in node.names)
        graph[name] = {each for each in graph[name] if each in files and each != name}
    return graph


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


def duplicated_classes(files: dict[str, Path]) -> dict[str, list[str]]:
    """Return public class names that occur more than once, with their modules."""
    where: dict[str, list[str]] = defaultdict(list)
    for name, path in files.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where[node.name].append(name)
    return {name: places for name, places in sorted(where.items()) if len(places) > 1}


def private_words(text: str) -> list[tuple[int, str, str]]:
    """Return (line, word, its replacement) for each private word in a source text."""
    found = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME:
            parts = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", token.string)
            hits = [part.lower() for part in parts if part.lower() in PRIVATE_WORDS]
            hits += ["set_back"] if re.search(r"set_?backs?(?![a-z])", token.string, re.IGNORECASE) else []
            found += [(token.start[0], hit, PRIVATE_WORDS.get(hit, "preempt")) for hit in hits]
        elif token.type in (tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", -1)):
            words = ((rf"\b{word}\b", better) for word, better in PRIVATE_WORDS.items())
            for pattern, replacement in [*words, *PRIVATE_PHRASES.items()]:
                for match in re.finditer(pattern, token.string, re.IGNORECASE):
                    line = token.start[0] + token.string[: match.start()].count("\n")
                    found.append((line, match[0], replacement))
    return sorted(found)


def relative_docstrings(text: str) -> list[tuple[int, str]]:
    """Return (line, first words) of docstrings that open with a relative clause."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            doc = ast.get_docstring(node)
            if doc and RELATIVE.match(doc):
                found.append((getattr(node, "lineno", 1), " ".join(doc.split()[:6])))
    return found


def files_of_a_step() -> set[str]:
    """Return the library's files that one decode step of the demo model runs through (eager backend, second step)."""
    import workbench

    runner = workbench.load("demo", backend="eager")
    events = runner.stream("def fib(n):", max_tokens=4)
    first = next(events)
    seen: set[str] = set()

    def trace(frame, event, argument):
        name = frame.f_code.co_filename
        if name.startswith(tuple(f"{ROOT / package}" for package in PACKAGES)):
            seen.add(str(Path(name).relative_to(ROOT)))
        return None

    while first.kind != "decoded":
        first = next(events)
    sys.settrace(trace)
    try:
        next(event for event in events if event.kind == "decoded")
    finally:
        sys.settrace(None)
    return seen


def measured() -> dict[str, int]:
    """Return the figures of the table, by name."""
    files = modules()
    texts = {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    lines = {name: len(text.splitlines()) for name, text in texts.items()}
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
        "private words": sum(len(private_words(text)) for text in texts.values()),
        "docstrings that open with a relative clause": sum(len(relative_docstrings(text)) for text in texts.values()),
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
