"""A forked process is what a fresh interpreter would be, in all that a test sees of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.processes import PIPE, python, start_python

SEEN = """
import atexit, os, sys, threading, time
atexit.register(print, "at the end")
print(__name__, sys.argv[1:], os.getcwd(), os.environ.get("MARK"), "HOME" in os.environ, input())
print("an error", file=sys.stderr)
threading.Thread(target=lambda: (time.sleep(0.05), print("a thread"))).start()
{last}
"""
LASTS = {
    "returns": "", "exit code": "raise SystemExit(3)", "words": "raise SystemExit('no room')",
    "error": "raise ValueError('planted')", "signal": "import signal; os.kill(os.getpid(), signal.SIGKILL)",
    "interrupt": "raise KeyboardInterrupt", "at once": "sys.stdout.flush(); os._exit(7)",
}  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("last", LASTS)
def test_a_forked_process_is_as_a_fresh_one(last: str, tmp_path: Path) -> None:
    """Output, end and environment. Errors end with the same line: the server's frames stand above it."""
    words = ["-c", SEEN.format(last=LASTS[last]), "one", "two"]
    given = {"env": {"MARK": "7", "PATH": os.environ["PATH"]}, "cwd": tmp_path, "input": "read\n"}
    fresh = subprocess.run([sys.executable, *words], capture_output=True, text=True, **given)  # type: ignore[call-overload]
    forked = python(*words, **given)
    assert (forked.returncode, forked.stdout) == (fresh.returncode, fresh.stdout)
    assert forked.stderr.splitlines()[-1] == fresh.stderr.splitlines()[-1]


def test_a_process_is_talked_to_and_ended_by_a_signal() -> None:
    script = "import time; print(input(), flush=True); time.sleep(1000)"
    with start_python("-c", script, stdin=PIPE, stdout=PIPE) as process:
        process.stdin.write("hello\n")
        assert process.stdout.readline() == "hello\n" and process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait() == -signal.SIGTERM and process.stdout.read() == ""


def test_functions_and_modules_run(tmp_path: Path) -> None:
    assert python(print, 3, "x", check=True).stdout == "3 x\n"
    done = python("-m", "json.tool", input='{"a":1}', check=True)
    assert done.stdout == '{\n    "a": 1\n}\n'
    (tmp_path / "script.py").write_text("import sys; print(__name__, sys.argv[1:])")
    assert python(tmp_path / "script.py", "a").stdout == "__main__ ['a']\n"
    with pytest.raises(AssertionError, match=r"(?s)ended with 1.*ZeroDivisionError"):
        python("-c", "1 / 0", check=True)
