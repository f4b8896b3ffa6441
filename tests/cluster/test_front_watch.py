"""A front that is killed leaves no process and no folder; one that closes goes on itself."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cluster.processes import is_alive
from tests.helpers.processes import PIPE, start_python
from tests.patience import until
from workbench.cluster.front_watch import FrontWatch

FRONT = """
import os, subprocess, sys
from workbench.cluster.front_watch import FrontWatch

folder = sys.argv[1]
os.mkdir(folder)
watch = FrontWatch(folder)
own = open(folder + "/own", "w")  # the front has a file open there too, as Ray's driver has
package = os.path.dirname(folder) + "/package/ray"
os.makedirs(package)
script = package + "/sleep.py"
with open(script, "w") as file:
    file.write("import sys; sys.stdin.read()")
sleeper = [sys.executable, script]  # as Ray's: a script of its package
named = subprocess.Popen([*sleeper, folder], stdin=subprocess.PIPE)
with open(folder + "/log", "w") as log:
    opened = subprocess.Popen(sleeper, stdin=subprocess.PIPE, stdout=log)
    stranger = subprocess.Popen(["cat", folder + "/log", "-"], stdin=subprocess.PIPE, stdout=log)
    marked = os.environ | {"RAY_RAYLET_PID": "1"}
    started = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=log, env=marked)  # by a worker that is gone
other = subprocess.Popen(sleeper, stdin=subprocess.PIPE)
print(named.pid, opened.pid, started.pid, other.pid, flush=True)
if sys.stdin.readline() == "close\\n":
    watch.close()
    print(named.wait(), opened.wait(), started.wait(), other.poll(), stranger.poll(), os.path.exists(folder))
"""


@pytest.mark.processes
@pytest.mark.parametrize("way", ["closed", "killed"])
def test_what_a_front_started_ends_with_it(tmp_path: Path, way: str) -> None:
    folder = tmp_path / "ray-x"
    with start_python("-c", FRONT, folder, stdin=PIPE, stdout=PIPE) as front:
        *mine, other = map(int, front.stdout.readline().split())
        assert all(map(is_alive, [*mine, other])) and folder.exists()
        if way == "closed":
            front.stdin.write("close\n")
            answer = front.stdout.readline()
            assert answer.split() == ["-9", "-9", "-9", "None", "None", "False"]
            front.stdin.close()
            assert front.wait() == 0
        else:
            front.kill()
            front.wait()
        until(lambda: not any(map(is_alive, mine)) and not folder.exists())


def test_a_watcher_is_closed_twice(tmp_path: Path) -> None:
    folder = tmp_path / "ray-x"
    folder.mkdir()
    watch = FrontWatch(str(folder))
    watch.close()
    watch.close()
    assert not folder.exists() and is_alive(os.getpid())
