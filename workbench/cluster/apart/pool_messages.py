"""Define the messages between a coordinator of engines and the processes that run them. They travel pickled, in order,
over a connection that ends with either process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

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
    threads: int  # of torch


@dataclass(frozen=True)
class Begin:
    """Build the runner: on pages of a shared memory, or on its own."""

    memory: MemoryAddress | None = None
    totals: tuple[int, ...] = ()
    homes: tuple[range, ...] = ()
    lent: tuple[dict[int, int], ...] = ()  # by a predecessor that died
    is_successor: bool = False


@dataclass(frozen=True)
class Run:
    """Compute a request: to its first token and hand it over, or to its end."""

    request: Request
    attempt: int
    hands_over: bool
    channel: int | None = None  # to the process that will decode it, where bytes are sent


@dataclass(frozen=True)
class Adopt:
    """Go on with a request on these pages."""

    key: TransferKey
    request: Request
    handed: HandedPages
    channel: int | None = None  # over which their bytes come
    sent_pass: int = 0


@dataclass(frozen=True)
class Drop:
    """Forget the bytes of a transfer: its request has ended or goes elsewhere."""

    key: TransferKey


@dataclass(frozen=True)
class TakeBack:
    """End loans of home pages."""

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
    """Open one end of a channel: answer with its `ChannelAddress`, and expect that of the other end."""

    channel: int
    sends: bool


@dataclass(frozen=True)
class Disconnect:
    """The process at the other end of a channel has ended: what it has not sent will not come."""

    channel: int


@dataclass(frozen=True)
class EngineCall:
    """Run a function of the runner, pickled, and answer with `Called`, between two steps."""

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
    """The place at which one end of a channel listens, as gloo writes it."""

    channel: int
    address: bytes


@dataclass(frozen=True)
class ChannelBroken:
    """A channel failed while both of its processes live, as far as this one knows."""

    channel: int
    error: str


@dataclass(frozen=True)
class Described:
    """The model is loaded: what its pages hold, and how many of its own it wants, by cache group."""

    layout: PageLayout
    num_pages: tuple[int, ...]
    time: float  # on the clock of its events


@dataclass(frozen=True)
class Ready:
    """The runner is built, with these pages."""

    pages: PageCounts


@dataclass(frozen=True)
class OfferPages:
    """A prompt is computed: the engine that goes on with `request` gets `handed`."""

    key: TransferKey
    request: Request
    handed: HandedPages
    channel: int | None = None  # over which their bytes go, where they do
    sent_pass: int = 0  # of the layers that count


@dataclass(frozen=True)
class StepReport:
    """Events with their attempts, offers, transfers that arrived, and loans that end, after a step or messages."""

    events: list[tuple[int, Event]] = field(default_factory=list)
    offers: list[OfferPages] = field(default_factory=list)
    adopted: list[TransferKey] = field(default_factory=list)  # whose pages are here; others are computed again
    returned: Pages = field(default_factory=list)
    needs_pages: bool = False  # a prompt waits for home pages that are lent
    pages: PageCounts | None = None  # after it


@dataclass(frozen=True)
class Pong:
    """The process goes on: no step of it hangs."""


@dataclass(frozen=True)
class Called:
    """Answer a `EngineCall`: what the function returned, or its error."""

    value: Any = None
    error: str = ""


@dataclass(frozen=True)
class EngineFailed:
    """The process cannot go on; it ends."""

    error: str
