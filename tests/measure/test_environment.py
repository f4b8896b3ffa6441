from __future__ import annotations

import getpass
import json
import re
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from workbench.machine import processor as machine
from workbench.machine.environment import commit, environment
from workbench.machine.processor import (
    LEVELS,
    CpuTimes,
    available_bytes,
    cpu_times,
    last_level_cache,
    others_cpu_share,
    simd_level_of,
)


@pytest.fixture(scope="module")
def here() -> dict:
    return environment(with_torch=False, sample_seconds=0.01)


def texts(value: object) -> list[str]:
    if isinstance(value, dict):
        return [text for key, inner in value.items() for text in (key, *texts(inner))]
    if isinstance(value, list):
        return [text for inner in value for text in texts(inner)]
    return [value] if isinstance(value, str) else []


def test_it_is_json_and_names_what_explains_a_figure(here):
    assert json.loads(json.dumps(here, allow_nan=False)) == here
    expected = {
        "date", "python", "platform", "packages", "cpu", "memory_bytes", "threads", "gpu", "load_average",
        "others_cpu_share", "commit", "compiler", "python_headers",
    }  # fmt: skip
    assert expected <= set(here)
    assert here["date"].endswith("+00:00")
    assert here["packages"]["pyarrow"]
    assert here["cpu"]["cores"] >= here["cpu"]["usable_cores"] >= 1


def test_it_tells_no_place_and_no_name(here, monkeypatch):
    monkeypatch.setenv("CXX", "/opt/secret/bin/no-such-compiler")
    everything = [*texts(here), *texts(environment(with_torch=False, sample_seconds=0.0))]
    words = {word for text in everything for word in re.split(r"[\s/]+", text)}
    assert not words & {socket.gethostname(), getpass.getuser()}
    assert not [text for text in everything if re.search(r"(^|\s)[/\\~]", text)]
    assert not [text for text in everything if str(Path.home()) in text or "secret" in text]


def test_a_compiler_is_named_without_its_place(tmp_path, monkeypatch):
    compiler = tmp_path / "own-c++"
    compiler.write_text('#!/bin/sh\necho "$0 version 7 in /usr/lib/own"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert environment(with_torch=False, sample_seconds=0.0)["compiler"] == "own-c++ version 7 in own"
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX")
    assert environment(with_torch=False, sample_seconds=0.0)["compiler"] is None


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git here")
def test_the_commit_is_that_of_the_repository_that_tracks_the_source(tmp_path, monkeypatch):
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    source = tmp_path / "workbench" / "errors.py"
    source.parent.mkdir()
    source.write_text("")
    assert commit(tmp_path) is None
    git("init", "-q")
    assert commit(tmp_path) is None, "the source is not tracked: an installed copy within a checkout"
    git("add", ".")
    git("commit", "-q", "-m", "one")
    head = git("rev-parse", "HEAD")
    assert commit(tmp_path) == {"hash": head, "dirty": False}
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    assert commit(tmp_path) == {"hash": head, "dirty": False}
    source.write_text("changed")
    assert commit(tmp_path) == {"hash": head, "dirty": True}


def test_without_git_there_is_no_commit(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment(with_torch=False, sample_seconds=0.0)["commit"] is None


@pytest.mark.parametrize(
    ("busy", "own", "share"), [(8.0, 2.0, 0.6), (2.0, 2.0, 0.0), (1.0, 2.0, 0.0), (10.0, 0.0, 1.0)]
)
def test_others_share_is_what_was_busy_and_not_ours(busy, own, share):
    before = CpuTimes(total=100.0, active=50.0, own=7.0)
    assert others_cpu_share(before, CpuTimes(110.0, 50.0 + busy, 7.0 + own)) == pytest.approx(share)


def test_memory_that_may_be_taken_is_that_of_the_control_group(tmp_path):
    """A file's cache counts as free; without a limit the machine's memory does."""
    machine = available_bytes(tmp_path / "none")
    (tmp_path / "memory.stat").write_text("anon 300\nfile 900\n")
    found = []
    for limit in ("1000", "300", "200", "max"):
        (tmp_path / "memory.max").write_text(limit + "\n")
        found.append(available_bytes(tmp_path))
    assert found[:3] == [700, 0, 0] and min(machine, found[3]) > 1000


def test_no_time_gone_by_has_no_share():
    times = CpuTimes(100.0, 50.0, 7.0)
    assert others_cpu_share(times, times) is None
    assert others_cpu_share(None, times) is None


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="this system has no /proc/stat")
def test_cpu_times_move_with_our_own_work():
    before = after = cpu_times()
    assert before is not None
    while after is not None and after.own == before.own:  # to look at them is work, and its time has ticks
        after = cpu_times()
    assert after is not None and after.own > before.own
    assert after.total - before.total + 1e-6 >= after.active - before.active >= -1e-6


def test_the_last_level_cache_is_the_outermost_data_cache(tmp_path):
    assert last_level_cache(tmp_path) is None
    caches = [(1, "Data", "48K"), (4, "Instruction", "64M"), (3, "Unified", "32M"), (2, "Unified", "1024K")]
    for index, (level, kind, size) in enumerate(caches):
        folder = tmp_path / f"index{index}"
        folder.mkdir()
        for name, text in (("level", str(level)), ("type", kind), ("size", size)):
            (folder / name).write_text(text + "\n")
    assert last_level_cache(tmp_path) == 32 * 2**20
    (tmp_path / "index2" / "size").write_text("much")
    assert last_level_cache(tmp_path) == 2**20


@pytest.mark.parametrize(("flags", "level"), [
    ("avx avx2 fma f16c", "v3"),  # Zen 3
    ("avx2 fma avx512f avx512bw avx512vl", "v4"),  # Skylake
    ("avx2 fma avx512f avx512bw avx512vl avx512_vnni", "v4+vnni"),  # Ice Lake
    ("avx avx2 fma f16c avx512f avx512bw avx512vl avx_vnni avx512_vnni avx512_bf16", "v4+bf16"),  # Zen 5
    ("avx2 fma avx512_vnni avx512_bf16", "v3"),  # without what stands between it is none
    ("avx", None), ("asimd bf16 i8mm sve", None), ("", None),
])  # fmt: skip
def test_the_level_is_the_highest_of_which_nothing_is_missing(flags: str, level: str | None) -> None:
    assert simd_level_of(flags.split()) == level
    assert level is None or level in LEVELS


def test_an_environment_carries_the_level_and_flags_that_lead_to_it(here, monkeypatch):
    assert here["cpu"]["level"] == machine.simd_level() == simd_level_of(here["cpu"]["flags"])
    monkeypatch.setattr(machine, "_cpuinfo", lambda key: "fpu avx avx2 fma" if key == "flags" else None)
    assert machine.cpu()["level"] == "v3"
