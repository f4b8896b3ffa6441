"""Random kills of the experiment, a few: nothing is left, and what is left is found."""

from __future__ import annotations

import json
import os
import random
import subprocess

import pytest

from tests.helpers.processes import start_python
from tests.long.random_kills import (
    FAILED,
    MARK,
    SERVICES,
    TOKENS,
    asked_requests,
    ending,
    faults_of,
    kill_once,
    marked,
    rank_faults,
)
from tests.patience import until
from tests.thorough import run_seed
from workbench.trace.events import Decoded, Finished


@pytest.mark.processes
@pytest.mark.sampled(1)
@pytest.mark.parametrize("service", SERVICES[:2])  # ranks: tests/tensor_parallel/test_shared_model.py
def test_nothing_is_left_after_a_random_kill(service: str) -> None:
    row = kill_once(service, random.Random(run_seed()))
    assert not row["faults"], row


def test_a_process_that_is_left_is_found() -> None:
    """Under another parent too: the mark is in the environment."""
    script = "import subprocess, sys; subprocess.Popen(['cat'], stdin=sys.stdin)"
    mine, its = os.pipe()
    with os.fdopen(mine) as reading:
        with start_python("-c", script, env=os.environ | {MARK: "7"}, stdin=reading) as first:
            assert first.wait() == 0
        assert len(marked("7")) == 1 and not marked("8")
        os.close(its)
        until(lambda: not marked("7"))


def test_a_doubled_token_beside_a_lost_one_is_found() -> None:
    """As many tokens as were asked for, and the wrong ones: in the stream, or in what the end says."""
    ids = [7, 8, 9]

    def run(streamed: list[tuple[int, int]], ended: list[int]) -> list[str]:
        events = [Decoded(0.0, "r0", index=index, token_id=token) for index, token in streamed]
        return faults_of([*events, Finished(1.0, "r0", token_ids=tuple(ended))], {"r0": ids})

    assert run([(0, 7), (1, 8), (2, 9)], ids) == []
    assert "streamed" in run([(0, 7), (1, 7), (2, 9)], ids)[0]
    assert "streamed" in run([(0, 7), (0, 7), (2, 9)], ids)[0]
    assert "ended with [7, 7, 9]" in run([(0, 7), (1, 8), (2, 9)], [7, 7, 9])[0]
    assert faults_of([], {"r0": ids}), "a request that never ended"


def test_requests_of_ranks_end_by_all_their_tokens_or_by_the_rank_that_was_killed() -> None:
    lost = "parallel.tensor: rank 1 ended (signal 9), and the other ranks were ended; load the model again"
    names = [each.request_id for each in asked_requests()]
    whole = [Finished(1.0, name, token_ids=(7,) * TOKENS) for name in names]
    assert faults_of([], None) == [f"{name} never ended" for name in names]
    assert faults_of(whole, None) == []
    assert faults_of([*whole[1:], Finished(1.0, names[0], token_ids=(7,))], None) == [f"{names[0]} has 1 tokens"]
    assert faults_of([*whole[1:], Finished(1.0, names[0], error=lost)], None) == [lost]
    assert rank_faults(f"r1\n{FAILED}{json.dumps([lost, 'r2 never ended', 'out of memory'])}\n") == [
        "r2 never ended", "out of memory",
    ]  # fmt: skip
    assert rank_faults(f"{FAILED}{json.dumps([lost])}") == []
    assert rank_faults("Traceback\nValueError: x") == ["it said no faults: Traceback\nValueError: x"]


def test_a_service_that_waits_is_ended() -> None:
    with subprocess.Popen(["sleep", "1000"], env=os.environ | {MARK: "9"}, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        with ending("9", 0.1) as is_late:
            assert process.stdout.read() == b""
        assert is_late.is_set()
