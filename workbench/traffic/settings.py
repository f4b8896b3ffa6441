"""A traffic as values of an experiment: when requests come, how long they are, and how many."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from workbench.shown import Brief

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Part(Brief, BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class AsRecorded(Part):
    """At the trace's or the generator's own times."""

    kind: Literal["as_recorded"] = "as_recorded"


class AtOnce(Part):
    """All at second 0."""

    kind: Literal["at_once"] = "at_once"


class Poisson(Part):
    """Independently, `rate` a second in the mean."""

    kind: Literal["poisson"] = "poisson"
    rate: Positive


class Bursts(Part):
    """`size` at once; bursts come independently, so that `rate` requests a second come in the mean."""

    kind: Literal["bursts"] = "bursts"
    rate: Positive
    size: Count = 8


class ClosedLoop(Part):
    """`clients` users, each of whom asks again `think` seconds after the last answer ended."""

    kind: Literal["closed_loop"] = "closed_loop"
    clients: Count
    think: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0


Arrivals = Annotated[AsRecorded | AtOnce | Poisson | Bursts | ClosedLoop, Field(discriminator="kind")]


class Fixed(Part):
    """Every request alike; none shares anything."""

    kind: Literal["fixed"] = "fixed"
    prompt: Count = 512
    output: Count = 128


class Exponential(Part):
    """Lengths drawn independently with these means (a geometric distribution, at least one token)."""

    kind: Literal["exponential"] = "exponential"
    prompt: Count = 512
    output: Count = 128


class Sessions(Part):
    """Conversations: `sessions` users, one of whom asks next. A turn's prompt is a system prompt that all share, the
    conversation so far, and a question; after `turns` turns the user begins a new one."""

    kind: Literal["sessions"] = "sessions"
    sessions: Count = 16
    turns: Count = 8
    system: Annotated[int, Field(ge=0)] = 512
    question: Count = 128
    output: Count = 128


class Azure(Part):
    """As the conversations of Azure's public trace of 2023: a generator fitted to it."""

    kind: Literal["azure"] = "azure"


class Mooncake(Part):
    """As the conversations of Mooncake's public trace, with its shared prefixes: a generator fitted to it."""

    kind: Literal["mooncake"] = "mooncake"


Lengths = Annotated[Fixed | Exponential | Sessions | Azure | Mooncake, Field(discriminator="kind")]


class TrafficWorkload(Part):
    """Requests over time. A `trace` file takes the place of `lengths`; `time` and `length` scale gaps and texts.

    `tenants` and `priorities` say whose requests are and how urgent, each with its share: {a: 3, b: 1}, {0: 1, 5: 9}.
    All requests of a session are of one tenant; only requests of one tenant share cached pages.
    """

    kind: Literal["traffic"] = "traffic"
    trace: str | None = None
    lengths: Lengths = Azure()
    arrivals: Arrivals = AsRecorded()
    requests: Count | None = None  # None: all of the trace, or an hour of the generator
    time: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    length: Positive = 1.0
    seed: Annotated[int, Field(ge=0)] = 0
    tenants: dict[str, Positive] = {}
    priorities: dict[int, Positive] = {}  # the smaller, the sooner, under `policy: priority`
