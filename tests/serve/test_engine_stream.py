"""The way of events from the engine to the calls: a fault in one call's is not that of the others."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import workbench
from tests.event_loop import run_async
from tests.patience import until
from tests.serve.serving import RecordingGate, connect, held_steps, pages_used, post, read_until
from tests.thorough import tries
from workbench.engine.runner import Runner
from workbench.engine.runner_thread import RunnerThread
from workbench.prompt.answers import AnswerFormat
from workbench.request import Request, SamplingParameters
from workbench.serve.answers.answer_pieces import AnswerPieces
from workbench.serve.answers.engine_stream import EngineStream, StepBridge
from workbench.serve.answers.pieces import Ended, Piece, Text
from workbench.serve.call import Call
from workbench.serve.served_model import PreparedPrompt, ServedModel
from workbench.serve.server import Server
from workbench.trace.events import Decoded, Event, Finished, Prefilled

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {
    "model": "demo-chat", "messages": [{"role": "user", "content": "hi"}], "ignore_eos": True, "max_tokens": 9,
}  # fmt: skip


def read(model: ServedModel, steps: list[list[Event]], pauses: list[int]) -> list[Piece]:
    """Return the pieces of a call that its reader gets: it reads again `pauses` steps after each that it read."""
    sampling = SamplingParameters(max_tokens=99)
    call = Call("c", "openai.chat", model.name, ((5, 6),), sampling)
    assert model.tokenizer is not None and model.runner.chat_template is not None
    format = AnswerFormat.from_template(model.runner.chat_template, model.tokenizer)
    prepared = [PreparedPrompt(Request("c", (5, 6), sampling), format)]

    async def run() -> list[Piece]:
        bridge = StepBridge(asyncio.get_running_loop(), model.thread)
        stream, found, turn = EngineStream(call, model, prepared, bridge, lambda _: None, 999), list[Piece](), 0

        async def read_slowly() -> None:
            for pause in itertools.chain(pauses, itertools.repeat(0)):
                if (pieces := await stream.next()) is None:
                    return
                found.extend(pieces)
                last = turn + pause
                while turn < min(last, len(steps)):
                    await asyncio.sleep(0)

        reader = asyncio.create_task(read_slowly())
        for turn, events in enumerate(steps, 1):
            stream.receive(events, turn == len(steps), "")
            for _ in range(4):  # turns of the loop in which the reader may read
                await asyncio.sleep(0)
        await reader
        bridge.close()
        return found

    return run_async(run())


@settings(max_examples=tries(60), deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(st.text("ab é☃<", min_size=1, max_size=20), st.lists(st.integers(0, 9), max_size=9), st.data())
def test_a_slow_reader_gets_the_pieces_of_a_quick_one(
    server: Server, text: str, pauses: list[int], data: st.DataObject
) -> None:
    (model,) = server.service.models.values()
    assert model.tokenizer is not None
    ids = tuple(model.tokenizer.encode(text))
    events: list[Event] = [Decoded(0.0, "c", token_id=token, index=index) for index, token in enumerate(ids)]
    steps = [[event] for event in [Prefilled(0.0, "c", tokens=2, computed=2), *events]]
    steps.append([Finished(0.0, "c", reason="length", token_ids=ids, ended_by="max_tokens")])
    joined = data.draw(st.lists(st.booleans(), min_size=len(steps), max_size=len(steps)))
    together = [list(itertools.chain(*each)) for each in _groups(steps, joined)]
    quick = read(model, steps, [])
    assert whole(quick)[0] == text and sum(isinstance(each, Ended) for each in quick) == 1
    assert read(model, steps, pauses) == quick, "one step after another"
    assert whole(read(model, together, pauses)) == whole(quick), "several events a step"


def whole(pieces: list[Piece]) -> tuple[str, tuple[int, ...], list[Piece]]:
    """Return the text, the tokens and all other pieces: where a text is cut depends on the steps."""
    texts = [each for each in pieces if isinstance(each, Text)]
    others = [each for each in pieces if not isinstance(each, Text)]
    return "".join(each.text for each in texts), tuple(id for each in texts for id in each.token_ids), others


def _groups(steps: list[list[Event]], joined: list[bool]) -> list[list[list[Event]]]:
    groups: list[list[list[Event]]] = []
    for step, joins in zip(steps, joined, strict=True):
        if joins and groups:
            groups[-1].append(step)
        else:
            groups.append([step])
    return groups


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
