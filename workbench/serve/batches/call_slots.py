"""Start batch calls only behind client calls, under every scheduling policy.

A batch call reaches the engine only while no client waits for a first token, and all batch calls together hold at most
`batch_calls` sequences, half of the engine's sequences, and half of its KV cache. So a later client finds slots and
pages, and waits at most for the prefill of these calls.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workbench.serve.service import Service

POLL_SECONDS = 0.02  # polling interval for waiting clients


class CallSlots:
    """Slots that the calls of all batches share; a call holds one slot per sequence.

    Attributes:
        number: number of slots; `taken` of them are held.
        head: lock held by the next item: of all waiting items, only its body is in memory.
        embedding: lock held by the embedding being computed.
    """

    def __init__(self, service: Service):
        self._service = service
        halves = (each.runner.config.schedule.max_num_seqs // 2 for each in service.models.values())
        self.number = max(1, min((service.settings.batch_calls, *halves)))
        self.head = asyncio.Lock()
        self.embedding = asyncio.Lock()  # one batch embedding at a time, in turns with clients'
        self.taken = 0
        self._tokens: Counter[str] = Counter()  # cache tokens by model: upper bound of the calls' need
        self._freed = asyncio.Event()

    def room(self, model: str) -> int:
        """Return the number of tokens of a model's cache that batches may hold; for an alias, that of the smallest
        cache.
        """
        models = self._service.models
        return min(each.cache_tokens for each in ([models[model]] if model in models else models.values())) // 2

    @asynccontextmanager
    async def take(self, sequences: int, model: str = "", tokens: int = 0) -> AsyncIterator[None]:
        """Hold slots for a call within a block, which begins once no client waits. Only the holder of `head` may call
        this.

        A call with more sequences than slots, or more tokens than room, runs when all slots and tokens are free.

        Args:
            sequences: number of the call's sequences.
            model: name of the call's model.
            tokens: upper bound of the tokens of its prompts and answers.
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
