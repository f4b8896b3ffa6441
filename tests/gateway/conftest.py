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


def _serve_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    if not has_redis:
        pytest.skip(NO_REDIS)
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


redis_server = pytest.fixture(_serve_redis, scope="session")  # which no test stops
own_redis = pytest.fixture(_serve_redis)  # which the test may kill
