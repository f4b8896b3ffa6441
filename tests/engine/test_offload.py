"""Pages carried out of the cache and back: every row is the oracle's all the same, or the request says what broke."""

from __future__ import annotations

import gc
import os
import runpy
import sys
from pathlib import Path

import pytest

from tests.engine.poison import MODEL, asked, poisoned
from tests.engine.tiny import finals, request, runner_of
from tests.helpers.events import of
from workbench.engine.runner import generate
from workbench.errors import WorkbenchError
from workbench.kv_cache import offload as host
from workbench.trace.events import Finished, Preempted, Scheduled, Stepped


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_a_preempted_request_comes_back_by_copying(kind: str, tmp_path: Path) -> None:
    requests = [request(f"r{i}", 9, 14, temperature=0.9, seed=i) for i in range(4)]
    roomy = finals(runner_of(MODEL, pages=60), requests)
    place = {"kind": kind, "bytes": 2**16, **({"path": str(tmp_path / "pages")} if kind == "file" else {})}
    runner = runner_of(MODEL, pages=9, offload=place)
    poisoned(runner)
    events = list(runner.stream(requests))
    backs = of(Preempted, events)
    assert backs and all("pages swapped out to the CPU" in event.reason for event in backs)
    assert any("tokens swapped in from the CPU" in e.reason for e in of(Scheduled, events))
    ends = {e.request_id: e for e in of(Finished, events)}
    assert {name: end.token_ids for name, end in ends.items()} == roomy
    assert all(end.computed_tokens == 9 + 14 - 1 for end in ends.values()), "nothing was computed twice"
    assert sum(end.restored_tokens for end in ends.values()) > 0
    runner.scheduler.kv_cache_manager.transfers_done()
    assert runner.kv_cache.cpu_store is not None and all(
        room.num_used == 0 for room in runner.kv_cache.cpu_store.cpu_pools
    )
    path = tmp_path / "pages"
    assert path.exists() == (kind == "file")
    del runner
    gc.collect()  # the oracle and the runner hold each other
    assert not path.exists()


def damage(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[4096:] = bytes(byte ^ 1 for byte in raw[4096:])
    with path.open("r+b") as file:
        file.write(raw)


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (damage, "differs from the saved page"),
        (Path.unlink, "is gone"),
        (lambda path: path.open("r+b").truncate(5000), "has 5000 bytes where"),
    ],
)
def test_a_damaged_file_ends_one_request(harm, words: str, tmp_path: Path) -> None:
    requests = [request(f"r{i}", 9, 14) for i in range(4)]
    roomy = finals(runner_of(MODEL, pages=60), requests)
    path = tmp_path / "pages"
    runner = runner_of(MODEL, pages=9, offload={"kind": "file", "path": str(path), "bytes": 2**16})
    poisoned(runner)
    ends, hurt = {}, ""
    for event in runner.stream(requests):
        if isinstance(event, Preempted) and not hurt:
            hurt = event.request_id
        elif hurt and path.exists() and not ends and isinstance(event, Stepped):
            harm(path)
            harm = lambda path: None  # noqa: E731
        if isinstance(event, Finished):
            ends[event.request_id] = event
    broken = {name for name, end in ends.items() if end.reason == "error"}
    assert hurt in broken and all(words in ends[name].error for name in broken)
    assert {name: end.token_ids for name, end in ends.items() if name not in broken} == {
        name: tokens for name, tokens in roomy.items() if name not in broken
    }
    assert len(broken) < 4 and runner.scheduler.pages_in_use == 0


def test_a_file_that_others_have_is_left_alone(tmp_path: Path) -> None:
    mine = tmp_path / "thesis.txt"
    mine.write_text("three years of work")
    with pytest.raises(WorkbenchError, match="holds something else"):
        runner_of(MODEL, offload={"kind": "file", "path": str(mine)})
    assert mine.read_text() == "three years of work"
    place = {"kind": "file", "path": str(tmp_path / "p"), "bytes": 2**16}
    first = runner_of(MODEL, offload=place)
    with pytest.raises(WorkbenchError, match="in use by another runner"):
        runner_of(MODEL, offload=place)
    assert not first.has_unfinished_requests


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_an_idle_conversation_waits_on_the_host(kind: str, tmp_path: Path) -> None:
    """Its pages leave the cache when others need the room, and come back when it goes on."""
    place = {"kind": kind, "bytes": 2**16, **({"path": str(tmp_path / "pages")} if kind == "file" else {})}
    runner = runner_of(MODEL, pages=7, prefix="radix", offload=place)
    poisoned(runner)
    generate(runner, [asked("a", 17, 3, 5)])
    generate(runner, [asked("b", 17, 9, 2, beginning=1)])  # seven pages: the cache is full of them
    found = generate(runner, [asked("again", 17, 3, 5)])["again"]
    assert (found.cached_tokens, found.computed_tokens) == (16, 4 + 4)
    assert found.token_ids == generate(runner_of(MODEL), [asked("again", 17, 3, 5)])["again"].token_ids
    if kind == "file":
        generate(runner, [asked("c", 17, 9, 2, beginning=2)])
        damage(tmp_path / "pages")
        broken, well = generate(runner, [asked("broken", 17, 3, 5), asked("well", 2, 3, 5, beginning=3)]).values()
        assert broken.reason == "error" and "differs from the saved page" in broken.error
        assert well.reason == "length"
        assert generate(runner, [asked("once more", 17, 3, 5)])["once more"].reason == "length", "it is forgotten"
    runner.reset_prefix_cache()
    runner.scheduler.kv_cache_manager.transfers_done()
    assert all(pool.num_free == pool.num_pages for pool in runner.scheduler.pools)
    assert runner.kv_cache.cpu_store is not None and all(
        room.num_used == 0 for room in runner.kv_cache.cpu_store.cpu_pools
    )


@pytest.mark.parametrize("lacks", ["fcntl", "posix_fallocate"])
def test_where_files_cannot_hold_pages_only_they_are_refused(tmp_path: Path, lacks: str, monkeypatch) -> None:
    if lacks == "fcntl":
        monkeypatch.setitem(sys.modules, "fcntl", None)
    else:
        monkeypatch.delattr(os, "posix_fallocate")
    runpy.run_path(str(Path(host.__file__)))  # it can be imported there
    assert runner_of(MODEL, offload="memory").kv_cache.cpu_store is not None
    with pytest.raises(WorkbenchError, match="on Linux only; set offload: memory"):
        runner_of(MODEL, offload={"kind": "file", "path": str(tmp_path / "pages")})
    assert not (tmp_path / "pages").exists()
