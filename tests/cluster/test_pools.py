"""Pools of prefill and decode processes: texts are those of one engine, whatever is killed; nothing is left behind."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cluster.ends import pids, until_home
from tests.cluster.pool_requests import config, requests
from tests.cluster.pool_threads import StartThreads
from tests.helpers.events import of
from tests.helpers.processes import PIPE, start_python
from tests.patience import limit, until
from tests.thorough import run_seed
from workbench.cluster.apart.pool_messages import Transfer
from workbench.cluster.pools import PrefillDecodePools
from workbench.engine.inputs import sample_id
from workbench.engine.loaded_model import LoadedModel
from workbench.engine.runner import Runner, generate
from workbench.errors import WorkbenchError
from workbench.trace.events import Decoded, Finished


def children() -> set[int]:
    """Processes of engines on this machine that this process, or one that it started, began."""
    found = set()
    for each in Path("/proc").iterdir():
        try:
            if each.name.isdigit() and b"pool_engine" in (each / "cmdline").read_bytes():
                found.add(int(each.name))
        except OSError:
            continue
    return found


def page_memories() -> set[tuple[int, str]]:
    """Files and mappings of pages in this process and in engines: (process, descriptor or line of its map).

    They are files without a name in any folder (`SharedMemory`)."""
    found, name = set(), "memfd:workbench-pages"
    for process in (os.getpid(), *children()):
        with suppress(OSError):  # it has ended
            for each in Path(f"/proc/{process}/fd").iterdir():
                with suppress(OSError):  # closed meanwhile
                    found |= {(process, each.name)} if name in os.readlink(each) else set()
            lines = Path(f"/proc/{process}/maps").read_text().splitlines()
            found |= {(process, line) for line in lines if name in line}
    return found


@pytest.fixture(scope="module")
def alone() -> dict[int, dict[str, tuple[int, ...]]]:
    runner = Runner(config())
    return {seed: {name: end.token_ids for name, end in generate(runner, requests(seed)).items()} for seed in (0, 1)}


@pytest.mark.processes
@pytest.mark.smoke
@pytest.mark.sampled(1)
@pytest.mark.parametrize("transfer", ["shared", "gloo"])
def test_texts_are_those_of_one_engine_through_any_kill(transfer, alone) -> None:
    """Each token comes once, whichever process dies when; afterwards there is no loan, no process and no memory."""
    memories, draw = page_memories(), random.Random(run_seed())
    with PrefillDecodePools(config(), 1, 2, transfer=transfer) as pools:
        begun = pids(pools)
        for seed, kills in ((0, 0), (1, 2)):
            found, tokens, when = {}, Counter(), sorted(draw.sample(range(1, 60), kills))
            for number, event in enumerate(pools.stream(requests(seed))):
                if when and number >= when[0]:
                    when.pop(0)
                    with suppress(WorkbenchError):  # its successor is being started
                        pools.kill(draw.randrange(3))
                if isinstance(event, Decoded):
                    tokens[sample_id(event.request_id, event.sample), event.index] += 1
                elif isinstance(event, Finished):
                    assert not event.error
                    found[sample_id(event.request_id, event.sample)] = event.token_ids
            assert found == alone[seed]
            assert tokens == Counter({(name, at): 1 for name, ids in found.items() for at in range(len(ids))})
            assert pools.counts["handed over"] >= 7
        until_home(pools)
        begun |= pids(pools)
        if transfer == "shared":
            here = [its for process, its in page_memories() - memories if process == os.getpid()]
            assert {each.isdigit() for each in here} == {True, False}, "a memory's file and its mapping are found"
    assert not begun & children()
    assert not {each for each in page_memories() - memories if each[0] in {os.getpid(), *begun}}


def test_requests_that_are_cancelled_end_and_leave_no_loan() -> None:
    with PrefillDecodePools(config(), processes=StartThreads(LoadedModel.load)) as pools:
        for seed, limit in ((0, 1), (1, 40)):
            asked = [replace(each, request_id=f"{each.request_id} of {seed}") for each in requests(seed)]
            handle = pools.submit(asked)
            until(lambda handle=handle, limit=limit: len(handle.events) >= limit)
            handle.stop()
            until(lambda handle=handle: handle.done)
        until_home(pools)


@pytest.mark.processes
def test_a_pool_that_is_gone_leaves_its_work_to_the_other(alone) -> None:
    for number in (0, 1):
        with PrefillDecodePools(config(), replaces_dead=False) as pools:
            found = {}
            for place, event in enumerate(pools.stream(requests(0))):
                if place == 12:
                    pools.kill(number)
                if isinstance(event, Finished):
                    found[sample_id(event.request_id, event.sample)] = event.token_ids
            assert found == alone[0] and pools.counts["processes that died"] == 1
            with pytest.raises(WorkbenchError, match="has no process to kill: it is gone"):
                pools.kill(number)
            living = pools.slots[1 - number].pages
            assert pools.pages == living and sum(living) == 40, "pages of an engine that is gone do not count"


@pytest.mark.processes
def test_processes_end_with_their_coordinator() -> None:
    """SIGKILL of the process that began them."""
    script = """
from tests.cluster.pool_requests import config
from workbench.cluster.pools import PrefillDecodePools
with PrefillDecodePools(config()) as pools:
    print(*(slot.process.pid for slot in pools.slots), flush=True)
    input()
"""
    with start_python("-c", script, stdin=PIPE, stdout=PIPE) as coordinator:
        begun = set(map(int, coordinator.stdout.readline().split()))
        assert len(begun) == 2
        coordinator.kill()
    until(lambda: not begun & children())


def test_engines_of_other_layouts_are_refused() -> None:
    with pytest.raises(WorkbenchError, match=r"cache.page_size 16 and 32"):
        PrefillDecodePools(config(), decode=config(page_size=32))
    with pytest.raises(WorkbenchError, match="a pool needs an engine"):
        PrefillDecodePools(config(), 0, 1)


@pytest.mark.processes
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("number", "transfer"), [(0, "gloo"), (1, "gloo"), (1, "shared")])
def test_a_process_that_is_stopped_is_ended_and_its_requests_go_on(alone, number: int, transfer: Transfer) -> None:
    """SIGSTOP: it answers nothing, and its connection stays."""
    with PrefillDecodePools(config(), transfer=transfer, step_seconds=limit(0.3)) as pools:
        process = pools.slots[number].process
        assert process is not None and process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        ends = of(Finished, pools.stream(requests(0)))
        assert {sample_id(each.request_id, each.sample): each.token_ids for each in ends} == alone[0]
        assert pools.counts["processes that died"] >= 1 and process.pid not in children()
    with PrefillDecodePools(config()) as pools:
        process = pools.slots[number].process
        assert process is not None and process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
    assert process.pid not in children(), "the end of the pools waits for no answer"
