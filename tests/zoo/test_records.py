"""The stored records: each has the verdict that its rule gives of its own figures, of an entry as it is."""

from __future__ import annotations

import pytest

from workbench.zoo.folder import ZOO_FOLDER
from workbench.zoo.record import RECORDS, ZooRecord
from workbench.zoo.rule import FigureRule
from workbench.zoo.zoo import open_zoo

NAMES = sorted(file.stem for file in (ZOO_FOLDER / RECORDS).glob("*.json"))


@pytest.mark.parametrize("name", NAMES)
def test_a_verdict_is_what_the_rule_gives_of_the_figures(name: str) -> None:
    record = ZooRecord.read(ZOO_FOLDER / RECORDS / f"{name}.json")
    assert record is not None
    rule = FigureRule.parse(record.entry["rule"], record.figures)
    assert (record.outcome, record.reason) == (rule.outcome(record.figures), rule.reason(record.figures))


def test_a_measured_entry_says_what_held() -> None:
    assert [item.name for item in open_zoo() if item.record and not item.settings.held] == []
