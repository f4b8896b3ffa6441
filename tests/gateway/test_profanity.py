"""The small classifier of moderation finds what the guide says, also in the middle of a long text."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from workbench.errors import WorkbenchError
from workbench.gateway.answer_cache import AnswerCache, AnswerCacheConfig, SemanticConfig
from workbench.gateway.moderation import Moderation, ModerationConfig
from workbench.request import CustomPart

GUIDE = Path(__file__).parents[2] / "docs/guide/serving.md"
PART = CustomPart(path="workbench.gateway.profanity:OffensiveLanguage")


def test_the_table_of_the_guide() -> None:
    pytest.importorskip("profanity_check", reason="the trained model: pip install alt-profanity-check")
    from workbench.gateway.profanity import FOUND, OffensiveLanguage

    find = OffensiveLanguage()
    section = GUIDE.read_text().partition("## What the small classifier finds")[2].partition("## ")[0]
    rows = re.findall(r"^\| (.*?) \| (yes|no)\b", section, re.M)
    assert len(rows) > 15 and {said for _, said in rows} == {"yes", "no"}
    for text, said in rows:
        assert find(text) == (FOUND if said == "yes" else ""), text
    filler = "The weather is nice today. "
    for before, after in ((0, 100), (50, 50), (100, 0), (3, 2)):
        assert find(filler * before + "You are a stupid idiot. " + filler * after) == FOUND
    assert find(filler * 100) == find("") == find(" \n") == ""
    strict = OffensiveLanguage(threshold=1.1)
    assert strict("You are a stupid idiot") == ""


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "profanity_check", None)
    with pytest.raises(WorkbenchError, match=r"inference-workbench\[moderation\]"):
        Moderation(ModerationConfig(classifier=PART))
    monkeypatch.setitem(sys.modules, "wordllama", None)
    with pytest.raises(WorkbenchError, match=r"inference-workbench\[semantic\]"):
        AnswerCache(AnswerCacheConfig(semantic=SemanticConfig()))
