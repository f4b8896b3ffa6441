"""Fixtures of several files of engine tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from compiled_kernels.paged_attention import inductor as paged_inductor
from workbench.executors.programs import inductor


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Let torch have two threads in a test."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run as the Python that it is what Inductor compiles."""
    for module in (inductor, paged_inductor):
        monkeypatch.setattr(module, "compile_once", lambda function, **_: function)
