"""Run a server in a thread next to a notebook's cells, or as the main work of a process."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError, installed_by

with installed_by("serve", "a server"):
    import httptools  # noqa: F401 (connections need it)
    import prometheus_client  # noqa: F401 (metrics need it)
    import uvicorn
    from fastapi import FastAPI

from workbench.cluster.cluster import Cluster
from workbench.display import Displayable, Table
from workbench.engine.runner import Runner
from workbench.serve.app import build_app
from workbench.serve.config import ServerSettings
from workbench.serve.connections import BoundedConnection
from workbench.serve.gate import Gate
from workbench.serve.served_model import ServedModel
from workbench.serve.service import Service
from workbench.serve.watch.serving_log import ServingLog

TICKS_A_SECOND = 10  # ticks of uvicorn's main loop
END_SECONDS = 5.0  # time for streams to write their last event, after draining


class _HttpServer(uvicorn.Server):
    """uvicorn with bounded connections, and with a final event for streams at the end of draining."""

    def __init__(self, config: uvicorn.Config, service: Service):
        super().__init__(config)
        self._service = service

    async def on_tick(self, counter: int) -> bool:
        if counter % TICKS_A_SECOND == 0:
            now = time.monotonic()
            for connection in list(self.server_state.connections):
                assert isinstance(connection, BoundedConnection)
                connection.check(self._service.settings, now)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.is_draining = True
        asyncio.get_running_loop().call_later(self._service.settings.drain_seconds, self._service.end_all)
        await super().shutdown(sockets)


class Server(Displayable):
    """A server in its own thread; see `serve`. `stop()` ends it, and so does leaving a `with` block.

    Attributes:
        url: the address, without a path.
        app: the application; `service` has its calls, metrics and traces.
    """

    def __init__(self, models: Mapping[str, ServedModel], gate: Gate | None, settings: ServerSettings):
        self.settings = settings
        self.app: FastAPI = build_app(models, gate, settings)
        self.service: Service = self.app.state.service
        self._http = _HttpServer(_uvicorn_config(self.app, settings), self.service)
        self._socket = _listen(settings)
        host, port = self._socket.getsockname()[:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)

    def start(self) -> Server:
        """Start the server; return when it accepts requests."""
        self._thread.start()
        self._begun.wait()
        if not self._http.started:
            raise WorkbenchError(f"the server at {self.url} did not start")
        return self

    def run(self) -> None:
        """Serve in this thread until SIGTERM or SIGINT; streams may then finish within `drain_seconds`."""
        self._http.run(sockets=[self._socket])

    def stop(self, seconds: float | None = None) -> None:
        """Stop: refuse new calls, let streams finish within `seconds` (default: `drain_seconds`), then return.

        The runners stay unchanged. A second call does nothing.
        """
        if seconds is not None:
            self.service.settings = self.settings.model_copy(update={"drain_seconds": max(seconds, 1e-3)})
            self._http.config.timeout_graceful_shutdown = int(seconds + END_SECONDS) + 1
        self._http.should_exit = True
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    @property
    def log(self) -> ServingLog:
        """Return the log of the server's work; `log.snapshot()` is its current state."""
        return self.service.log

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(0)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        finally:
            self._begun.set()

    async def _serve(self) -> None:
        async def tell() -> None:
            while not self._http.started:
                await asyncio.sleep(0.005)
            self._begun.set()

        telling = asyncio.create_task(tell())
        try:
            await self._http.serve(sockets=[self._socket])
        finally:
            telling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await telling

    def _display_table(self) -> Table:
        state = "running" if self.is_running else "stopped"
        rows = [("url", self.url), ("state", state), ("models", ", ".join(self.service.models))]
        rows += [("calls under way", len(self.service.runs))]
        return Table("server", rows)


def serve(
    runner: Runner | Cluster | Mapping[str, Runner | Cluster],
    port: int = 0,
    *,
    host: str = "127.0.0.1",
    gate: Gate | None = None,
    settings: ServerSettings | None = None,
    **options: Any,
) -> Server:
    """Serve a runner over HTTP, in a thread: OpenAI's and Anthropic's protocols. The runner stays usable in cells.

        server = workbench.serve(runner)
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any")

    Args:
        runner: the model, or several models by the name that clients give. A cluster serves with all its replicas.
        port: 0 takes any free port.
        host: address to listen on; default: loopback only.
        gate: gateway in front of the server (keys, limits, accounts; see `workbench.gateway`); default: none.
        settings: bounds and times; `options` override single settings.
        options: settings of `ServerSettings`, by name.

    Raises:
        WorkbenchError: for an unknown option, or an address in use.
    """
    values = (settings or ServerSettings()).model_dump() | {"host": host, "port": port} | options
    checked = parse_server_settings(values)
    runners = runner if isinstance(runner, Mapping) else {served_name_of(runner): runner}
    models = {name: ServedModel(name, each, checked.default_max_tokens) for name, each in runners.items()}
    if not models:
        raise WorkbenchError("serve: give a runner, or several by name")
    return Server(models, gate, checked).start()


def parse_server_settings(values: Mapping[str, Any]) -> ServerSettings:
    """Return server settings from plain values (WorkbenchError with the path of a wrong value)."""
    from pydantic import ValidationError

    from workbench.errors import explain

    try:
        return ServerSettings.model_validate(values)
    except ValidationError as error:
        raise explain(error, "serve", ServerSettings) from None


def served_name_of(runner: Runner | Cluster) -> str:
    """Return the default name of a served model: the name of its folder or file."""
    name = runner.config.model.name if runner.is_from_config else runner.model.spec.name
    return Path(name).name.removesuffix(".gguf") if "/" in name or "\\" in name else name


def _listen(settings: ServerSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((settings.host, settings.port))
        listening.listen(2048)
    except OSError as error:
        listening.close()
        reason = error.strerror or str(error)
        raise WorkbenchError(f"port {settings.port} at {settings.host}: {reason}; choose another, or 0") from None
    listening.setblocking(False)
    return listening


def _uvicorn_config(app: FastAPI, settings: ServerSettings) -> uvicorn.Config:
    return uvicorn.Config(
        app, http=BoundedConnection, ws="none", lifespan="on", log_level="warning", access_log=False,
        timeout_keep_alive=int(settings.idle_seconds) or 1,
        timeout_graceful_shutdown=int(settings.drain_seconds + END_SECONDS) + 1,
        server_header=False,
    )  # fmt: skip
