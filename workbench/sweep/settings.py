"""Settings of sweep executors: `--executor local`, or with values `--executor "{kind: ray}"`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator

from workbench.errors import WorkbenchError, explain, nearest
from workbench.files import read_yaml
from workbench.settings import Count, Settings


class SweepExecutorConfig(Settings):
    """Settings common to all executors."""

    processes: Count = 1  # of one point together, for torch.distributed later

    @field_validator("processes")
    @classmethod
    def _one(cls, value: int) -> int:
        if value > 1:
            raise ValueError("one point on several processes is not possible yet: leave it 1")
        return value


class LocalSweepConfig(SweepExecutorConfig):
    """Run on this machine, each point in a process of its own, `jobs` at once."""

    kind: Literal["local"] = "local"
    jobs: Count = 1


class RaySweepConfig(SweepExecutorConfig):
    """Run on the Ray cluster at `address` (`auto`: this machine's), or start one here with so many `workers`.

    A point has `cpus` cores; by default one, on a cluster started here its share of the machine's.
    """

    kind: Literal["ray"] = "ray"
    address: str | None = None
    workers: Count = 2
    cpus: Count | None = None
    gpus: Annotated[float, Field(ge=0)] = 0.0


class SlurmSweepConfig(SweepExecutorConfig):
    """Run as jobs of a Slurm cluster, by submitit; `folder` holds its logs, which every node must see."""

    kind: Literal["slurm"] = "slurm"
    folder: str = "slurm"
    partition: str | None = None
    timeout_min: Count = 60
    cpus_per_task: Count | None = None
    mem_gb: Annotated[float, Field(gt=0)] | None = None
    gpus_per_node: Count | None = None
    parameters: dict[str, Any] = {}  # further parameters of submitit's executor
    local: bool = False  # processes of this machine in place of Slurm's jobs, by the same code


SweepExecutorSetting = LocalSweepConfig | RaySweepConfig | SlurmSweepConfig
EXECUTORS: dict[str, type[SweepExecutorSetting]] = {
    "local": LocalSweepConfig,
    "ray": RaySweepConfig,
    "slurm": SlurmSweepConfig,
}


def parse_executor(text: str, **changes: Any) -> SweepExecutorSetting:
    """Parse the words of `--executor`;

    `changes` that are not None override them. WorkbenchError for unknown settings.
    """
    values = read_yaml(text, f"--executor {text[:60]}")
    values = {"kind": values} if isinstance(values, str) else values
    kind = values.get("kind") if isinstance(values, dict) else None
    if kind not in EXECUTORS:
        named = f"{kind!r} is none" if kind else "names none"
        raise WorkbenchError(f"--executor {text}: {named} of {', '.join(EXECUTORS)}{nearest(str(kind), EXECUTORS)}")
    values |= {name: value for name, value in changes.items() if value is not None}
    try:
        return EXECUTORS[kind].model_validate(values)
    except ValidationError as error:
        raise explain(error, f"--executor {text}", EXECUTORS[kind]) from None
