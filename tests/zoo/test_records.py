"""The stored summaries: each has the figures of its kind, and every entry that was measured says what held."""

from __future__ import annotations

import pytest

import workbench
from workbench.claims.comparison import FIGURES
from workbench.claims.technique import own_figures

ZOO = workbench.open_zoo()


@pytest.mark.parametrize("name", ZOO.items)
def test_a_measured_entry_has_its_figures_and_says_what_held(name: str) -> None:
    item = ZOO[name]
    known = {*FIGURES[item.settings.kind], *own_figures(item.entry.source_file)}
    for summary in item.entry.summaries:
        assert summary.figures.keys() <= known and set(item.entry.rule.figures) <= known
        assert summary.trial == "technique" and summary.model and summary.machine and summary.date
    assert bool(item.settings.held) == bool(item.entry.summaries)
