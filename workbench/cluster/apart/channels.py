"""Manage the channels of one process, and the requests that wait for pages from them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from workbench.cluster.apart.adoption import CopiedPages
from workbench.cluster.apart.lending import TransferKey
from workbench.cluster.apart.page_channel import GlooLink, PageReceiver, PageSender
from workbench.cluster.apart.pool_messages import Adopt, ChannelAddress, ChannelBroken, Connect, Disconnect
from workbench.kv_cache.store import KVStore

STALL_SECONDS = 60.0  # maximum time between two layers of a transfer; after it, its pages are computed again


@dataclass(frozen=True)
class _Arriving:
    """A transfer with bytes still to arrive."""

    message: Adopt
    receiver: PageReceiver | None
    since: float  # time.monotonic()


class PageChannels:
    """The channels of one process: its end of each, by channel number.

    Args:
        host: the address of this host.
        post: called in any thread with a message for the coordinator.
        wake: called in any thread when `pop_arrived` may have a new transfer.
    """

    def __init__(self, host: str, post: Callable[[object], None], wake: Callable[[], None]):
        self._host, self._post, self._wake = host, post, wake
        self.senders: dict[int, PageSender] = {}
        self._receivers: dict[int, PageReceiver] = {}
        self._arriving: list[_Arriving] = []

    @property
    def is_waiting(self) -> bool:
        """Return whether a transfer is still to arrive."""
        return bool(self._arriving)

    def connect(self, message: Connect) -> None:
        """Open one end of a channel, which joins the other end in its own thread."""
        link, number = GlooLink(message, self._host, self._post), message.channel
        if message.sends:
            self.senders[number] = PageSender(link, lambda error: self._post(ChannelBroken(number, error)))
        else:
            self._receivers[number] = PageReceiver(link, self._wake, lambda error: self._broke(number, error))

    def meet(self, message: ChannelAddress) -> None:
        """Set the address at which this end of a channel reaches the other end."""
        end = self.senders.get(message.channel) or self._receivers.get(message.channel)
        if end is not None:
            end.link.meet(message.address)

    def disconnect(self, message: Disconnect) -> None:
        """Note that the process at the other end of a channel has ended."""
        if (sender := self.senders.get(message.channel)) is not None:
            sender.close()
        if (receiver := self._receivers.get(message.channel)) is not None:
            receiver.disconnect()

    def close(self) -> None:
        """Close all channels and end their threads; a receiver's thread ends after its sender has closed."""
        for sender in self.senders.values():
            sender.close()
        for receiver in self._receivers.values():
            receiver.disconnect()

    def expect(self, message: Adopt) -> None:
        """Note that the bytes of a transfer will arrive, and wait for them in the background."""
        assert message.channel is not None
        self._arriving.append(_Arriving(message, self._receivers.get(message.channel), time.monotonic()))

    def pop_arrived(self, store: KVStore) -> Iterator[tuple[Adopt, CopiedPages | None]]:
        """Yield complete transfers with their pages, and failed transfers with None."""
        for each in list(self._arriving):
            found, is_lost = None, each.receiver is None
            if each.receiver is not None:
                is_lost = each.receiver.error is not None or self._has_stalled(each)  # before `pop`
                found = each.receiver.pop(each.message.key, each.message.sent_pass, each.message.handed, store)
            if found is not None or is_lost:
                self._arriving.remove(each)
                if found is None:
                    self.drop(each.message.key)
                yield each.message, found

    def cancel(self, request_id: str) -> Iterator[Adopt]:
        """Drop and yield the transfers of a request that have not arrived."""
        for each in [each for each in self._arriving if each.message.key.request_id == request_id]:
            self._arriving.remove(each)
            self.drop(each.message.key)
            yield each.message

    def drop(self, key: TransferKey) -> None:
        """Drop a transfer that is no longer needed."""
        for receiver in self._receivers.values():
            receiver.drop(key)

    def _broke(self, number: int, error: str) -> None:
        self._post(ChannelBroken(number, error))
        self._wake()

    @staticmethod
    def _has_stalled(each: _Arriving) -> bool:
        assert each.receiver is not None
        return time.monotonic() - max(each.since, each.receiver.heard_at) > STALL_SECONDS
