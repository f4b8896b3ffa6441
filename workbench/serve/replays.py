"""Run answered calls again, between the steps of the engine that answered them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from workbench.engine.runner import Runner
from workbench.engine.runner_thread import RunnerThread
from workbench.errors import WorkbenchError
from workbench.files import without_own_paths
from workbench.serve.bodies.fields import invalid
from workbench.serve.config import ServerSettings
from workbench.serve.errors import ApiError
from workbench.serve.served_model import PreparedPrompt, ServedModel
from workbench.serve.watch.kept_requests import KeptCall, KeptRequests


class Replays:
    """The stored requests of a server with `replay_folder`, and their replays.

    Steps of a fleet happen in its replicas and are not stored.
    """

    def __init__(self, models: Mapping[str, ServedModel], settings: ServerSettings):
        self._models, self._folder = models, settings.replay_folder
        kept = () if self._folder is None else (each for each in models.values() if each.fleet is None)
        self._kept = {
            each.name: KeptRequests(Path(self._folder or ""), each, settings.replay_bytes) for each in kept
        }  # fmt: skip
        self._turn = asyncio.Lock()

    def listen(self) -> list[Callable[[], None]]:
        """Store the models' events from now on; return functions that stop it."""
        return [self._models[name].thread.listen(each.record) for name, each in self._kept.items()]

    def enter(self, model: str, prepared: Iterable[PreparedPrompt]) -> None:
        """Store the requests of a call, just before they are submitted."""
        if model in self._kept:
            for each in prepared:
                self._kept[model].enter(each.request)

    def write(self, wait: bool = True) -> None:
        """Write stored events to the folder (see `KeptRequests.write`). Do not call it in the event loop."""
        for each in self._kept.values():
            each.write(wait)

    async def run(self, call_id: str, in_thread: Callable[[Callable[[], Any]], Awaitable[Any]]) -> dict[str, Any]:
        """Run a call again on the model in memory, between the steps of other calls, and return the comparison with its
        first run.

        Raises:
            ApiError: for a server without stored requests, and a call that is not stored or cannot run.
        """
        if self._folder is None:
            words = "this server keeps no requests to replay: set server.replay_folder before it serves them"
            raise ApiError("invalid_request_error", words)
        async with self._turn:  # only one replay's requests are in memory at a time
            return await self._run(call_id, in_thread)

    async def _run(self, call_id: str, in_thread: Callable[[Callable[[], Any]], Awaitable[Any]]) -> dict[str, Any]:
        call: KeptCall = await in_thread(lambda: self._read(call_id))
        name, fingerprint = call.head["model"], call.head["fingerprint"]
        model = self._models.get(name)
        if model is None or name not in self._kept or model.fingerprint != fingerprint:
            words = f"replay: {call_id} was answered by {name!r} with other weights or settings than this server has"
            raise ApiError("invalid_request_error", f"{words}; `workbench replay {call_id} --from FOLDER` loads them")
        assert isinstance(model.thread, RunnerThread)
        thread = model.thread

        async def between_steps(function: Callable[[Runner], Any]) -> Any:
            return await asyncio.wrap_future(thread.submit_call(function))

        try:
            work = await between_steps(lambda runner: call.work(runner.loaded_model))
            while await between_steps(lambda _: work.step()):
                pass
            return (await between_steps(lambda _: work.result())).as_dict()
        except WorkbenchError as error:
            raise invalid(error) from None

    def _read(self, call_id: str) -> KeptCall:
        self.write()
        try:
            return KeptCall.read(Path(self._folder or ""), call_id)
        except WorkbenchError as error:
            raise ApiError("not_found_error", without_own_paths(str(error))) from None
