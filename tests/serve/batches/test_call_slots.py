"""The slots of batches: what their calls hold together leaves slots and pages to clients."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.event_loop import run_async
from tests.patience import limit, until
from tests.thorough import tries
from workbench.serve.batches.call_slots import CallSlots
from workbench.serve.call import Call
from workbench.serve.server import Server

PATH = "/v1/chat/completions"
ASK = {"model": "demo-chat", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 100, "temperature": 0}


@settings(max_examples=tries(30), deadline=None)
@given(
    calls=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 900), st.integers(1, 3)), min_size=1, max_size=12),
    num_pages=st.integers(2, 64),
)
def test_batches_leave_half_of_the_slots_and_of_the_cache(calls: list[tuple[int, int, int]], num_pages: int) -> None:
    """Calls (sequences, tokens, turns of the loop that they last) never hold more together, and all of them run."""
    runner = SimpleNamespace(config=SimpleNamespace(schedule=SimpleNamespace(max_num_seqs=8)))
    model = SimpleNamespace(runner=runner, cache_tokens=num_pages * 16)
    service: Any = SimpleNamespace(models={"m": model}, settings=SimpleNamespace(batch_calls=100), num_waiting=0)
    room, held = num_pages * 16 // 2, Counter[str]()

    async def one(slots: CallSlots, sequences: int, tokens: int, turns: int) -> None:
        async with AsyncExitStack() as stack:
            async with slots.head:
                await stack.enter_async_context(slots.take(sequences, "m", tokens))
            held.update(sequences=min(sequences, 4), tokens=min(tokens, room))
            assert held["sequences"] <= 4 and held["tokens"] <= room
            for _ in range(turns):
                await asyncio.sleep(0)
            held.update(sequences=-min(sequences, 4), tokens=-min(tokens, room))
            held["done"] += 1

    async def whole() -> None:
        slots = CallSlots(service)
        await asyncio.gather(*(one(slots, *each) for each in calls))

    run_async(whole())
    assert held["done"] == len(calls)


def test_each_model_has_room_of_its_own_and_an_alias_that_of_the_smallest() -> None:
    runner = SimpleNamespace(config=SimpleNamespace(schedule=SimpleNamespace(max_num_seqs=8)))
    models = {name: SimpleNamespace(runner=runner, cache_tokens=size) for name, size in (("a", 64), ("b", 40))}

    class Service(SimpleNamespace):
        num_waiting = property(lambda self: next(self.looks))  # a fourth look is of a call that waits

    service: Any = Service(models=models, settings=SimpleNamespace(batch_calls=3), looks=iter([0] * 3))

    async def whole() -> None:
        slots = CallSlots(service)
        assert slots.number == 3 and [slots.room(name) for name in ("a", "b", "auto")] == [32, 20, 20]
        async with AsyncExitStack() as stack:
            for name in ("a", "b", "auto"):
                await stack.enter_async_context(slots.take(1, name, slots.room(name)))
            assert slots.taken == 3

    run_async(whole())


def test_a_line_waits_for_room_in_the_cache(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    service, at_once = server.service, []
    begin = service.begin

    async def counted(call: Call) -> Any:
        run = await begin(call)
        at_once.append(sum(each.call.background for each in service.runs))
        return run

    monkeypatch.setattr(service, "begin", counted)
    monkeypatch.setattr(server.app.state.batches.slots, "room", lambda model: 300)
    lines = [{"custom_id": str(n), "method": "POST", "url": PATH, "body": ASK} for n in range(4)]
    content = "\n".join(map(json.dumps, lines))
    with httpx.Client(base_url=f"{server.url}/v1", timeout=limit(60)) as client:
        file = client.post("/files", data={"purpose": "batch"}, files={"file": ("a.jsonl", content)}).json()["id"]
        body = {"input_file_id": file, "endpoint": PATH, "completion_window": "24h"}
        batch = client.post("/batches", json=body).json()["id"]
        until(lambda: client.get(f"/batches/{batch}").json()["status"] == "completed")
        assert client.get(f"/batches/{batch}").json()["request_counts"]["completed"] == 4
    assert at_once == [1] * 4
