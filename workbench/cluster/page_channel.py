"""Send the pages of sequences between processes that share no memory, layer by layer, over gloo.

A channel joins two processes, the one that prefills and the one that decodes. Each layer of a transfer is a message of
its own: a header (transfer, pass, layer, bytes), then the bytes of its pages in every cache group. Layers are copied
out of the pages as they are computed, and sent while later ones are. A step that failed in parts is computed once more,
in another pass; the pass that counts goes with the handover. A channel that breaks stays broken, and what it had not
delivered is computed again.

Executors that call blocks one by one from Python (eager, Inductor's blocks, panels) send so. Those that run a step as
one compiled function (`batch_invariant`, mlir's steps of few tokens, CUDA graphs) send all layers after it.

This is the place of NIXL or NCCL between GPUs: `PageSender.send` and `PageReceiver._receive` are all that names gloo.
"""

from __future__ import annotations

import hashlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from workbench.cluster.pool_messages import Connect, OfferPages
from workbench.engine.handover import end_as_moved
from workbench.engine.runner import Runner
from workbench.errors import describe_error
from workbench.executors.base import Executor
from workbench.kv_cache.adoption import CopiedPages, page_contents
from workbench.kv_cache.lending import HandedPages, TransferKey
from workbench.kv_cache.pages import NULL_PAGE
from workbench.kv_cache.store import KVStore
from workbench.request import Sequence
from workbench.scheduler.plan import StepPlan

TIMEOUT_SECONDS = 60.0  # for a peer to join
IDLE_SECONDS = 24 * 3600.0  # between two transfers
MAX_DROPPED = 1024
HEADER = 4  # numbers: transfer, pass, layer, bytes


def transfer_number(key: TransferKey) -> int:
    """Return a number for a transfer, the same in both processes."""
    digest = hashlib.sha256(f"{key.request_id}\0{key.attempt}".encode()).digest()
    return int.from_bytes(digest[:8]) >> 1  # as int64 has it


def _join(connect: Connect) -> dist.ProcessGroup:
    """Return the gloo group of two processes; the one that sends is rank 0."""
    host, port = connect.store
    store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=TIMEOUT_SECONDS))
    rank = 0 if connect.sends else 1
    return dist.ProcessGroupGloo(dist.PrefixStore(connect.name, store), rank, 2, timedelta(seconds=IDLE_SECONDS))


class PageSender:
    """The end of a channel at the process that prefills. A thread sends, so that no step waits for the network."""

    def __init__(self, connect: Connect):
        self.error: str | None = None
        self._queue: queue.SimpleQueue[tuple[Tensor, Tensor]] = queue.SimpleQueue()
        threading.Thread(target=self._send, args=(connect,), daemon=True).start()

    def send(self, key: TransferKey, number: int, layer: int, contents: list[Tensor]) -> None:
        """Send the bytes of one layer's pages, soon.

        Args:
            key: the transfer.
            number: its pass.
            layer: the layer.
            contents: `page_contents` of the layer.
        """
        whole = torch.cat([part.flatten() for part in contents]) if contents else torch.empty(0, dtype=torch.uint8)
        self._queue.put((torch.tensor([transfer_number(key), number, layer, len(whole)]), whole))

    def _send(self, connect: Connect) -> None:
        try:
            group = _join(connect)
            while True:
                header, whole = self._queue.get()
                group.send([header], 1, 0).wait()
                if len(whole):
                    group.send([whole], 1, 0).wait()
        except Exception as error:  # the peer has ended, or the network; the coordinator hears of it from the peer
            self.error = describe_error(error)


class PageReceiver:
    """The end of a channel at the process that decodes.

    Args:
        connect: the channel.
        arrived: called in the channel's thread when a layer has arrived, or none will any more.
    """

    def __init__(self, connect: Connect, arrived: Callable[[], None]):
        self.error: str | None = None
        self._arrived, self._lock = arrived, threading.Lock()
        self._layers: dict[int, dict[tuple[int, int], Tensor]] = {}  # by transfer; by pass and layer
        self._dropped: deque[int] = deque(maxlen=MAX_DROPPED)  # whose layers may still arrive
        threading.Thread(target=self._receive, args=(connect,), daemon=True).start()

    def _receive(self, connect: Connect) -> None:
        try:
            group = _join(connect)
            while True:
                header = torch.empty(HEADER, dtype=torch.int64)
                group.recv([header], 0, 0).wait()
                transfer, number, layer, size = header.tolist()
                whole = torch.empty(size, dtype=torch.uint8)
                if size:
                    group.recv([whole], 0, 0).wait()
                with self._lock:
                    if transfer not in self._dropped:
                        self._layers.setdefault(transfer, {})[number, layer] = whole
                self._arrived()
        except Exception as error:
            self.error = describe_error(error)
            self._arrived()

    def pop(self, key: TransferKey, number: int, handed: HandedPages, store: KVStore) -> CopiedPages | None:
        """Return the pages of a transfer once all layers of its last pass are here; None before."""
        with self._lock:
            layers = self._layers.get(transfer_number(key), {})
            if not all((number, layer) in layers for layer in range(len(store.layers))):
                return None
            del self._layers[transfer_number(key)]
        contents = []
        for layer, cache in enumerate(store.layers):
            whole = layers[number, layer]
            for group, pages in enumerate(handed.pages):
                count = sum(page != NULL_PAGE for page in pages)
                for tensor in cache.page_tensors(group) if count else ():
                    size = count * tensor[0].nbytes
                    contents.append(whole[:size].view(count, -1))
                    whole = whole[size:]
        return CopiedPages(handed, contents)

    def drop(self, key: TransferKey) -> None:
        """Forget a transfer whose pages will not be asked for."""
        with self._lock:
            self._layers.pop(transfer_number(key), None)
            self._dropped.append(transfer_number(key))


class SendingExecutor:
    """Compute steps by another executor, and send the layers of the prompts that a step completes.

    Args:
        inner: computes.
        runner: the runner of these steps.
        target: returns the transfer and the channel of a sequence that is to be sent; None for another.
    """

    def __init__(
        self, inner: Executor, runner: Runner, target: Callable[[Sequence], tuple[TransferKey, PageSender] | None]
    ):
        self.inner, self.runner, self.target = inner, runner, target
        self._passes = 0
        self._sent: dict[TransferKey, tuple[int, HandedPages]] = {}  # by the last pass

    @property
    def compiles(self) -> int:
        return self.inner.compiles

    @property
    def kernel_seconds(self) -> float | None:
        return self.inner.kernel_seconds

    @property
    def artifacts(self) -> Mapping[str, str]:
        return self.inner.artifacts

    def forward(self, plan: StepPlan) -> Tensor:
        """Return logits as `Executor` does."""
        self._passes += 1
        manager, store = self.runner.kv_cache.manager, self.runner.store
        sent: list[tuple[TransferKey, PageSender, HandedPages]] = []
        for span in plan.spans:
            if span.needs_sample and (found := self.target(span.sequence)) is not None:
                pages = manager.pages_to_hand_over(span.sequence, span.end)
                sent.append((*found, HandedPages(span.end, pages)))
        done: set[int] = set()

        def send(layer: int) -> None:
            done.add(layer)
            for key, sender, handed in sent:
                sender.send(key, self._passes, layer, list(page_contents(store, handed.pages, layer)))

        if sent and not plan.decode_only:  # a graph of decodes is to see no hook
            store.on_layer = send
        try:
            logits = self.inner.forward(plan)
        finally:
            store.on_layer = None
        for layer in range(len(store.layers)) if sent else ():
            if layer not in done:
                send(layer)
        self._sent.update({key: (self._passes, handed) for key, _, handed in sent})
        return logits

    def has_sent(self, sequence: Sequence, key: TransferKey) -> bool:
        """Return whether what was sent is all that the sequence has computed."""
        return key in self._sent and self._sent[key][1].num_computed_tokens == sequence.num_computed_tokens

    def hand_over(self, sequence: Sequence, key: TransferKey) -> OfferPages:
        """End a sequence whose layers were sent as `moved`."""
        number, handed = self._sent.pop(key)
        return OfferPages(key, end_as_moved(self.runner, sequence), handed, number)

    def forget(self, key: TransferKey) -> None:
        """Forget a transfer whose request ended with its first token."""
        self._sent.pop(key, None)
