"""Ranks that torchrun started, in shared memory: how they meet, what is refused, and how the end of one is noticed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch

from tests.patience import limit, until
from tests.tensor_parallel import numbers_rank
from tests.tensor_parallel.left_behind import LeftBehind
from workbench.errors import WorkbenchError
from workbench.tensor_parallel.futex import shared_memory_problem
from workbench.tensor_parallel.ranks import STOP, NoPeers, RankFailed, Ranks
from workbench.tensor_parallel.shared_memory import OFFER, open_group, processes_of
from workbench.tensor_parallel.torchrun import TorchrunPeers, torchrun_problem

pytestmark = pytest.mark.skipif(shared_memory_problem() is not None, reason="shared memory needs Linux on x86-64")
TORCHRUN = "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "--local-addr", "127.0.0.1"


class Store:
    """Stand for torchrun's store, between threads; what rank 0 offers may be changed on its way."""

    def __init__(self, **changes: Any):
        self.store, self.changes = torch.distributed.HashStore(), changes

    def set(self, name: str, value: str) -> None:
        self.store.set(name, json.dumps(json.loads(value) | self.changes) if name == OFFER else value)

    def get(self, name: str) -> bytes:
        return self.store.get(name)


def test_ranks_that_meet_exchange_numbers_in_one_memory() -> None:
    store = Store()
    groups = [open_group(store, rank, 2) for rank in range(2)]
    assert [processes_of(store, rank, 2) for rank in range(2)] == [{1: os.getpid()}, {0: os.getpid()}]
    first, second = (Ranks(group, store.store, limit(10), NoPeers()) for group in groups)

    def task(ranks: Ranks) -> dict[str, Any]:
        return {"exchange": lambda content: numbers_rank.exchange(ranks, content)}

    other = threading.Thread(target=second.serve, args=(task(second),))
    other.start()
    content = 5, "float32", 0
    total, _ = first.lead("exchange", content, lambda: numbers_rank.exchange(first, content))
    assert torch.equal(total, numbers_rank.numbers(0, 5) + numbers_rank.numbers(1, 5))
    first.lead(STOP, None, lambda: None)
    other.join()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"host": "another", "name": "far"}, r"this rank runs on .* and rank 0 on far; take transport: gloo"),
        ({"path": "/proc/0/fd/3"}, r"cannot open rank 0's memory at /proc/0/fd/3 \(.*\).*take transport: gloo"),
        ({"file": [0, 0]}, "this rank sees other processes than rank 0; take transport: gloo"),
    ],
)
def test_a_rank_that_cannot_map_the_memory_says_why_and_rank_0_too(changes: dict[str, Any], words: str) -> None:
    _first = open_group(store := Store(**changes), 0, 2)  # its memory lives as long as it
    for meet in (open_group, processes_of):
        with pytest.raises(WorkbenchError, match=f"parallel.tensor: rank 1: transport shared_memory: {words}"):
            meet(store, int(meet is open_group), 2)


def test_torch_distributed_has_the_backend() -> None:
    torch.distributed.init_process_group("shared_memory", store=torch.distributed.HashStore(), rank=0, world_size=1)
    torch.distributed.all_gather([own := torch.zeros(3)], given := torch.arange(3.0))
    torch.distributed.broadcast(own, 0)
    torch.distributed.destroy_process_group()
    assert torch.equal(own, given)


def test_processes_on_several_hosts_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert "2 of 4 processes on this host; take transport: gloo" in (torchrun_problem("shared_memory", 4) or "")
    assert "torchrun started 4 processes, and parallel.tensor is 2" in (torchrun_problem("shared_memory", 2) or "")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert torchrun_problem("shared_memory", 4) is None


def test_the_end_of_a_process_that_is_no_child_is_noticed() -> None:
    """A grandchild: its parent has ended, and this process cannot wait for it."""
    child = "import subprocess as s; print(s.Popen(['sleep', '999'], stdout=s.DEVNULL, stderr=s.DEVNULL).pid)"
    pid = int(subprocess.run([sys.executable, "-c", child], capture_output=True, check=True).stdout)
    peers = TorchrunPeers({3: pid})
    peers.check()
    os.kill(pid, 9)

    def ended() -> bool:
        try:
            peers.check()
        except RankFailed as error:
            return "rank 3 ended" in str(error)
        return False

    until(ended)


DIES = """
import os, signal, sys
from tests.tensor_parallel import numbers_rank
from workbench.errors import WorkbenchError
if os.environ["RANK"] != "0":
    numbers_rank.main()
    sys.exit()
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of torchrun, which ends the others: this one has to say its words first
from workbench.tensor_parallel.torchrun import TorchrunRanks
others = TorchrunRanks(2, 999.0, "shared_memory")
content = 5, "float32", b""
print(others.ranks.lead("exchange", content, lambda: numbers_rank.exchange(others.ranks, content))[0].shape, flush=True)
for _ in range(2):
    try:
        others.ranks.lead("die", 1, lambda: numbers_rank.die(others.ranks, 1))
    except WorkbenchError as error:
        print(error, flush=True)
others.close()
"""


@pytest.mark.processes
def test_a_rank_of_torchrun_that_dies_ends_requests_with_a_reason() -> None:
    """Long before its limit of 999 s; nothing is left."""
    left = LeftBehind()
    script = ["--no-python", sys.executable, "-c", DIES]
    command = [sys.executable, "-m", *TORCHRUN, *script]
    ran = subprocess.run(command, env=left.environment, capture_output=True, text=True, check=False)
    said = "parallel.tensor: rank 1 ended, and torchrun says how; load the model again\n"
    assert ran.returncode and ran.stdout == "torch.Size([5])\n" + 2 * said, ran.stdout + ran.stderr
    until(lambda: not left.processes() and not left.names())
