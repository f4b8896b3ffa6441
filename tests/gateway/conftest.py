from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gateway.redis_server import NO_REDIS, RedisServer, has_redis
from workbench.engine.load import load
from workbench.engine.runner import Runner


@pytest.fixture(scope="session")
def chat_runner() -> Runner:
    """The runner of all servers behind gateways; its prefix cache is off."""
    return load("demo-chat", backend="eager", max_num_batched_tokens=128, page_size=16)


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A server that no test stops."""
    if not has_redis:
        pytest.skip(NO_REDIS)
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture
def own_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A server that the test may kill."""
    if not has_redis:
        pytest.skip(NO_REDIS)
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()
