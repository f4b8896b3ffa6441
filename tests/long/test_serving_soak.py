"""The replies of `tests/long/serving_soak.py`: an answer that is cut, another status and an error are each a fault."""

from __future__ import annotations

import pytest

from experiments.serving_client import Reply
from tests.long.serving_soak import KINDS, draw_ask, fault, quantiles

STREAM, WHOLE = {"content-type": "text/event-stream; charset=utf-8"}, {"content-type": "application/json"}
ENDS = {"messages": '{"type":"message_stop"}', "response": '{"type":"response.completed"}'}


def right_reply(kind: str) -> Reply:
    if kind == "refused":
        return Reply(status=400, events=["{}"], headers=WHOLE)
    if "whole" in kind:
        return Reply(status=200, events=["{}"], headers=WHOLE)
    return Reply(status=200, events=["{}", ENDS.get(kind.split()[0], "[DONE]")], headers=STREAM)


@pytest.mark.parametrize("kind", KINDS)
def test_a_right_reply_has_no_fault_and_each_other_one_has(kind: str) -> None:
    assert fault(kind, right_reply(kind)) == ""
    for status in {200, 400, 500} - {right_reply(kind).status}:
        wrong = right_reply(kind)
        wrong.status = status
        assert f"status {status}" in fault(kind, wrong)
    if kind == "refused":
        return
    cut = right_reply(kind)
    cut.events.pop()
    assert fault(kind, cut)
    failed = right_reply(kind)
    if "whole" in kind:
        failed.events.clear()
    else:
        failed.events.append('{"error": {}}')
    assert fault(kind, failed)
    if "whole" not in kind:
        failed = right_reply(kind)
        failed.headers = WHOLE
        assert fault(kind, failed) == "no stream came"


def test_a_seed_decides_the_request_and_all_kinds_and_clients_that_leave_come() -> None:
    drawn = [draw_ask(seed, "m", KINDS) for seed in range(400)]
    assert drawn == [draw_ask(seed, "m", KINDS) for seed in range(400)]
    assert {kind for kind, _ in drawn} == {*KINDS}
    assert 20 <= sum(request.leave_after is not None for _, request in drawn) <= 60


def test_times_are_of_whole_streams_and_gaps_of_long_ones() -> None:
    short = Reply(sent=1.0, times=[3.0, 4.0], headers=STREAM)
    long = Reply(sent=1.0, times=[2.0 + n / 2 for n in range(9)], headers=STREAM)
    others = [Reply(sent=0.0, times=[50.0], headers=WHOLE), Reply(sent=0.0, times=[50.0], headers=STREAM, left=True)]
    assert quantiles([short, long, *others]) == {"to the first event": [1.5, 1.99], "between events": [0.5, 0.5]}
    assert quantiles([]) == {}
