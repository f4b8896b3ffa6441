"""Define the settings of sweep executors: `--executor local`, or with values `--executor "{kind: ray}"`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator

from workbench.errors import WorkbenchError, explain, nearest
from workbench.files import read_yaml
from workbench.settings import Count, Settings


class SweepExecutorConfig(Settings):
    """Settings common to all executors."""

    processes: Count = 1  # processes per point; more than 1 is not supported yet

    @field_validator("processes")
    @classmethod
    def _one(cls, value: int) -> int:
        if value > 1:
            raise ValueError("a point cannot run on several processes yet: set it to 1")
        return value


class LocalSweepConfig(SweepExecutorConfig):
    """Run on this machine, each point in its own process, `jobs` at once."""

    kind: Literal["local"] = "local"
    jobs: Count = 1


class RaySweepConfig(SweepExecutorConfig):
    """Run on the Ray cluster at `address` (`auto`: this machine's), or start one here with `workers` workers.

    A point has `cpus` cores; default: 1, or on a cluster started here its share of the machine's cores.
    """

    kind: Literal["ray"] = "ray"
    address: str | None = None
    workers: Count = 2
    cpus: Count | None = None
    gpus: Annotated[float, Field(ge=0)] = 0.0


class SlurmSweepConfig(SweepExecutorConfig):
    """Run as jobs of a Slurm cluster, using submitit; `folder` holds its logs and must be visible to every node."""

    kind: Literal["slurm"] = "slurm"
    folder: str = "slurm"
    partition: str | None = None
    timeout_min: Count = 60
    cpus_per_task: Count | None = None
    mem_gb: Annotated[float, Field(gt=0)] | None = None
    gpus_per_node: Count | None = None
    parameters: dict[str, Any] = {}  # further arguments of submitit's executor
    local: bool = False  # run processes of this machine instead of Slurm jobs, by the same code


SweepExecutorSetting = LocalSweepConfig | RaySweepConfig | SlurmSweepConfig
EXECUTORS: dict[str, type[SweepExecutorSetting]] = {
    "local": LocalSweepConfig,
    "ray": RaySweepConfig,
    "slurm": SlurmSweepConfig,
}


def parse_executor(text: str) -> SweepExecutorSetting:
    """Parse the value of `--executor` (WorkbenchError for unknown settings)."""
    values = read_yaml(text, f"--executor {text[:60]}")
    values = {"kind": values} if isinstance(values, str) else values
    kind = values.get("kind") if isinstance(values, dict) else None
    if kind not in EXECUTORS:
        named = f"{kind!r} is none" if kind else "names none"
        raise WorkbenchError(f"--executor {text}: {named} of {', '.join(EXECUTORS)}{nearest(str(kind), EXECUTORS)}")
    try:
        return EXECUTORS[kind].model_validate(values)
    except ValidationError as error:
        raise explain(error, f"--executor {text}", EXECUTORS[kind]) from None
