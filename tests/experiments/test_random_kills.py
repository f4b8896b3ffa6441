"""Random kills of the experiment, a few: nothing is left, and what is left is found."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest

from experiments.random_kills import MARK, SERVICES, faults_of, kill_once, marked
from tests.patience import until
from workbench.trace.events import Decoded, Finished


@pytest.mark.parametrize("service", SERVICES[:2])  # ranks: tests/tensor_parallel/test_shared_model.py
def test_nothing_is_left_after_a_random_kill(service: str) -> None:
    row = kill_once(service, random.Random())
    assert not row["faults"], row


def test_a_process_that_is_left_is_found() -> None:
    """Under another parent too: the mark is in the environment."""
    script = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'input()'], stdin=sys.stdin)"
    mine, its = os.pipe()
    with os.fdopen(mine) as reading:
        subprocess.run([sys.executable, "-c", script], env=os.environ | {MARK: "7"}, stdin=reading, check=True)
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
