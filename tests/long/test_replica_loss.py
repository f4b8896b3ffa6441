"""The experiment of a lost replica fails where one of its rules is missed."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from experiments.serving_client import Reply
from tests.long import fleet_server, replica_loss
from tests.long.replica_loss import RandomKills, Wanted, main, missed, usage_alone

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


def as_reply(wanted: Wanted) -> Reply:
    """Return the stream that gives an answer."""
    used = {"prompt_tokens": wanted.prompt_tokens, "completion_tokens": sum(map(len, wanted.token_ids))}
    choices = [
        {"index": number, "text": text, "token_ids": wanted.token_ids[number], "finish_reason": "length"}
        for number, text in enumerate(wanted.texts)
    ]
    return Reply(status=200, events=[json.dumps({"id": "call-1", "choices": choices, "usage": used}), "[DONE]"])


class StubServer:
    """A server that two replicas answer, one of which is replaced."""

    def __init__(self, *_: Any):
        self.pids, self.url = [[1, 2], [2, 3]], ""

    def __enter__(self) -> StubServer:
        return self

    def __exit__(self, *_: object) -> None: ...

    def replicas(self) -> list[int]:
        return self.pids.pop(0)

    def trace(self, name: str) -> dict[str, Any]:
        assert name == "call-1"
        return {"decisions": []}

    def metric(self, name: str) -> float:
        return {"workbench:replicas": 2.0}.get(name, 0.0)

    def stop(self) -> int:
        return 128 + signal.SIGTERM


@pytest.mark.parametrize("left", [[], ["process 9"]])
@pytest.mark.parametrize("second", [as_reply(WANTED[1]), ConnectionResetError(), Reply(), Reply(0, 400, [], ["{}"])])
def test_an_answer_that_fails_and_a_process_that_stays_are_recorded(
    second: Reply | BaseException, left: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask_and_kill(*_: Any) -> list[Reply | BaseException]:
        return [as_reply(WANTED[0]), second]

    def replace(name: str, value: Callable[..., Any]) -> None:
        monkeypatch.setattr(replica_loss, name, value)

    monkeypatch.setattr(fleet_server, "PATIENCE_SECONDS", 0.05)
    replace("FleetServer", StubServer)
    replace("Traces", lambda server: type("", (), {"left": lambda self: left})())
    replace("answers_alone", lambda bodies: WANTED)
    replace("ask_and_kill", ask_and_kill)
    replace("usage_of", lambda server: usage_alone(WANTED))
    record = replica_loss.one_loss(2, 0)
    is_answered = isinstance(second, Reply) and second.status == 200
    assert record["met"] == {
        "answers": is_answered, "moved": False, "usage": True, "pages": True, "replaced": True, "ended": not left,
    }  # fmt: skip
    assert len(record["faults"]) == (not is_answered) and record["left"] == left and len(record["late"]) == len(left)


def test_a_late_kill_is_a_missed_rule_and_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    for killed, rule in (("replica", "replaced"), ("front", "nothing left")):
        monkeypatch.setattr(replica_loss, "answers_alone", lambda bodies: WANTED)
        monkeypatch.setattr(RandomKills, "next", lambda run, killed=killed: {"killed": killed, "late": ["not yet"]})
        found = replica_loss.random_kills(3, 2, 0)
        assert len(found["kills"]) == 1 and [name for name, is_met in found["met"].items() if not is_met] == [rule]
