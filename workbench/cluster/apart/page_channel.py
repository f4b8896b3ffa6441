"""Send the pages of sequences between processes that share no memory, layer by layer, over gloo.

A channel joins two processes, the one that prefills and the one that decodes. Each layer of a transfer is one
message: a header (transfer, pass, layer, bytes), then the bytes of its pages in every cache group. A layer is copied
out of its pages once computed, and sent while later layers are computed. A step that failed in parts is computed again
in another pass; the handover names the pass that counts. A channel that breaks stays broken, and pages that it had not
delivered are computed again.

Backends that call blocks one by one from Python (eager, Inductor's blocks, panels) send this way. A step compiled as
one function (`batch_invariant`, mlir's steps of few tokens, CUDA graphs) sends all layers at its end.

NIXL or NCCL between GPUs would go here: only `GlooLink` names gloo. The coordinator carries the address of each end to
the other, so no rendezvous store can be closed too early, and every wait has a time limit.
"""

from __future__ import annotations

import hashlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from workbench.cluster.apart.adoption import CopiedPages, page_contents
from workbench.cluster.apart.handover import end_as_moved
from workbench.cluster.apart.lending import HandedPages, TransferKey
from workbench.cluster.apart.pool_messages import ChannelAddress, Connect, OfferPages
from workbench.engine.runner import Runner
from workbench.errors import describe_error
from workbench.executors.step_runner import Forward
from workbench.kv_cache.pages import NULL_PAGE
from workbench.kv_cache.store import KVStore
from workbench.request import Sequence
from workbench.scheduler.plan import StepPlan

JOIN_SECONDS = 60.0  # time limit for the other end to join
MESSAGE_SECONDS = 60.0  # time limit for sending a layer, or for receiving one after its header
IDLE_SECONDS = 10 * 365 * 24 * 3600.0  # time limit between two transfers: in effect none, but gloo demands one
MAX_DROPPED = 1024
HEADER = 4  # numbers: transfer, pass, layer, bytes


def transfer_number(key: TransferKey) -> int:
    """Return a number for a transfer, the same in both processes."""
    digest = hashlib.sha256(f"{key.request_id}\0{key.attempt}".encode()).digest()
    return int.from_bytes(digest[:8]) >> 1  # fits int64


class LayerSender(Protocol):
    """Send the bytes of one layer's pages to the engine that adopts them."""

    def send(self, key: TransferKey, number: int, layer: int, contents: list[Tensor]) -> None: ...


class _Meeting(dist.Store):
    """The store of a gloo group of two: values that gloo sets go to the other end, whose values are put in here.

    Args:
        announce: called with this end's address, in the thread that joins.
    """

    def __init__(self, announce: Callable[[bytes], None]):
        super().__init__()
        self._announce, self._values, self._ended = announce, dict[str, bytes](), False
        self._changed = threading.Condition()

    def put(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def end(self) -> None:
        """Make waiting calls fail."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override] (gloo's signature)
        self.put(key, bytes(value))
        self._announce(bytes(value))

    def get(self, key: str) -> bytes:
        with self._changed:
            return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta) -> None:  # type: ignore[override] (gloo's signature)
        with self._changed:
            here = self._changed.wait_for(
                lambda: self._ended or all(key in self._values for key in keys), timeout.total_seconds()
            )
        if not here or self._ended:
            raise RuntimeError("the process at the other end of the channel has not connected")


class GlooLink:
    """One end of a gloo group of two: rank 0 sends, rank 1 receives.

    Args:
        connect: the channel.
        host: the address of this host, which the other end can reach.
        publish: called in another thread with this end's address, to pass to the other end's `meet`.
    """

    def __init__(self, connect: Connect, host: str, publish: Callable[[ChannelAddress], None]):
        self._host, self._rank = host, 0 if connect.sends else 1
        self._meeting = _Meeting(lambda address: publish(ChannelAddress(connect.channel, address)))
        self._group: dist.ProcessGroupGloo | None = None

    @property
    def is_joined(self) -> bool:
        return self._group is not None

    def meet(self, address: bytes) -> None:
        """Set the address of the other end."""
        self._meeting.put(f"0/{1 - self._rank}", address)

    def join(self) -> None:
        """Wait until the other end is there, and join the group.

        Raises:
            RuntimeError: if it does not come within `JOIN_SECONDS`, or `give_up` is called.
        """
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined] (the stubs lack it)
        options._timeout = timedelta(seconds=JOIN_SECONDS)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._host)]
        self._group = dist.ProcessGroupGloo(self._meeting, self._rank, 2, options)

    def give_up(self) -> None:
        """Make `join` fail soon if it still waits."""
        self._meeting.end()

    def leave(self) -> None:
        """Close the connection; the other end's calls fail."""
        self._group = None

    def send(self, tensor: Tensor) -> None:
        assert self._group is not None
        limit = timedelta(seconds=MESSAGE_SECONDS)
        self._group.send([tensor], 1, 0).wait(limit)  # type: ignore[attr-defined] (the stubs lack it)

    def receive(self, tensor: Tensor, seconds: float = MESSAGE_SECONDS) -> None:
        assert self._group is not None
        limit = timedelta(seconds=seconds)
        self._group.recv([tensor], 0, 0).wait(limit)  # type: ignore[attr-defined] (the stubs lack it)


class PageSender:
    """The end of a channel at the engine that prefills. It sends in a thread, so that no step waits for the network.

    Args:
        link: its end of the channel.
        broke: called in that thread with the error that ends the channel.
    """

    def __init__(self, link: GlooLink, broke: Callable[[str], None]):
        self.link, self._broke = link, broke
        self.error: str | None = None
        self._queue: queue.SimpleQueue[tuple[Tensor, Tensor] | None] = queue.SimpleQueue()
        threading.Thread(target=self._send, daemon=True).start()

    def send(self, key: TransferKey, number: int, layer: int, contents: list[Tensor]) -> None:
        """Queue the bytes of one layer's pages for sending.

        Args:
            key: the transfer.
            number: the pass of the transfer.
            layer: the layer.
            contents: `page_contents` of the layer.
        """
        if self.error is not None:
            return
        whole = torch.cat([part.flatten() for part in contents]) if contents else torch.empty(0, dtype=torch.uint8)
        self._queue.put((torch.tensor([transfer_number(key), number, layer, len(whole)]), whole))

    def close(self) -> None:
        """Close the channel once all layers are sent, or at once if it has not joined."""
        self._queue.put(None)
        self.link.give_up()

    def _send(self) -> None:
        try:
            self.link.join()
            while (found := self._queue.get()) is not None:
                header, whole = found
                self.link.send(header)
                if len(whole):
                    self.link.send(whole)
            self.error = "it was closed"
        except Exception as error:  # the other end or the network failed
            self.error = describe_error(error)
            self._broke(self.error)
        self.link.leave()
        while not self._queue.empty():
            self._queue.get()


class PageReceiver:
    """The end of a channel at the engine that decodes.

    Args:
        link: its end of the channel.
        arrived: called in the channel's thread when a layer has arrived.
        broke: called in that thread with the error that ends the channel.
    """

    def __init__(self, link: GlooLink, arrived: Callable[[], None], broke: Callable[[str], None]):
        self.link, self._arrived, self._broke = link, arrived, broke
        self.error: str | None = None  # set when the channel has ended
        self.heard_at = time.monotonic()  # when the last layer arrived
        self._lock = threading.Lock()
        self._layers: dict[int, dict[tuple[int, int], Tensor]] = {}  # by transfer, then by (pass, layer)
        self._dropped: deque[int] = deque(maxlen=MAX_DROPPED)  # transfers with layers that may still arrive
        threading.Thread(target=self._receive, daemon=True).start()

    def _receive(self) -> None:
        try:
            self.link.join()
            while True:
                header = torch.empty(HEADER, dtype=torch.int64)
                self.link.receive(header, IDLE_SECONDS)
                transfer, number, layer, size = header.tolist()
                whole = torch.empty(size, dtype=torch.uint8)
                if size:
                    self.link.receive(whole)
                with self._lock:
                    if transfer not in self._dropped:
                        self._layers.setdefault(transfer, {})[number, layer] = whole
                self.heard_at = time.monotonic()
                self._arrived()
        except Exception as error:
            self.error = describe_error(error)
            self._broke(self.error)
        self.link.leave()

    def disconnect(self) -> None:
        """Record that the process at the other end has ended. Layers sent before still arrive if it had joined."""
        if not self.link.is_joined:
            self.error = "the process at the other end has ended"
            self.link.give_up()

    def pop(self, key: TransferKey, number: int, handed: HandedPages, store: KVStore) -> CopiedPages | None:
        """Return the pages of a transfer, or None until all layers of its pass `number` have arrived."""
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
        """Drop a transfer that is no longer needed."""
        with self._lock:
            self._layers.pop(transfer_number(key), None)
            self._dropped.append(transfer_number(key))


class LayerSending:
    """A hook of `StepRunner` that sends the layers of prompts completed by a step.

    Args:
        runner: the runner of these steps.
        target: returns the transfer and channel of a sequence to be sent, or None for a sequence that stays.
    """

    def __init__(self, runner: Runner, target: Callable[[Sequence], tuple[TransferKey, LayerSender] | None]):
        self.runner, self.target = runner, target
        self._passes = 0
        self._sent: dict[TransferKey, tuple[int, HandedPages]] = {}  # transfer -> (last pass, pages)

    def __call__(self, forward: Forward, plan: StepPlan) -> Tensor:
        self._passes += 1
        manager, store = self.runner.kv_cache.manager, self.runner.store
        sent: list[tuple[TransferKey, LayerSender, HandedPages]] = []
        for span in plan.spans:
            if span.needs_sample and (found := self.target(span.sequence)) is not None:
                pages = manager.export_pages(span.sequence, span.end)
                sent.append((*found, HandedPages(span.end, pages)))
        done: set[int] = set()

        def send(layer: int) -> None:
            done.add(layer)
            for key, sender, handed in sent:
                sender.send(key, self._passes, layer, list(page_contents(store, handed.pages, layer)))

        if sent and not plan.decode_only:  # a decode-only step may be a CUDA graph, without hooks
            store.on_layer = send
        try:
            logits = forward(plan)
        finally:
            store.on_layer = None
        for layer in range(len(store.layers)) if sent else ():
            if layer not in done:
                send(layer)
        self._sent.update({key: (self._passes, handed) for key, _, handed in sent})
        return logits

    def has_sent(self, sequence: Sequence, key: TransferKey) -> bool:
        """Return whether all computed pages of the sequence were sent."""
        return key in self._sent and self._sent[key][1].num_computed_tokens == sequence.num_computed_tokens

    def hand_over(self, sequence: Sequence, key: TransferKey, channel: int) -> OfferPages:
        """End a sequence as `moved`, after its layers were sent over `channel`."""
        number, handed = self._sent.pop(key)
        return OfferPages(key, end_as_moved(self.runner, sequence), handed, channel, number)

    def forget(self, key: TransferKey) -> None:
        """Drop a transfer because its request ended with its first token."""
        self._sent.pop(key, None)
