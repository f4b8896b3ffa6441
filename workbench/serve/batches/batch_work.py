"""Run the requests of a batch in the background, each as a separate call through the gate.

    request on disk -> key checked again -> dialect -> Call -> slots -> gate -> engine -> result line
                                                 ^ again if refused with `retry-after`

A batch runs behind all calls with waiting clients (`call_slots.py`). Its items end in any order. Batches belong to one
process: unfinished batches end with it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from workbench.serve.answers.pieces import Used
from workbench.serve.batches.batch_requests import BatchItem, BatchRequests
from workbench.serve.batches.call_slots import CallSlots
from workbench.serve.batches.lines import check_whole
from workbench.serve.call import Call, Caller
from workbench.serve.errors import ApiError
from workbench.serve.json_bytes import dumps
from workbench.serve.service import as_api_error

if TYPE_CHECKING:
    from workbench.serve.dialect import Dialect
    from workbench.serve.service import Service

PRIORITY = 1_000  # larger runs later
SECONDS_OF_LIFE = 86_400.0
MIN_RETRY_SECONDS = 0.05
RETRY_SECONDS = 1.0  # after a call failed in the engine; doubled each time
MAX_RETRIES = 3  # retries after failures in the engine
RETRIED = ("unavailable_error", "overloaded_error", "timeout_error")
ITEMS_AT_PAUSE = 100  # finished items between two pauses for other work
Ending = Literal["succeeded", "errored", "canceled", "expired"]
ENDINGS: tuple[Ending, ...] = ("succeeded", "errored", "canceled", "expired")


@dataclass(frozen=True)
class ItemResult:
    """The result of one item: the JSON of its answer, or its error."""

    custom_id: str
    ending: Ending
    answer: Mapping[str, Any] | None = None
    error: ApiError | None = None


class BatchWork:
    """The work of one running batch: it runs the batch's items as calls.

    Args:
        service: answers the calls.
        slots: shared with all batches.
        caller: owner of the calls. Before each call the gate checks that the key is still valid.
        requests: at least one; they are discarded at the end.
        write: called in the event loop with each result as it comes, and whether it must be written. It raises
            ApiError if there is no room: the item is then an error, and so are all items that have not run.
        finish: awaited once, after the last result.
    """

    def __init__(
        self,
        service: Service,
        slots: CallSlots,
        caller: Caller,
        requests: BatchRequests,
        write: Callable[[ItemResult, bool], None],
        finish: Callable[[], Awaitable[None]],
    ):
        self._service, self._slots, self._caller, self._requests = service, slots, caller, requests
        self._write, self._finish = write, finish
        self._next = 0  # first item not begun
        self._no_room: ApiError | None = None  # error of writing results
        self.counts: dict[str, int] = {"processing": len(requests), **dict.fromkeys(ENDINGS, 0)}
        self.tokens = dict.fromkeys(("prompt_tokens", "completion_tokens", "cached_tokens", "thinking_tokens"), 0)
        self.created = time.time()
        self.canceled_at: float | None = None
        self.ended_at: float | None = None
        self._dialects = {each.path: each for each in service.dialects.values()}
        self._tasks: tuple[asyncio.Task[None], ...] = ()
        self._task = asyncio.create_task(self._run())

    @property
    def has_ended(self) -> bool:
        return self.ended_at is not None

    def cancel(self) -> None:
        """Cancel all unfinished items; they count as canceled."""
        if self.canceled_at is None and not self.has_ended:
            self.canceled_at = time.time()
            for task in self._tasks:
                task.cancel()

    async def wait(self) -> None:
        """Wait until all items have ended."""
        await asyncio.shield(self._task)

    async def _run(self) -> None:
        number = min(self._slots.number, len(self._requests))
        self._tasks = tuple(asyncio.create_task(self._work()) for _ in range(number))
        await asyncio.gather(*self._tasks, return_exceptions=True)
        while self._next < len(self._requests):
            self._end(ItemResult(self._requests[self._next].custom_id, "canceled"))
            self._next += 1
            if self._next % ITEMS_AT_PAUSE == 0:
                await asyncio.sleep(0)
        self._requests.discard()
        try:
            await self._finish()
        finally:
            self.ended_at = time.time()

    async def _work(self) -> None:
        while self._next < len(self._requests) and self.canceled_at is None:
            place, self._next = self._next, self._next + 1
            try:
                result = await self._carry_out(place)
            except asyncio.CancelledError:
                self._end(ItemResult(self._requests[place].custom_id, "canceled"))
                raise
            self._end(result)

    def _end(self, result: ItemResult) -> None:
        try:
            self._write(result, result.answer is None)
        except ApiError as error:
            self._no_room = self._no_room or error
            result = ItemResult(result.custom_id, "errored", error=error)
            with suppress(ApiError):  # the disk is full: only the counts include it
                self._write(result, True)
        self.counts["processing"] -= 1
        self.counts[result.ending] += 1

    async def _carry_out(self, place: int) -> ItemResult:
        """Return an item's result; retry after temporary errors."""
        ends, retries = self.created + SECONDS_OF_LIFE, 0
        while True:
            try:
                return await self._attempt(place)
            except Exception as error:  # any error ends this item alone
                failure = as_api_error(error)
            seconds = retry_after(failure)
            if seconds is None and failure.kind in RETRIED and retries < MAX_RETRIES:
                seconds, retries = RETRY_SECONDS * 2**retries, retries + 1
            is_final = failure.headers.get("x-should-retry") == "false"
            if is_final or seconds is None or time.time() + seconds > ends:
                return ItemResult(self._requests[place].custom_id, "errored", error=failure)
            await asyncio.sleep(seconds)

    async def _attempt(self, place: int) -> ItemResult:
        """Return an item's result; `expired` if its turn does not come before the batch expires."""
        life = asyncio.timeout(self.created + SECONDS_OF_LIFE - time.time())
        async with AsyncExitStack() as stack:
            try:
                async with life:
                    async with self._slots.head:
                        item = self._requests[place]
                        if item.error is not None:
                            return ItemResult(item.custom_id, "errored", error=item.error)
                        if self._no_room is not None:
                            return ItemResult(item.custom_id, "errored", error=self._no_room)
                        caller = await self._service.gate.renew(self._caller)
                        call = self._parse(item, caller)
                        embeds = call.purpose == "embed"
                        sequences = 1 if embeds else len(call.prompts) * call.sampling.num_sequences
                        tokens = 0 if embeds else self._most_tokens(call, item)
                        await stack.enter_async_context(self._slots.take(sequences, call.model, tokens))
                    if embeds:
                        await stack.enter_async_context(self._slots.embedding)
            except TimeoutError:
                if not life.expired():
                    raise
                return ItemResult(self._requests[place].custom_id, "expired")
            if time.time() - self.created > SECONDS_OF_LIFE:
                return ItemResult(item.custom_id, "expired")
            answer = await self._answer(call, self._dialects[item.path])
            return ItemResult(item.custom_id, "succeeded", answer=answer)

    def _parse(self, item: BatchItem, caller: Caller) -> Call:
        call = self._service.parse(item.body, self._dialects[item.path], caller)
        check_whole(call)
        return replace(call, priority=max(call.priority, PRIORITY), background=True)

    def _most_tokens(self, call: Call, item: BatchItem) -> int:
        """Return an upper bound of the tokens of a call's prompts and answers, taking each byte of its body as one."""
        models = self._service.models
        context = max(
            each.max_model_len for name, each in models.items() if name == call.model or call.model not in models
        )
        longest = min(context, len(dumps(item.body)) + call.sampling.max_output_tokens)
        return len(call.prompts) * call.sampling.num_sequences * longest

    async def _answer(self, call: Call, dialect: Dialect) -> Mapping[str, Any]:
        run = await self._service.begin(call)
        pieces = await self._service.complete(run)
        used = next((piece for piece in pieces if isinstance(piece, Used)), None)
        if used is None:
            raise ApiError("api_error", "the call was ended by the server")
        for name in self.tokens:
            self.tokens[name] += getattr(used, name)
        return dialect.answer(run.call, self._service.model_of(run.call.model), pieces)


def retry_after(error: ApiError) -> float | None:
    """Return the seconds after which a refused call may be admitted; None if the error names no time."""
    try:
        return max(MIN_RETRY_SECONDS, float(error.headers["retry-after"]))
    except (KeyError, ValueError):
        return None
