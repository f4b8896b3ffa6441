"""Let calls of batches begin behind those of clients, under every policy of the scheduler.

A call of a batch reaches the engine only while no client waits for a first token, and those of all batches together
hold at most `batch_calls` sequences, half of the engine's, and half of its KV cache. So a client who comes later finds
slots and pages, and waits for the prefill of these calls at most.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workbench.serve.service import Service

POLL_SECONDS = 0.02  # until it is looked again whether clients wait


class CallSlots:
    """The slots that batches share, one for each sequence of a call.

    Attributes:
        number: of slots; `taken` are held.
        head: held by the item that is next: of the items that wait, only this one's body is in memory.
        embedding: held by the one embedding that is computed.
    """

    def __init__(self, service: Service):
        self._service = service
        halves = (each.runner.config.schedule.max_num_seqs // 2 for each in service.models.values())
        self.number = max(1, min((service.settings.batch_calls, *halves)))
        self.head = asyncio.Lock()
        self.embedding = asyncio.Lock()  # one at a time: those of clients take turns with it
        self.taken = 0
        self._tokens: Counter[str] = Counter()  # by model, of the cache: what the calls need at most
        self._freed = asyncio.Event()

    def room(self, model: str) -> int:
        """Return the tokens of a model's cache that batches may hold; of the smallest for an alias."""
        models = self._service.models
        return min(each.cache_tokens for each in ([models[model]] if model in models else models.values())) // 2

    @asynccontextmanager
    async def take(self, sequences: int, model: str = "", tokens: int = 0) -> AsyncIterator[None]:
        """Hold slots for a call, once no client waits. Called by the holder of `head`.

        A call of more sequences than there are slots, or more tokens than there is room, runs when all are free.

        Args:
            sequences: of the call.
            model: that the call names.
            tokens: of its prompts and answers, at most.
        """
        room = self.room(model)
        wanted, tokens = min(sequences, self.number), min(tokens, room)
        while self._service.num_waiting or self.taken + wanted > self.number or self._tokens[model] + tokens > room:
            self._freed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._freed.wait(), POLL_SECONDS)
        self.taken += wanted
        self._tokens[model] += tokens
        try:
            yield
        finally:
            self.taken -= wanted
            self._tokens[model] -= tokens
            self._freed.set()
