"""Define the settings of traffic: arrival times, lengths, number of requests."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from workbench.settings import Count, Settings

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class AsRecorded(Settings):
    """Use the times of the trace or of the generator."""

    kind: Literal["as_recorded"] = "as_recorded"


class AtOnce(Settings):
    """Send all requests at second 0."""

    kind: Literal["at_once"] = "at_once"


class Poisson(Settings):
    """Send requests independently, `rate` a second on average."""

    kind: Literal["poisson"] = "poisson"
    rate: Positive


class Bursts(Settings):
    """Send bursts of `size` requests independently, `rate` requests a second on average."""

    kind: Literal["bursts"] = "bursts"
    rate: Positive
    size: Count = 8


class ClosedLoop(Settings):
    """Simulate `clients` users; each sends the next request `think` seconds after the end of the last answer."""

    kind: Literal["closed_loop"] = "closed_loop"
    clients: Count
    think: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0


Arrivals = Annotated[AsRecorded | AtOnce | Poisson | Bursts | ClosedLoop, Field(discriminator="kind")]


class FixedLengths(Settings):
    """Use the same lengths for every request; nothing is shared."""

    kind: Literal["fixed"] = "fixed"
    prompt: Count = 512
    output: Count = 128


class ExponentialLengths(Settings):
    """Draw lengths independently with these means (a geometric distribution, at least one token)."""

    kind: Literal["exponential"] = "exponential"
    prompt: Count = 512
    output: Count = 128


class SessionLengths(Settings):
    """Simulate `sessions` users with conversations; one of them sends each turn.

    A turn's prompt is a system prompt shared by all, the conversation so far, and a question. After `turns` turns the
    user begins a new conversation."""

    kind: Literal["sessions"] = "sessions"
    sessions: Count = 16
    turns: Count = 8
    system: Annotated[int, Field(ge=0)] = 512
    question: Count = 128
    output: Count = 128


class AzureLengths(Settings):
    """Draw lengths from a generator fitted to the conversations of Azure's public trace of 2023."""

    kind: Literal["azure"] = "azure"


class MooncakeLengths(Settings):
    """Draw lengths and shared prefixes from a generator fitted to Mooncake's public trace of conversations."""

    kind: Literal["mooncake"] = "mooncake"


Lengths = Annotated[
    FixedLengths | ExponentialLengths | SessionLengths | AzureLengths | MooncakeLengths, Field(discriminator="kind")
]


class TrafficSettings(Settings):
    """Requests over time: their arrivals, lengths, tenants, priorities and deadlines."""

    trace: str | None = None
    lengths: Lengths = AzureLengths()
    arrivals: Arrivals = AsRecorded()
    requests: Count | None = None  # number of requests; None: the whole trace, or an hour of the generator
    time: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    length: Positive = 1.0
    seed: Annotated[int, Field(ge=0)] = 0
    tenants: dict[str, Positive] = {}
    priorities: dict[int, Positive] = {}  # weight of each priority; smaller numbers run first under `policy: priority`
    deadlines: dict[Positive, Positive] = {}  # weight of each deadline in seconds; empty: no deadlines
    prediction_error: Annotated[float, Field(ge=0, le=10)] | None = None  # of lengths; None: none predicted
