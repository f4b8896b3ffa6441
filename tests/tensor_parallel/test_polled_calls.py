"""Wait for calls of NCCL by stand-ins that behave as `WorkNCCL` in PyTorch's source; here are no two devices."""

from __future__ import annotations

from datetime import timedelta

import pytest
from torch.distributed import ProcessGroup

from workbench.tensor_parallel import ranks as module
from workbench.tensor_parallel.ranks import NoPeers, RankFailed, Ranks


class Call:
    """End after some looks, well or with `error`. To wait before that with a limit makes it fail, without one does
    nothing."""

    def __init__(self, looks: int, error: str = ""):
        self.looks, self.error, self.waited = looks, error, False

    def is_completed(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def wait(self, timeout: timedelta | None = None) -> None:
        if self.looks >= 0 and timeout is not None:
            self.looks, self.error = -1, "timed out in blocking wait"
        self.waited = self.looks < 0 and timeout is not None
        if self.error and self.waited:
            raise RuntimeError(self.error)


class Store:
    """Say that no rank failed."""

    def check(self, names: list[str]) -> bool:
        return False


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    """Give rank 0 of two, without a group, that looks after the others at each look at a call."""
    monkeypatch.setattr(module, "LOOK_SECONDS", -1.0)
    monkeypatch.setattr(module, "GRACE_SECONDS", -1.0)
    group = ProcessGroup(0, 2)  # pyright: ignore[reportCallIssue] (its stub has one of the two forms)
    return Ranks(group, Store(), 999.0, NoPeers())


@pytest.mark.parametrize("looks", [0, 1, 100])
def test_a_call_that_takes_longer_than_a_look_is_waited_for(ranks: Ranks, looks: int) -> None:
    ranks._wait(call := Call(looks), on_cuda=True)
    assert call.waited and ranks.broken is None  # what follows on the stream comes after it


def test_a_call_that_fails_breaks_the_ranks_with_its_words(ranks: Ranks) -> None:
    with pytest.raises(RankFailed, match="a rank was lost: remote process exited; load the model again"):
        ranks._wait(Call(3, "remote process exited"), on_cuda=True)
    assert ranks.broken


def test_a_call_that_never_ends_is_given_up_at_the_limit(ranks: Ranks) -> None:
    with pytest.raises(RankFailed, match="another rank did not answer for 0 s"):
        ranks._wait(Call(10**9), 0.0, on_cuda=True)
