"""Define the messages between a coordinator of engines and the processes that run them. They travel pickled, in order,
over a connection that ends with either process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from workbench.engine.config import EngineConfig
from workbench.kv_cache.lending import HandedPages, TransferKey
from workbench.kv_cache.shared_memory import MemoryAddress, PageLayout
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
    send_to: int | None = None  # the process that will decode it, where bytes are sent


@dataclass(frozen=True)
class Adopt:
    """Go on with a request on these pages; None: compute them again."""

    key: TransferKey
    request: Request
    handed: HandedPages | None
    sender: int | None = None  # the process that sends their bytes
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
    """Join the process `peer` by a gloo group of two, under `name` in the store."""

    peer: int
    name: str
    store: tuple[str, int]
    sends: bool


@dataclass(frozen=True)
class Stop:
    """End the process."""


# From a process.


@dataclass(frozen=True)
class Described:
    """The model is loaded: what its pages hold, and how many of its own it wants, by cache group."""

    layout: PageLayout
    num_pages: tuple[int, ...]
    max_model_len: int


@dataclass(frozen=True)
class Ready:
    """The runner is built."""


@dataclass(frozen=True)
class OfferPages:
    """A prompt is computed: the engine that goes on with `request` gets `handed`."""

    key: TransferKey
    request: Request
    handed: HandedPages
    sent_pass: int = 0  # of the layers that count, where bytes are sent


@dataclass(frozen=True)
class StepReport:
    """Events with their attempts, offers, and loans that end, after a step or messages."""

    events: list[tuple[int, Event]] = field(default_factory=list)
    offers: list[OfferPages] = field(default_factory=list)
    returned: Pages = field(default_factory=list)
    tainted: Pages = field(default_factory=list)
    needs_pages: bool = False  # a prompt waits for home pages that are lent


@dataclass(frozen=True)
class EngineFailed:
    """The process cannot go on; it ends."""

    error: str
