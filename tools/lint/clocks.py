"""Check in the source of every test that its outcome does not depend on the speed of the machine.

Tests read no clock, compare no durations, and never sleep to wait for an event; a wait has the test's own limit, or one
scaled by `limit`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tools.lint.tree import ROOT, python, texts

CLOCKS = {  # by the module or class that has them
    "time": {"sleep", "localtime", "gmtime", "ctime", "clock_gettime", "clock_gettime_ns"}
    | {f"{name}time{unit}" for name in ("", "process_", "thread_") for unit in ("", "_ns")}
    | {f"{name}{unit}" for name in ("perf_counter", "monotonic") for unit in ("", "_ns")},
    "timeit": {"timeit", "repeat", "default_timer"},
    "datetime": {"now", "utcnow", "today"},
    "date": {"today"},
    "resource": {"getrusage"},
    "os": {"times", "wait3", "wait4"},
}
PROCESSOR_TIMES = {"cpu_times", "cpu_percent", "cpu_times_percent"}  # of psutil and its processes
BY_NAME = set().union(*CLOCKS.values()) - {"time", "times", "now", "today", "repeat"}  # these may be anything
# What may look at a clock or sleep, and why its outcome does not hang on it.
ALLOWED = {
    "patience.py": "measures the machine, and looks for what cannot be waited for",
    "benchmarks/fake_peer.py": "invents times, and stands for a peer that never ends",
    "sweep/quick_worker.py": "stands for a worker that never ends",
    "lab/test_page.py": "a cell that never ends",
    "runs/test_index.py": "lets files become old enough for the index: any longer will do",
    "widgets/test_compare_in_browser.py": "gives the browser time to forget a letter: any longer will do",
    "cluster/test_process_fleet.py": "a kill that takes a while: any time will do",
    "cluster/test_ray_launcher.py": "the clock of another machine, far from this one's",
    "helpers/test_processes.py": "children that end by a signal, or wait for an instant",
    **dict.fromkeys(
        (f"long/{name}.py" for name in ("fleet_server", "random_kills", "replica_loss", "serving_soak", "soak")),
        "a driver that runs for hours, and measures; the suite tests it in small",
    ),
    "fresh_environment.py": "a command of .ci/run that prints how long each of README's took",
}
INSTEAD = "wait for the event (tests.patience.until), count work (tests.calls)"
LIMITS = {"timeout", "timeout_s", "timeout_ms", "limit_s", "startup_timeout"}
WAITS = {"wait", "join", "wait_for", "result", "set_default_timeout", "wait_for_timeout"}
SECONDS = re.compile(r"(^|_)(seconds|elapsed|duration|took|wall|latency)($|_)|(?<!per)_(s|ms|us|ns)$")
IN_TEXT = re.compile(
    r"\b(?:wait|join)\(\d|\btimeout\s*=\s*\d|\bsleep\(\d|\b(?:perf_counter|monotonic|process_time|thread_time)\("
)


def faults(root: Path = ROOT) -> Iterator[str]:
    """Yield each place of a test whose outcome may depend on time, and each exception that is no longer needed."""
    for path, text in python(root, "tests"):
        found = [] if path == "tests/test_lint.py" else clocks_of(text)
        if (name := path.removeprefix("tests/")) not in ALLOWED:
            yield from (f"{path}:{line}: {fault}" for line, fault in found)
        elif not found:
            yield f"{path}:1: looks at no clock; take its row out of tools/lint/clocks.py"
    for name in ALLOWED:
        if f"tests/{name}" not in texts(root):
            yield f"tools/lint/clocks.py:1: {name!r} is not there; take its row out"


def clocks_of(source: str) -> list[tuple[int, str]]:
    """Return (line, fault) for each place of a test's source whose outcome may depend on time."""
    return sorted((node.lineno, fault) for node, fault in _found(ast.parse(source)))


def _found(tree: ast.Module) -> Iterator[tuple[ast.expr, str]]:
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(ast.Name(owner) | ast.Attribute(attr=owner), name) if name in CLOCKS.get(owner, ()):
                yield node, f"{owner}.{name}; {INSTEAD}"
            case ast.Attribute(attr=name) if name in PROCESSOR_TIMES:
                yield node, f"{name}; {INSTEAD}"
            case ast.Call(func=ast.Name(name)) if name in BY_NAME:
                yield node, f"{name}; {INSTEAD}"
            case ast.Call(func=ast.Attribute(attr=name), args=[given]) if name in WAITS and _number(given):
                yield node, f"{name}({ast.unparse(given)}); no limit, or tests.patience.limit(seconds)"
            case ast.Call(func=ast.Attribute(attr="timeout"), args=[given, *_]) if _number(given):
                yield node, f"mark.timeout({ast.unparse(given)}); tests.patience.limit(seconds)"
            case ast.Constant(str(text)) if said := IN_TEXT.search(text):
                yield node, f"in a text: {said[0]}; {INSTEAD}"
        if isinstance(node, ast.Call):
            for keyword in node.keywords:
                if keyword.arg in LIMITS and _number(keyword.value):
                    yield node, f"{keyword.arg}={ast.unparse(keyword.value)}; tests.patience.limit(seconds)"
                if keyword.arg == "deadline" and "settings" in ast.unparse(node.func) and not _is_none(keyword.value):
                    yield node, "deadline; examples have none"
                if keyword.arg == "suppress_health_check" and "too_slow" not in ast.unparse(keyword.value):
                    yield node, "suppress_health_check; too_slow is to be among them"
        if isinstance(node, ast.Compare):
            yield from _compared(node)


def _compared(node: ast.Compare) -> Iterator[tuple[ast.expr, str]]:
    """A duration that was measured is at least nothing; whatever else is said of it, another machine may refute."""
    sides = [node.left, *node.comparators]
    for before, operator, after in zip(sides, node.ops, sides[1:], strict=False):
        if isinstance(operator, ast.Gt | ast.GtE):
            before, after = after, before
        elif not isinstance(operator, ast.Lt | ast.LtE):
            continue
        if _number(after) and ast.unparse(after) != "0" and (name := _duration(before)):
            yield node, f"{name} < {ast.unparse(after)}; durations are not compared with numbers"


def _duration(node: ast.expr) -> str:
    """The name of a duration in an expression, if there is one."""
    for part in ast.walk(node):
        match part:
            case ast.Name(name) | ast.Attribute(attr=name) | ast.Subscript(slice=ast.Constant(str(name))):
                if SECONDS.search(name):
                    return name
    return ""


def _number(node: ast.expr) -> bool:
    """Return True if a node is a number or made of numbers alone."""
    if isinstance(node, ast.BinOp):
        return _number(node.left) and _number(node.right)
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool)


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None
