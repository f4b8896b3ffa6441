"""Fixtures of several files of engine tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.kernels import on_threads


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Let torch have two threads in a test."""
    with on_threads(2):
        yield
