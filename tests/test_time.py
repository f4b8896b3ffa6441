"""No test's outcome depends on how quick a machine is: read off the source of every test.

Clocks are not read, neither the wall's nor the processor's, durations are not compared, waits have no limit but the
test's own or one that `limit` scales, and no test sleeps instead of waiting for the event itself.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.patience import MIN_SCALE, MOST_SECONDS, limit, scale, until

TESTS = Path(__file__).resolve().parent
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
    "engine/many_histories.py": "a command that prints how long it took",
    "benchmarks/fake_peer.py": "invents times, and stands for a peer that never ends",
    "measure/runs.py": "kills at any moment: every one will do",
    "sweep/quick_worker.py": "stands for a worker that never ends",
    "widgets/test_view.py": "pauses of any length between marks",
    "lab/test_page.py": "a cell that never ends",
    "runs/test_index.py": "lets files become old enough for the index: any longer will do",
    "widgets/test_compare_in_browser.py": "gives the browser time to forget a letter: any longer will do",
    "cluster/test_process_fleet.py": "a kill that takes a while: any time will do",
    "cluster/test_ray_launcher.py": "the clock of another machine, far from this one's",
    "experiments/test_random_kills.py": "stands for a service that never ends",
    "fresh_environment.py": "a command of .ci/run that prints how long each of README's took",
}
INSTEAD = "wait for the event (tests.patience.until), count work (tests.calls)"
LIMITS = {"timeout", "timeout_s", "timeout_ms", "limit_s", "startup_timeout"}
WAITS = {"wait", "join", "wait_for", "result", "set_default_timeout", "wait_for_timeout"}
SECONDS = re.compile(r"(^|_)(seconds|elapsed|duration|took|wall|latency)($|_)|(?<!per)_(s|ms|us|ns)$")
IN_TEXT = re.compile(
    r"\b(?:wait|join)\(\d|\btimeout\s*=\s*\d|\bsleep\(\d|\b(?:perf_counter|monotonic|process_time|thread_time)\("
)


def faults(source: str) -> list[str]:
    """Return a line for each place of a test's source whose outcome may depend on time."""
    found = sorted(_found(ast.parse(source)), key=lambda fault: fault[0].lineno)
    return [f"line {node.lineno}: {what}" for node, what in found]


def _found(tree: ast.Module) -> Iterator[tuple[ast.expr, str]]:
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(ast.Name(owner) | ast.Attribute(attr=owner), name) if name in CLOCKS.get(owner, ()):
                yield node, f"{owner}.{name}: {INSTEAD}"
            case ast.Attribute(attr=name) if name in PROCESSOR_TIMES:
                yield node, f"{name}: {INSTEAD}"
            case ast.Call(func=ast.Name(name)) if name in BY_NAME:
                yield node, f"{name}: {INSTEAD}"
            case ast.Call(func=ast.Attribute(attr=name), args=[given]) if name in WAITS and _number(given):
                yield node, f"{name}({ast.unparse(given)}): no limit, or tests.patience.limit(seconds)"
            case ast.Call(func=ast.Attribute(attr="timeout"), args=[given, *_]) if _number(given):
                yield node, f"mark.timeout({ast.unparse(given)}): tests.patience.limit(seconds)"
            case ast.Constant(str(text)) if said := IN_TEXT.search(text):
                yield node, f"in a text: {said[0]}"
        if isinstance(node, ast.Call):
            for keyword in node.keywords:
                if keyword.arg in LIMITS and _number(keyword.value):
                    yield node, f"{keyword.arg}={ast.unparse(keyword.value)}: tests.patience.limit(seconds)"
                if keyword.arg == "deadline" and "settings" in ast.unparse(node.func) and not _is_none(keyword.value):
                    yield node, "deadline: examples have none"
                if keyword.arg == "suppress_health_check" and "too_slow" not in ast.unparse(keyword.value):
                    yield node, "suppress_health_check: too_slow is to be among them"
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
            yield node, f"{name} < {ast.unparse(after)}: durations are not compared with numbers"


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


def sources() -> list[str]:
    return sorted(str(path.relative_to(TESTS)) for path in TESTS.rglob("*.py") if path != Path(__file__).resolve())


def test_no_tests_outcome_depends_on_time() -> None:
    found = {name: faults((TESTS / name).read_text(encoding="utf-8")) for name in sources()}
    assert {name: lines for name, lines in found.items() if lines and name not in ALLOWED} == {}
    assert [name for name in ALLOWED if not found[name]] == [], "allowed, and needed no more"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("began = time.monotonic()", "time.monotonic"),
        ("assert perf_counter() - began < 1", "perf_counter"),
        ("assert time.process_time() - began < MAX_SECONDS", "time.process_time"),
        ("began = time.thread_time_ns()", "time.thread_time_ns"),
        ("clock = time.process_time", "time.process_time"),
        ("time.clock_gettime(time.CLOCK_PROCESS_CPUTIME_ID)", "time.clock_gettime"),
        ("assert thread_time() < 1", "thread_time"),
        ("began = resource.getrusage(resource.RUSAGE_SELF).ru_utime", "resource.getrusage"),
        ("assert os.times().user < 1", "os.times"),
        ("assert psutil.Process().cpu_times().user < 1", "cpu_times"),
        ("now = datetime.now()", "datetime.now"),
        ("now = datetime.datetime.now()", "datetime.now"),
        ("run('print(time.process_time())')", "in a text: process_time("),
        ("time.sleep(0.1)", "time.sleep"),
        ("assert job.wait(60)", "wait(60)"),
        ("thread.join(2 * 5)", "join(2 * 5)"),
        ("subprocess.run(words, timeout=60)", "timeout=60"),
        ("@pytest.mark.timeout(600)\ndef test(): ...", "mark.timeout(600)"),
        ("page.set_default_timeout(120_000)", "set_default_timeout(120000)"),
        ("page.tab.wait_for_timeout(2500)", "wait_for_timeout(2500)"),
        ("page.ask('v.wait(60)')", "in a text: wait(6"),
        ("@settings(deadline=200)\ndef test(): ...", "deadline"),
        ("settings(suppress_health_check=[HealthCheck.function_scoped_fixture])", "too_slow"),
        ("assert timing.seconds < 0.1", "seconds < 0.1"),
        ("assert 2e-6 > row['wall_s'] / 2000", "wall_s < 2e-06"),
        ("assert 0 < timing.seconds < 5", "seconds < 5"),
    ],
)
def test_what_depends_on_time_is_found(source: str, message: str) -> None:
    assert any(message in fault for fault in faults(source)), faults(source)


@pytest.mark.parametrize(
    "source",
    [
        "assert job.wait()", "thread.join(limit(5))", "subprocess.run(words, timeout=limit(60))", "', '.join(names)",
        "assert timing.seconds > 0", "assert 0 < timing.seconds", "assert timing.p10 <= timing.seconds <= timing.p90",
        "until(lambda: file.exists())", "settings(deadline=None)", "assert seconds == 2.0",
        "assert output_tokens_per_s < 4",
    ],
)  # fmt: skip
def test_what_does_not_is_left_alone(source: str) -> None:
    assert faults(source) == []


def test_limits_are_generous_and_follow_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert scale() >= MIN_SCALE and limit(3) == 3 * scale()
    monkeypatch.setenv("WORKBENCH_TESTS_SCALE", "70")
    assert limit(2) == 140 and limit(100) == MOST_SECONDS < 600


def test_waiting_ends_with_the_event_or_with_what_would_bring_it_about() -> None:
    looked = iter([False, False, True])
    until(lambda: next(looked))
    with pytest.raises(AssertionError, match="has ended"):
        until(lambda: False, lambda: False)
    ended = iter([False, True])  # it came with its last act
    until(lambda: next(ended), lambda: False)
