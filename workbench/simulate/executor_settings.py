"""Settings of the executor: the model itself, a simulated clock with known step times, or engines in processes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from workbench.settings import Count, Settings
from workbench.simulate.roofline import Hardware
from workbench.simulate.routers import LeastLoaded, Router

Share = Annotated[float, Field(gt=0, le=1)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class RealExecutor(Settings):
    """Compute every step with the model."""

    kind: Literal["real"] = "real"


class UncachedExecutor(Settings):
    """Compute every token from the whole text, without a KV cache.

    Uses the model's own modules on their backend or, with `oracle`, oracle/naive.py."""

    kind: Literal["uncached"] = "uncached"
    oracle: bool = False


class DecodePoolSettings(Settings):
    """Settings of a decode pool, to which the other instances hand over keys and values.

    A transfer runs at `bytes_per_second` of the network (the hardware's unless given) after `latency` seconds."""

    instances: Count = 1  # engines among which requests are shared
    router: Router = LeastLoaded()  # chooses the instance of each request
    bytes_per_second: Annotated[float, Field(gt=0)] | None = None
    latency: Seconds = 0.0


class FailureSettings(Settings):
    """Failure of instance `instance` at second `at`; it recovers `down` seconds later, or never."""

    instance: Annotated[int, Field(ge=0)]
    at: Seconds
    down: Seconds | None = None


class SimulatedExecutor(Settings):
    """Carry out the scheduler's plans on a simulated clock, without weights.

    Steps take the roofline of `hardware` (a data sheet's name, `here` for this machine's measured ceilings, or figures)
    at `compute_share` and `memory_share` of its peaks, plus `overhead` seconds. With `steps`, a run folder, they follow
    a model fitted to its steps."""

    kind: Literal["simulated"] = "simulated"
    hardware: str | Hardware = "h100"
    gpus: Count = 1  # that share each layer of an instance, and its cache: tensor parallelism
    pipeline: Count = 1  # stages of whole layers, each on so many gpus
    microbatches: Count | None = None  # at most so many a step, for the stages; None: as many as stages
    memory: Share = 0.9  # of their memory, for weights and cache
    compute_share: Share = 1.0
    memory_share: Share = 1.0
    overhead: Seconds = 0.0
    steps: str | None = None
    instances: Count = 1  # engines among which requests are shared
    router: Router = LeastLoaded()  # chooses the instance of each request
    decode: DecodePoolSettings | None = None
    failures: tuple[FailureSettings, ...] = ()  # instances that fail


class ProcessDecodeSettings(Settings):
    """Settings of a decode pool of processes, to which the other instances hand over keys and values.

    A prediction reckons with `bytes_per_second` after `latency` seconds, those of the transfer unless given."""

    instances: Count = 1  # engines among which requests are shared
    router: Router = LeastLoaded()  # chooses the instance of each request
    transfer: Literal["shared", "gloo"] = "shared"  # page numbers in a shared memory, or bytes
    bytes_per_second: Annotated[float, Field(gt=0)] | None = None
    latency: Seconds | None = None


class KillSettings(Settings):
    """SIGKILL to the process of instance `instance` at second `at` of the traffic; another takes its place."""

    instance: Annotated[int, Field(ge=0)]
    at: Seconds


class CalibrationSettings(Settings):
    """Requests of the traffic, after those that are measured, to which a prediction's step times are fitted."""

    requests: Count = 16  # how many


class ProcessesExecutor(Settings):
    """Serve the requests by engines in processes of this machine: the real twin of `simulated`.

    Without `decode` they are whole engines behind a router (replicas, on Ray), with it a pool for prompts and one for
    decodes. Each has the threads of `measure.threads`, an equal share of the cores unless given. With `predict` every
    variant is simulated before any is measured."""

    kind: Literal["processes"] = "processes"
    instances: Count = 1  # engines among which requests are shared
    router: Router = LeastLoaded()  # chooses the instance of each request
    decode: ProcessDecodeSettings | None = None
    failures: tuple[KillSettings, ...] = ()  # processes that are killed
    predict: CalibrationSettings | None = CalibrationSettings()

    @property
    def num_engines(self) -> int:
        return self.instances + (self.decode.instances if self.decode else 0)


AnyExecutorSettings = Annotated[
    RealExecutor | UncachedExecutor | SimulatedExecutor | ProcessesExecutor, Field(discriminator="kind")
]
