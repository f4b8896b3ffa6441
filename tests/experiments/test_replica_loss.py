"""The experiment of a lost replica fails where one of its rules is missed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer

from experiments import replica_loss
from experiments.replica_loss import RandomKills, Wanted, main, missed, usage_alone

WANTED = [Wanted(("a", "b"), ((1, 2), (3,)), 7), Wanted(("c",), ((4,),), 5)]


def test_a_rule_that_is_missed_ends_it_with_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    loss: dict[str, Any] = {"met": {"answers": True, "usage": True}, "story": []}
    monkeypatch.setattr(replica_loss, "one_loss", lambda count, seed: loss)
    main(out=tmp_path)
    loss["met"]["usage"] = False
    with pytest.raises(typer.Exit) as caught:
        main(out=tmp_path)
    assert caught.value.exit_code == 1
    assert missed({"seed": 1, "loss": loss}) == ["loss: usage"]


@pytest.mark.parametrize("output", [8, 9])
def test_random_kills_check_the_account(output: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert usage_alone(WANTED) == {"prompt": 12, "output": 4}
    own = usage_alone(WANTED, 2)
    rows = [{"killed": "replica", "usage": own | {"output": output}, "usage_alone": own}, {"killed": "front"}]
    monkeypatch.setattr(replica_loss, "answers_alone", lambda bodies: WANTED)
    monkeypatch.setattr(RandomKills, "next", lambda run: rows.pop(0))
    assert replica_loss.random_kills(2, 2, 0)["met"]["usage"] == (output == 8)
