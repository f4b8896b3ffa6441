"""Define the messages between a coordinator of engines and the processes that run them. They travel pickled, in order,
over a connection that ends with either process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from workbench.cluster.apart.lending import HandedPages, TransferKey
from workbench.cluster.apart.page_layout import PageLayout
from workbench.cluster.apart.shared_memory import MemoryAddress
from workbench.cluster.replica import PageCounts
from workbench.engine.config import EngineConfig
from workbench.request import Request
from workbench.trace.events import Event

Transfer = Literal["shared", "gloo"]
Pages = list[list[int]]  # by cache group


# From the coordinator.


@dataclass(frozen=True)
class Start:
    """Load the model of `config`, and answer with a `Described`."""

    name: str
    config: EngineConfig
    threads: int  # torch threads
    transfer: Transfer | None  # None: it hands nothing over


@dataclass(frozen=True)
class Begin:
    """Build the runner: on pages of a shared memory, or on its own."""

    memory: MemoryAddress | None = None
    totals: tuple[int, ...] = ()
    homes: tuple[range, ...] = ()
    lent: tuple[dict[int, int], ...] = ()  # loans by page, given by a predecessor that died
    is_successor: bool = False


@dataclass(frozen=True)
class Run:
    """Compute a request to its end, or to its first token and then hand it over."""

    request: Request
    attempt: int
    hands_over: bool
    channel: int | None = None  # channel to the decode process, if pages are sent as bytes


@dataclass(frozen=True)
class Adopt:
    """Continue a request on pages that another engine computed."""

    key: TransferKey
    request: Request
    handed: HandedPages
    channel: int | None = None  # channel that delivers the pages' bytes
    sent_pass: int = 0


@dataclass(frozen=True)
class Drop:
    """Drop the bytes of a transfer: its request has ended or moved elsewhere."""

    key: TransferKey


@dataclass(frozen=True)
class TakeBack:
    """End loans of pages that the receiving engine owns."""

    pages: Pages
    tainted: bool = False


@dataclass(frozen=True)
class Recall:
    """Give back borrowed pages that no sequence references."""


@dataclass(frozen=True)
class Cancel:
    request_id: str


@dataclass(frozen=True)
class Connect:
    """Open one end of a channel: answer with its `ChannelAddress`, and expect the other end's address."""

    channel: int
    sends: bool


@dataclass(frozen=True)
class Disconnect:
    """The process at the other end of a channel has ended: unsent layers will not come."""

    channel: int


@dataclass(frozen=True)
class EngineCall:
    """Call a pickled function with the runner between two steps, and answer with `Called`."""

    function: bytes


@dataclass(frozen=True)
class Stop:
    """End the process."""


@dataclass(frozen=True)
class Ping:
    """Answer with a `Pong`, between two steps."""


# From a process; the coordinator passes a channel's address on to its other end.


@dataclass(frozen=True)
class ChannelAddress:
    """The address of one end of a channel, in gloo's format."""

    channel: int
    address: bytes


@dataclass(frozen=True)
class ChannelBroken:
    """A channel failed although both of its processes seem to be alive."""

    channel: int
    error: str


@dataclass(frozen=True)
class Described:
    """The model is loaded. Has the layout of the pages that the engine hands over, and the number of pages requested by
    cache group.
    """

    layout: PageLayout | None
    num_pages: tuple[int, ...]
    time: float  # on the clock of the process's events


@dataclass(frozen=True)
class Ready:
    """The runner is built. Has the counts of its pages, its fingerprint and the size of its cache."""

    pages: PageCounts
    fingerprint: str
    cache_tokens: int  # size of its cache in tokens


@dataclass(frozen=True)
class OfferPages:
    """A prompt is computed: offer the pages `handed` to the engine that will continue `request`."""

    key: TransferKey
    request: Request
    handed: HandedPages
    channel: int | None = None  # channel that carries the pages' bytes; None for shared memory
    sent_pass: int = 0  # the pass that counts


@dataclass(frozen=True)
class StepReport:
    """Events with their attempts, offers, adopted transfers and returned loans, after a step or after messages."""

    events: list[tuple[int, Event]] = field(default_factory=list)
    offers: list[OfferPages] = field(default_factory=list)
    adopted: list[TransferKey] = field(default_factory=list)  # transfers with pages here; others are computed again
    returned: Pages = field(default_factory=list)
    needs_pages: bool = False  # a prompt waits for lent home pages
    pages: PageCounts | None = None  # after the step


@dataclass(frozen=True)
class Pong:
    """The process is alive and between two steps."""


@dataclass(frozen=True)
class Called:
    """Answer an `EngineCall` with the function's pickled result or its error."""

    value: bytes = b""
    error: str = ""


@dataclass(frozen=True)
class EngineFailed:
    """The process failed and ends."""

    error: str
