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

READ = ("workbench", "compiled_kernels", "tests", "experiments", "tools", "benchmarks", "notebooks", "docs")
READ_KINDS = (".py", ".md", ".ipynb")

# Words that this project once used for the field's, each with what replaced it (shared glossary). Every text is cut
# into words at underscores and capitals: identifiers, docstrings, comments, messages, Markdown.
PRIVATE_WORDS = {
    "lane": "backend",
    "told": "emitted, reported",
    "nobody": "no request, no caller",
    "somebody": "a request, a caller",
    "anybody": "any caller, any process",
    "everybody": "every request, every caller",
    "whoever": "the request that",
    "wishes": "SchedulerDecision",
    "wished": "scheduled",
    "lawful": "validate_decision",
    "strays": "errors",
    "granting": "allocate",
    "unshare": "copy_on_write",
    "obstacle": "blocked_by",
    "seats": "slots_needed",
    "heir": "child",
    "heirs": "children",
    "mate": "beam",
    "mates": "beams, SequenceGroup",
    "follower": "child",
    "followers": "children",
    "leader": "parent",
    "spared": "starvation_limit",
    "overdue": "past the starvation limit",
    "holdings": "KVCacheManager",
    "rooms": "CPU pages: cpu_pools; code: packages",
    "company": "batch composition",
    "companion": "another request",
    "companions": "other requests",
    "coupled": "common random numbers",
    "foretold": "predicted",
    "crossings": "break-even points",
    "moods": "contention",
    "surroundings": "environment",
    "teller": "event adapter",
    "chooser": "Sampler",
    "knobs": "settings form",
    "pulse": "throttle",
}
# The same for names that are words of English, or mean something else in other cases: as they are written.
PRIVATE_PATTERNS = {
    r"(?i:set[-_ ]?backs?)(?![a-z])|SetBacks?": "preempt",
    r"\bServed\b": "Sequence",
    r"\bHeldBack\b": "DeferInterrupts",
    r"\blet_through\b": "allow",
    r"\bLookupDrafts\b": "PromptLookupProposer",
    r"\bRowsExecutor\b": "TokenParallelExecutor",
    r"\bCapturedExecutor\b": "CudaGraphExecutor",
    r"\bfitted_to\b": "select_backend",
    r"\bafter_sum\b": "add_and_norm",
    r"\bown_parts\b": "custom",
    r"\bturn_of\b": "apply_rotary",
    r"\bLatentAttention\b": "MLA",
    r"\b_?(?:FEW|MOST|ROOM|SPARE|DEAR|TOLD|HEARD)(?:_[A-Z]+)*\b": "a name with its unit: MAX_ROWS_PER_KERNEL",
    r"(?i:\bkept promises?\b)": "SLO attainment",
}
# Files that may hold such a word, with the words ("*": all).
EXCEPTIONS: dict[str, tuple[str, ...]] = {
    "experiments/LOG.md": ("*",),  # the log of past days is not rewritten
    "tools/structure.py": ("*",),  # the list itself
    "tests/test_structure.py": ("*",),  # plants them
    "tools/rename_record_keys.py": ("*",),  # rewrites records that held them
    "tests/test_rename_record_keys.py": ("*",),
    "tests/measure/test_intact.py": ("unshare",),  # a command of Linux
    "workbench/widgets/attention/view.py": ("follower",),  # follows a generation
    "compiled_kernels/triton_code/ahead_of_time.py": ("knobs",),  # Triton's module
}
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_PATTERN = re.compile("|".join(f"({pattern})" for pattern in PRIVATE_PATTERNS))
RELATIVE = re.compile(r"(?:What|Which|Who|Whose|Whom|Whether|How|Why|Where|When|That)\b")
_OPENS_RELATIVE = re.compile(rf"(?:\"\"\"|''')\s*{RELATIVE.pattern}")


def texts(root: Path = ROOT) -> dict[str, str]:
    """Return every text that people read, by its path: code, Markdown, and the sources of notebooks' cells."""
    paths = [*root.glob("*.md"), *(path for folder in READ for path in (root / folder).rglob("*"))]
    found = {}
    for path in sorted(each for each in paths if each.suffix in READ_KINDS):
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".ipynb":
            text = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
        found[path.relative_to(root).as_posix()] = text
    return found


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


def imports_from_elsewhere(files: dict[str, Path]) -> list[str]:
    """Return imports of a name from a file that only imports it itself; a package's front may."""
    trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in files.items()}
    defined = {name: set(_defined(tree)) for name, tree in trees.items()}
    return [
        f"{name}:{node.lineno}: {node.module} has {alias.name} from elsewhere"
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in files and files[node.module].name != "__init__.py"
        for alias in node.names
        if alias.name not in defined[node.module] and f"{node.module}.{alias.name}" not in files
    ]


def _defined(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def unexplained(text: str) -> list[int]:
    """Return the lines whose `type: ignore` or `noqa` says no reason behind it, in parentheses or after a `#`."""
    pattern = re.compile(r"#\s*(?:type: ignore|pyright: ignore|noqa)(?:\[[\w, -]+\]|: \w+)?\s*$")
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [each.start[0] for each in tokens if each.type == tokenize.COMMENT and pattern.search(each.string)]


def skips_without_reason(text: str) -> list[int]:
    """Return the lines of calls of skip, skipif and importorskip that give no reason."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        reasons = [each.value for each in node.keywords if each.arg == "reason"]
        reasons += node.args[:1] if name == "skip" else []
        if name in ("skip", "skipif", "importorskip") and not reasons:
            found.append(node.lineno)
    return found


def unknown_arguments(text: str) -> list[tuple[int, str]]:
    """Return (line, name) of names below `Args:` in a docstring that are no parameter, or no field of the class.

    A class has the parameters of its `__init__` and the fields of itself and of its bases in the same file."""
    if "Args:" not in text:
        return []
    tree = ast.parse(text)
    classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    return [
        (node.lineno, name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        for name in _documented_arguments(ast.get_docstring(node) or "")
        if name not in _arguments(node, classes)
    ]


def _documented_arguments(docstring: str) -> Iterator[str]:
    section = re.search(r"^Args:\n((?: .*\n|\n)*)", docstring + "\n", re.MULTILINE)
    for names in re.findall(r"^ {4}(\S[^:]*):", section[1] if section else "", re.MULTILINE):
        yield from (name.strip(" *`") for name in names.split(","))


def _arguments(node: ast.AST, classes: dict[str, ast.ClassDef]) -> set[str]:
    found = set[str]()
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        each = node.args
        listed = (*each.posonlyargs, *each.args, *each.kwonlyargs, each.vararg, each.kwarg)
        found = {argument.arg for argument in listed if argument is not None}
    elif isinstance(node, ast.ClassDef):
        for part in node.body:
            if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                found.add(part.target.id)
            elif isinstance(part, ast.FunctionDef) and part.name == "__init__":
                found |= _arguments(part, classes)
        for base in node.bases:
            found |= _arguments(classes.get(getattr(base, "id", ""), base), classes)
    return found


def duplicated_classes(files: dict[str, Path]) -> dict[str, list[str]]:
    """Return public class names that occur more than once, with their modules."""
    where: dict[str, list[str]] = defaultdict(list)
    for name, path in files.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where[node.name].append(name)
    return {name: places for name, places in sorted(where.items()) if len(places) > 1}


def private_words(text: str) -> list[tuple[int, str, str]]:
    """Return (line, word, its replacement) for each private word in a text, in an identifier or in a sentence."""
    found = []
    if not PRIVATE_WORDS.keys().isdisjoint(map(str.lower, set(_WORD.findall(text)))):
        for match in _WORD.finditer(text):
            if better := PRIVATE_WORDS.get(match[0].lower()):
                found.append((text.count("\n", 0, match.start()) + 1, match[0].lower(), better))
    for match in _PATTERN.finditer(text):
        better = list(PRIVATE_PATTERNS.values())[(match.lastindex or 1) - 1]
        found.append((text.count("\n", 0, match.start()) + 1, match[0], better))
    return sorted(found)


def refused_words(path: str, text: str) -> list[tuple[int, str, str]]:
    """Return the private words of a file that no exception allows it."""
    allowed = EXCEPTIONS.get(path, ())
    return [] if "*" in allowed else [each for each in private_words(text) if each[1] not in allowed]


def relative_docstrings(text: str) -> list[tuple[int, str]]:
    """Return (line, first words) of docstrings that open with a relative clause.

    A text that is not Python as a whole (Markdown, a notebook with commands of its kernel) is read line by line: every
    triple quote counts as a docstring there."""
    if not _OPENS_RELATIVE.search(text):
        return []
    try:
        tree = ast.parse(text)
    except SyntaxError:
        opened = [(match, match.end() - len(match[0].strip("\"' \n"))) for match in _OPENS_RELATIVE.finditer(text)]
        return [(text.count("\n", 0, at) + 1, " ".join(text[at:].split()[:6])) for _, at in opened]
    found = []
    for node in ast.walk(tree):
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
    lines = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in files.items()}
    read = texts()
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
        "private words": sum(len(refused_words(path, text)) for path, text in read.items()),
        "docstrings that open with a relative clause": sum(len(relative_docstrings(text)) for text in read.values()),
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
