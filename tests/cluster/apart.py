"""Two engines of one process that hand sequences over, as two processes do: each sees the other's pages in one memory,
or the bytes of them alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from tests.engine.tiny import poison
from workbench.cluster.apart.adoption import BorrowedPages, CopiedPages
from workbench.cluster.apart.handover import (
    adopt,
    hand_over,
    pop_returned,
    ready_sequences,
    take_back,
)
from workbench.cluster.apart.lending import TransferKey, shared_pools
from workbench.cluster.apart.page_channel import LayerSending
from workbench.cluster.apart.page_layout import describe_layout
from workbench.cluster.apart.shared_memory import SharedMemory, SharedPages, assign_homes, shared_bytes
from workbench.engine.cache import Adoption, build_store, cache_num_pages
from workbench.engine.config import EngineConfig
from workbench.engine.loaded_model import LoadedModel
from workbench.engine.runner import Runner
from workbench.model.transformer import Transformer
from workbench.request import FinishReason, Request, Sequence
from workbench.trace.events import Decoded, Event, Finished

SIZES = {"page_size": 4, "pages": 40, "max_num_seqs": 4, "max_num_batched_tokens": 16}


class Channel:
    """A channel within one process: the layers of each request, by pass and layer."""

    def __init__(self) -> None:
        self.layers: dict[str, dict[tuple[int, int], list[Tensor]]] = {}

    def send(self, key: TransferKey, number: int, layer: int, contents: list[Tensor]) -> None:
        self.layers.setdefault(key.request_id, {})[number, layer] = contents


def prefilled(runner: Runner) -> Sequence:
    """Step until a sequence may be handed over."""
    while not (ready := list(ready_sequences(runner))):
        runner.step()
    return ready[0]


@dataclass
class Apart:
    """A prefill engine and a decode engine."""

    prefill: Runner
    decode: Runner
    shares_memory: bool
    finished: dict[str, Finished] = field(default_factory=dict)
    emitted: dict[str, list[int]] = field(default_factory=dict)
    channel: Channel = field(default_factory=Channel)
    sending: LayerSending | None = None
    on_the_way: list[tuple[Request, Adoption]] = field(default_factory=list)
    _queue: deque[Event] = field(default_factory=deque)

    def run(self, requests: Iterable[Request], hold: int = 0) -> dict[str, tuple[int, ...]]:
        """Run requests to their ends; return their tokens. Handovers arrive `hold` steps late."""
        self.submit(requests)
        while self.step(hold):
            pass
        return {name: end.token_ids for name, end in self.finished.items()}

    def submit(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.prefill.submit(request, self._queue)

    def step(self, hold: int = 0) -> bool:
        """Run a step of each engine that has anything to do; return whether anything is left."""
        if self.prefill.has_unfinished_requests:
            self.prefill.step()
            for sequence in list(filter(self.can_go, ready_sequences(self.prefill))):
                self.on_the_way.append(self._hand_over(sequence))
        while len(self.on_the_way) > hold or (self.on_the_way and not self.prefill.has_unfinished_requests):
            request, adoption = self.on_the_way.pop(0)
            adopt(self.decode, request, adoption, self._queue)
        if self.decode.has_unfinished_requests:
            self.decode.step()
        self.give_back()
        self._collect()
        return self.prefill.has_unfinished_requests or self.decode.has_unfinished_requests or bool(self.on_the_way)

    def can_go(self, sequence: Sequence) -> bool:
        """Return whether its bytes were sent, where bytes are."""
        return self.sending is None or self.sending.has_sent(sequence, TransferKey(sequence.request_id, 0))

    def _hand_over(self, sequence: Sequence) -> tuple[Request, Any]:
        if self.shares_memory:
            made = hand_over(self.prefill, sequence)
            return made.request, BorrowedPages(made.handed)
        assert self.sending is not None
        offer = self.sending.hand_over(sequence, TransferKey(sequence.request_id, 0), 0)
        layers = self.channel.layers.pop(sequence.request_id)
        contents = [part for layer in range(len(self.prefill.store.layers)) for part in layers[offer.sent_pass, layer]]
        return offer.request, CopiedPages(offer.handed, contents)

    def give_back(self) -> None:
        if any(pages := pop_returned(self.decode)):
            take_back(self.prefill, pages)

    def _collect(self) -> None:
        while self._queue:
            event = self._queue.popleft()
            if isinstance(event, Finished) and event.reason != FinishReason.MOVED:
                self.finished[event.request_id] = event
            elif isinstance(event, Decoded):
                self.emitted.setdefault(event.request_id, []).append(event.token_id)

    def check_no_page_leaks(self) -> None:
        """Every page is free at home once the prefix caches are empty."""
        for runner in (self.decode, self.prefill):
            runner.reset_prefix_cache()
        self.give_back()
        for runner in (self.prefill, self.decode):
            for pool in runner.scheduler.pools:
                assert pool.num_free == pool.num_pages
            for pool in shared_pools(runner.kv_cache.manager):
                assert not pool.num_lent and not pool.num_borrowed and not pool.idle


def engines_apart(model: Transformer, shares_memory: bool, decode: dict | None = None, **settings) -> Apart:
    """Two engines of one model, their unwritten pages NaN."""
    configs = [EngineConfig.build(**{**SIZES, **settings, **more}) for more in ({}, decode or {})]
    loaded = LoadedModel(model, None, None)
    if not shares_memory:
        runners = [Runner(config, loaded) for config in configs]
    else:
        describe_layout(model, configs[0]).check_equal(describe_layout(model, configs[1]))
        totals, homes = assign_homes([cache_num_pages(model, config) for config in configs])
        memory = SharedMemory.create(shared_bytes(build_store(model, configs[0], totals, "meta")))
        maps = [memory, SharedMemory.open(memory.address)]
        runners = [
            Runner(config, loaded, build_pages=SharedPages(mapped, totals, mine).build)
            for config, mapped, mine in zip(configs, maps, homes, strict=True)
        ]
        for each in maps:
            each.close()
    for runner in runners:
        poison(runner)
    apart = Apart(prefill := runners[0], runners[1], shares_memory)
    if not shares_memory:

        def target(sequence: Sequence) -> tuple[TransferKey, Channel]:
            return TransferKey(sequence.request_id, 0), apart.channel

        apart.sending = LayerSending(prefill, target)
        prefill.core.executor.hooks.append(apart.sending)
    return apart
