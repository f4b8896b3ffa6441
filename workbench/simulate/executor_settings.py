"""Define the settings of the executor: the model itself, a simulated clock with known step times, or engines in
processes."""

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

    It uses the model's own modules on their backend or, with `oracle`, oracle/naive.py."""

    kind: Literal["uncached"] = "uncached"
    oracle: bool = False


class DecodePoolSettings(Settings):
    """Settings of a decode pool, which receives keys and values from the other instances.

    A transfer runs at `bytes_per_second` (default: the hardware's network) after `latency` seconds."""

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
    """Run the scheduler's plans on a simulated clock, without weights.

    Steps take the roofline of `hardware` (a data sheet's name, `here` for this machine's measured ceilings, or figures)
    at `compute_share` and `memory_share` of its peaks, plus `overhead` seconds. With `steps`, a run folder, they follow
    a model fitted to its steps."""

    kind: Literal["simulated"] = "simulated"
    hardware: str | Hardware = "h100"
    gpus: Count = 1  # accelerators that share each layer and its cache: tensor parallelism
    pipeline: Count = 1  # stages of whole layers, each on `gpus` accelerators
    microbatches: Count | None = None  # maximum microbatches of a step; None: one per stage
    memory: Share = 0.9  # fraction of the accelerators' memory for weights and cache
    compute_share: Share = 1.0
    memory_share: Share = 1.0
    overhead: Seconds = 0.0
    steps: str | None = None
    instances: Count = 1  # engines among which requests are shared
    router: Router = LeastLoaded()  # chooses the instance of each request
    decode: DecodePoolSettings | None = None
    failures: tuple[FailureSettings, ...] = ()  # instances that fail


class ProcessDecodeSettings(Settings):
    """Settings of a decode pool of processes, which receives keys and values from the other instances.

    Predictions assume `bytes_per_second` after `latency` seconds; default: values of the transfer."""

    instances: Count = 1  # engines among which requests are shared
    router: Router = LeastLoaded()  # chooses the instance of each request
    transfer: Literal["shared", "gloo"] = "shared"  # shared: page numbers of a shared memory; gloo: bytes
    bytes_per_second: Annotated[float, Field(gt=0)] | None = None
    latency: Seconds | None = None


class KillSettings(Settings):
    """Send SIGKILL to the process of instance `instance` at second `at` of the traffic; a successor replaces it."""

    instance: Annotated[int, Field(ge=0)]
    at: Seconds


class CalibrationSettings(Settings):
    """Requests of the traffic that follow the measured ones; a prediction's step times are fitted to them."""

    requests: Count = 16  # number of requests


class ProcessesExecutor(Settings):
    """Serve the requests with engines in processes of this machine: the real counterpart of `simulated`.

    Without `decode` they are whole engines behind a router (replicas, on Ray); with it, a prefill and a decode pool.
    Each engine has `measure.threads` threads, by default an equal share of the cores. With `predict` every variant is
    simulated before any is measured."""

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
