"""Ranks as processes, on each transport: the same sums in the same order, and a clear end of what goes wrong."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.patience import limit, until
from tests.tensor_parallel import numbers_rank
from tests.tensor_parallel.left_behind import LeftBehind
from tests.tensor_parallel.numbers_rank import numbers
from tests.tensor_parallel.specs import TRANSPORTS
from workbench.errors import WorkbenchError
from workbench.tensor_parallel.distributed import distributed_problem
from workbench.tensor_parallel.processes import LOOPBACK, RankProcesses, transport_problem
from workbench.tensor_parallel.ranks import CHUNK_BYTES, RankFailed, Transport

pytestmark = pytest.mark.processes
MODULE = "tests.tensor_parallel.numbers_rank"


@contextmanager
def started(size: int, transport: Transport, timeout: float | None = None) -> Iterator[RankProcesses]:
    if problem := transport_problem(transport, size):
        pytest.skip(problem)
    processes = RankProcesses(size, timeout or limit(10), MODULE, transport)
    try:
        yield processes
    finally:
        processes.close()
    assert all(process.poll() is not None for process in processes.processes)


def lead(processes: RankProcesses, kind: str, content: Any) -> Any:
    own = getattr(numbers_rank, kind)
    return processes.ranks.lead(kind, content, lambda: own(processes.ranks, content))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_sum_is_in_the_order_of_ranks_whatever_carries_it(transport: Transport) -> None:
    """Of three ranks and more another order gives other bits; a task and an exchange may be long."""
    with started(3, transport) as processes:
        for count, dtype in ((1, "float32"), (577, "bfloat16"), (CHUNK_BYTES // 4 + 3, "float32"), (40, "float64")):
            content = count, dtype, b"x" * count  # longer than what is sent at once
            total, gathered = lead(processes, "exchange", content)
            parts = [numbers(rank, count, dtype) for rank in range(3)]
            exact = torch.promote_types(parts[0].dtype, torch.float32)
            assert torch.equal(total, ((parts[0].to(exact) + parts[1]) + parts[2]).to(parts[0].dtype))
            assert torch.equal(gathered, torch.stack(parts))
            backwards = ((parts[2].to(exact) + parts[1]) + parts[0]).to(parts[0].dtype)
            assert count < 100 or dtype == "bfloat16" or not torch.equal(total, backwards)
        assert processes.ranks.traffic.exchanges == 8


@pytest.mark.parametrize("who", [0, 2])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_task_that_fails_on_one_rank_ends_with_its_words(transport: Transport, who: int) -> None:
    """In shared memory the ranks go on; torch.distributed's calls cannot be taken back, and its ranks end."""
    with started(3, transport) as processes:
        with pytest.raises(WorkbenchError, match=rf"(rank {who}: )?no memory left here \({who}\)"):
            lead(processes, "fail", who)
        if transport == "shared_memory":
            assert lead(processes, "exchange", (3, "float32", b""))[0].shape == (3,)
            return
        with pytest.raises(RankFailed, match=rf"no memory left here \({who}\).*load the model again"):
            lead(processes, "exchange", (3, "float32", b""))
        assert all(process.poll() is not None for process in processes.processes)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_computes_something_else_is_named(transport: Transport) -> None:
    with (
        started(3, transport) as processes,
        pytest.raises(RankFailed, match="rank 2 computed another step than rank 0"),
    ):
        lead(processes, "part", 2)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_does_not_answer_is_given_up_in_time(transport: Transport) -> None:
    with started(2, transport, timeout=limit(0.1)) as processes:
        with pytest.raises(RankFailed, match=f"did not answer for {limit(0.1):g} s; load the model again"):
            lead(processes, "hang", 1)
        assert processes.processes[0].poll() is not None


HANGS = """
import sys
from tests.tensor_parallel import numbers_rank
from workbench.errors import WorkbenchError
from workbench.tensor_parallel.torchrun import TorchrunRanks
others = TorchrunRanks(2, float(sys.argv[1]), sys.argv[2])
try:
    others.ranks.lead("hang", 1, lambda: numbers_rank.hang(others.ranks, 1))
except WorkbenchError as error:
    print(error)
others.close()
print("closed")
"""


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_where_torchrun_started_a_rank_that_hangs_rank_0_ends_as_failed(transport: Transport) -> None:
    """It cannot end the other; torchrun does, once one process has failed. It does not wait for it either."""
    left = LeftBehind()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    environment = left.environment | meeting | {"GLOO_SOCKET_IFNAME": LOOPBACK}
    other = subprocess.Popen([sys.executable, "-m", MODULE], env=environment | {"RANK": "1"})
    command = [sys.executable, "-c", HANGS, str(limit(0.1)), transport]
    first = subprocess.run(command, env=environment | {"RANK": "0"}, capture_output=True, text=True, check=False)
    other.kill()
    other.wait()
    assert first.returncode == 1 and "Traceback" not in first.stderr, first.stderr
    assert f"did not answer for {limit(0.1):g} s" in first.stdout and first.stdout.endswith("closed\n")
    until(lambda: not left.processes())


def test_one_group_of_torch_distributed_at_a_time() -> None:
    with started(2, "gloo"):
        assert "in use in this process already; close the other model" in (distributed_problem("gloo", 2) or "")
    assert distributed_problem("gloo", 2) is None
