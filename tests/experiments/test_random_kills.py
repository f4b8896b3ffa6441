"""Random kills of the experiment, a few: nothing is left, and what is left is found."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest

from experiments.random_kills import MARK, SERVICES, kill_once, marked
from tests.patience import until


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
