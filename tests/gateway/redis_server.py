"""Start a Redis server of the tests' own on a free port of loopback; kill it, and start it again there."""

from __future__ import annotations

import shutil
import socket
import subprocess
from pathlib import Path

import redis
from redis.exceptions import ConnectionError as RedisConnectionError

from tests.patience import limit

NO_REDIS = "needs redis-server (apt-get install redis-server); .ci/run installs it"
has_redis = shutil.which("redis-server") is not None


class RedisServer:
    """A server without persistence, in `folder`."""

    def __init__(self, folder: Path):
        self.folder, self.port = folder, _free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        log = (self.folder / "redis.log").open("ab")
        self._process = subprocess.Popen(
            [*command, "--dir", str(self.folder)], stdout=log, stderr=log, stdin=subprocess.DEVNULL
        )
        log.close()
        client = redis.Redis.from_url(self.url, retry=None)
        for _ in range(200):
            try:
                client.ping()
                break
            except RedisConnectionError:
                self._waits()
        else:
            raise AssertionError((self.folder / "redis.log").read_text())
        client.close()

    def _waits(self) -> None:
        assert self._process is not None
        try:
            self._process.wait(timeout=limit(0.05))
        except subprocess.TimeoutExpired:
            return
        raise AssertionError((self.folder / "redis.log").read_text())

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._process = None

    def stop(self) -> None:
        if self._process is not None:
            self.kill()


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]
