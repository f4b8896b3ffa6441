"""Entries name files by their path below the checkout."""

from __future__ import annotations

import pytest

from tests.kept_cache import ROOT


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
