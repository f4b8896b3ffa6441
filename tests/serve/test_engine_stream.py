"""The way of events from the engine to the calls: a fault in one call's is not that of the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

import workbench
from tests.patience import until
from tests.serve.serving import RecordingGate, connect, held_steps, pages_used, post, read_until
from workbench.engine.runner import Runner
from workbench.engine.runner_thread import RunnerThread
from workbench.serve.answers.answer_pieces import AnswerPieces
from workbench.serve.answers.pieces import Piece
from workbench.trace.events import Event, Finished

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {
    "model": "demo-chat", "messages": [{"role": "user", "content": "hi"}], "ignore_eos": True, "max_tokens": 9,
}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("at_end", [False, True], ids=["first event", "last event"])
def test_a_parser_that_raises_ends_its_call_alone(
    chat_runner: Runner,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    at_end: bool,
    stream: bool,
) -> None:
    """Both calls are of the same steps, and the one that fails comes first."""
    push = AnswerPieces.push

    def planted(self: AnswerPieces, events: Iterable[Event]) -> list[Piece]:
        events = list(events)
        if self.call.sampling.temperature == 0 and (not at_end or any(isinstance(each, Finished) for each in events)):
            raise KeyError("a parser's fault")
        return push(self, events)

    monkeypatch.setattr(AnswerPieces, "push", planted)
    gate = RecordingGate()
    with workbench.serve(chat_runner, gate=gate) as server:
        with held_steps(chat_runner) as steps, connect(server) as bad, connect(server) as good:
            bad.sendall(post(CHAT, {**ASK, "temperature": 0, "stream": stream}, connection="close"))
            assert steps.waiting.wait()
            good.sendall(post(CHAT, ASK, connection="close"))
            until(lambda: len(server.service.runs) == 2)
            steps.release()
            failed, answered = (read_until(each, lambda raw: False) for each in (bad, good))
        assert b"server_error" in failed
        assert b"a parser's fault" not in failed, "the engine's words may hold another tenant's data"
        assert "a parser's fault" in caplog.text
        assert answered.startswith(b"HTTP/1.1 200") and b'"completion_tokens":9' in answered
        until(lambda: not server.service.runs)
    assert sorted(outcome.ended for _, outcome in gate.outcomes) == ["failed", "finished"]
    assert RunnerThread.attach(chat_runner).call(pages_used) == 0
