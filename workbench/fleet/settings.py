"""Who carries out an experiment: the model itself, or a clock that knows how long its steps take."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from workbench.fleet.hardware import Hardware
from workbench.fleet.routers import LeastLoaded, Router
from workbench.shown import Brief

Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(gt=0, le=1)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Part(Brief, BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RealExecutor(Part):
    """The model computes every step."""

    kind: Literal["real"] = "real"


class UncachedExecutor(Part):
    """Nothing is kept: whoever wants a token has the whole text computed anew, by the model's own modules on their
    lane or, with `oracle`, by engine/naive.py."""

    kind: Literal["uncached"] = "uncached"
    oracle: bool = False


class DecodePart(Part):
    """Instances that only decode: the others compute prompts and hand over keys and values, at `bytes_per_second` of
    the network (the hardware's unless given) after `latency` seconds."""

    instances: Count = 1
    router: Router = LeastLoaded()
    bytes_per_second: Annotated[float, Field(gt=0)] | None = None
    latency: Seconds = 0.0


class FailurePart(Part):
    """Instance `instance` is gone at second `at`, and back `down` seconds later, or never."""

    instance: Annotated[int, Field(ge=0)]
    at: Seconds
    down: Seconds | None = None


class SimulatedExecutor(Part):
    """No weights: the scheduler's plans are carried out by a clock.

    Steps take what `hardware` allows at best (a data sheet's name, `here` for this machine's measured ceilings, or
    figures), at `compute_share` and `memory_share` of that, and `overhead` seconds more; or with `steps`, a run folder,
    what a table fitted to its steps says.
    """

    kind: Literal["simulated"] = "simulated"
    hardware: str | Hardware = "h100"
    gpus: Count = 1  # that share an instance's weights and cache
    memory: Share = 0.9  # of their memory, for weights and cache
    compute_share: Share = 1.0
    memory_share: Share = 1.0
    overhead: Seconds = 0.0
    steps: str | None = None
    instances: Count = 1
    router: Router = LeastLoaded()
    decode: DecodePart | None = None
    failures: tuple[FailurePart, ...] = ()


Executor = Annotated[RealExecutor | UncachedExecutor | SimulatedExecutor, Field(discriminator="kind")]
