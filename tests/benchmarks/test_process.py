"""A process a job: whatever happens inside is an answer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.peers.catalog import SCRIPTS
from benchmarks.peers.process import first_cores, script_environment, strip_folders
from tests.benchmarks.fakes import run
from tests.patience import until


def test_what_libraries_print_does_not_spoil_the_answer(tmp_path: Path) -> None:
    answer = run(tmp_path, step=0.5)
    assert answer["status"] == "ok" and answer["how"] == "invented"
    assert answer["measured"] == [{"tokens": 4, "seconds": pytest.approx(2.0)}] * 2
    assert answer["warm_up"]["tokens"] == 4
    assert 1e6 < answer["peak_bytes"] < 1e9 and answer["load_seconds"] > 0
    assert answer["versions"]["no-such-distribution"] is None
    assert answer["versions"]["python"] == sys.version.split()[0]
    assert answer["others_cpu_share"] is None or 0 <= answer["others_cpu_share"] <= 1


@pytest.mark.parametrize(
    ("options", "status", "reason"),
    [
        ({"load": "absent"}, "absent", "No module named 'no_such_package'"),
        ({"load": "unsupported"}, "unsupported", "it cannot"),
        ({"load": "broken"}, "failed", "ValueError: no model in model.bin"),
        ({"load": "dies"}, "failed", "ended with signal SIGABRT and no answer: "),
        ({"generate": "short"}, "failed", "RuntimeError: 5 output tokens were asked for, 4 came"),
    ],
)
def test_failures_are_answers(tmp_path: Path, options: dict, status: str, reason: str) -> None:
    answer = run(tmp_path, **options)
    assert answer["status"] == status
    assert answer["reason"].startswith(reason) if reason.endswith(": ") else answer["reason"] == reason
    if options.get("load") == "dies":
        assert "out of luck" in answer["reason"]


def test_a_peer_that_hangs_is_ended_with_its_helpers(tmp_path: Path) -> None:
    note, seconds = tmp_path / "note", 1
    while not note.exists() or not note.read_text():  # it had not come as far as to hang
        seconds *= 2
        answer = run(tmp_path, timeout=seconds, load="hangs")
        assert answer == {"status": "failed", "reason": f"no answer within {seconds} s"}
    helper = int(note.read_text())
    until(lambda: not _alive(helper))


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's end")
def test_a_peer_ends_when_its_bench_is_killed(tmp_path: Path) -> None:
    note = tmp_path / "note"
    code = f"""
from pathlib import Path
from tests.benchmarks.fakes import run
run(Path({str(tmp_path)!r}), load="waits")
"""
    bench = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).resolve().parents[2])
    until(lambda: note.exists() and note.read_text(), lambda: bench.poll() is None)
    peer = int(note.read_text())
    assert _alive(peer)
    bench.kill()
    bench.wait()
    try:
        until(lambda: not _alive(peer))
    except BaseException:  # it lives on
        os.kill(peer, signal.SIGKILL)
        raise


def _alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_an_interpreter_that_is_none_is_an_answer(tmp_path: Path) -> None:
    answer = run(tmp_path, python=str(tmp_path / "nothing"))
    assert answer == {"status": "failed", "reason": "nothing could not be started (No such file or directory)"}


def test_environments_hold_every_pool_and_no_python_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    held = script_environment(3, {"TORCHINDUCTOR_FREEZING": "1"})
    assert "PYTHONPATH" not in held and held["TORCHINDUCTOR_FREEZING"] == "1"
    assert held["OMP_NUM_THREADS"] == held["MKL_NUM_THREADS"] == "3" and held["HF_HUB_OFFLINE"] == "1"
    if hasattr(os, "sched_getaffinity"):
        assert first_cores(1) == [min(os.sched_getaffinity(0))]


def test_reasons_keep_names_and_lose_folders() -> None:
    stripped = strip_folders("cannot read /home/someone/x/model.bin:\n  see 3/4 and http://a.b/c")
    assert stripped == "cannot read model.bin: see 3/4 and http://a.b/c"
    assert len(strip_folders("x" * 1000)) == 400


def test_scripts_of_foreign_tools_never_import_workbench() -> None:
    from tools.structure import imported_names

    for path in SCRIPTS.glob("*.py"):
        reaches = [name for name in imported_names(path) if name.split(".")[0] in ("workbench", "compiled_kernels")]
        assert bool(reaches) == (path.name == "run_workbench.py"), path.name
