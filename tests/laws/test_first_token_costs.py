"""The step times of a claim: a context of n tokens is read as n tokens, the query's own among them."""

from __future__ import annotations

import pytest

from workbench.claims.break_even import RooflineMachine
from workbench.simulate.roofline import HARDWARE

SHAPE = "llama-3.1-8b"


@pytest.mark.parametrize("hardware", HARDWARE)
def test_a_decode_of_one_token_is_a_prefill_of_one(hardware: str) -> None:
    """Both are the step over position 0 alone."""
    machine = RooflineMachine.build(SHAPE, hardware)
    assert machine.decode(1) == machine.prefill(1)
    assert machine.decode(2) > machine.decode(1)
