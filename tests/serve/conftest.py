from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.serve.serving import RecordingGate, check_idle
from workbench.engine.load import load
from workbench.engine.runner import Runner
from workbench.serve.server import Server, serve

if TYPE_CHECKING:
    import openai


@pytest.fixture(scope="session")
def chat_runner() -> Runner:
    """A runner whose prefix cache is off: pages in use are those of requests under way."""
    return load("demo-chat", backend="eager", max_num_batched_tokens=64, page_size=16)


@pytest.fixture(scope="session")
def gate() -> RecordingGate:
    return RecordingGate()


@pytest.fixture(scope="session")
def server(chat_runner: Runner, gate: RecordingGate) -> Iterator[Server]:
    with serve(chat_runner, gate=gate) as running:
        yield running


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test that has the server: no call under way, every page free."""
    yield
    if "server" in request.fixturenames:
        check_idle(request.getfixturevalue("server"), request.getfixturevalue("chat_runner"))


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    import openai

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as made:
        yield made
