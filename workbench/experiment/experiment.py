"""An experiment: a question and all settings that answer it, as one frozen value that survives a YAML round trip."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from workbench.display import Displayable, Table
from workbench.engine.config import SECTIONS, EngineConfig
from workbench.errors import WorkbenchError, explain
from workbench.experiment import yaml as yaml_text
from workbench.experiment.settings import (
    AgentWorkload,
    DeterminismWorkload,
    LengthsWorkload,
    PrefillInterferenceWorkload,
    QualityWorkload,
    SharedPrefixWorkload,
    SpeculationWorkload,
    StreamingWorkload,
    Sweep,
    TextAgreementWorkload,
    TextsWorkload,
)
from workbench.files import UnreadableText, own_file, read_bytes, read_yaml
from workbench.request import CustomPart, SamplingParameters
from workbench.settings import Count, Settings, non_default_settings
from workbench.simulate.executor_settings import AnyExecutorSettings, ProcessesExecutor, RealExecutor
from workbench.simulate.traffic_settings import TrafficWorkload

KINDS = ("prefix", "offload", "evict", "policy", "speculate")  # settings that are given by a kind alone, too
MAX_THREADS = 1024  # beyond it the system, not torch, refuses, and ends the process


class PromptsWorkload(Settings):
    """The given texts, all submitted at once, each `copies` times with seeds counted up from the sampling's."""

    kind: Literal["prompts"] = "prompts"
    prompts: Annotated[tuple[str, ...], Field(min_length=1)]
    copies: Count = 1


class RandomWorkload(Settings):
    """`requests` prompts of random tokens; every output has its full length."""

    kind: Literal["random"] = "random"
    requests: Count = 16
    prompt_tokens: Count = 32
    output_tokens: Count = 128
    seed: Annotated[int, Field(ge=0)] = 0


# Workloads whose run is a table of variants.
COMPARISONS = (
    QualityWorkload
    | SharedPrefixWorkload
    | DeterminismWorkload
    | SpeculationWorkload
    | PrefillInterferenceWorkload
    | StreamingWorkload
    | LengthsWorkload
    | TextsWorkload
    | TextAgreementWorkload
    | AgentWorkload
)
Workload = Annotated[PromptsWorkload | RandomWorkload | TrafficWorkload | COMPARISONS, Field(discriminator="kind")]


class SLO(Settings):
    """Service-level objective of a request, in seconds: goodput counts the requests that attain it."""

    ttft: Annotated[float, Field(gt=0)] = 1.0
    tpot: Annotated[float, Field(gt=0)] = 0.1


class MeasureSettings(Settings):
    """Settings of a measurement: warm-up, rounds, threads, ceilings, prediction, SLO."""

    warmup: Annotated[int, Field(ge=0)] = 1  # warm-up runs, which compile and touch everything once
    rounds: Count = 1  # measured rounds of each variant, interleaved; a row has their medians
    threads: Annotated[int, Field(ge=1, le=MAX_THREADS)] | Literal["auto"] = "auto"
    ceilings: bool = True  # measure this machine's ceilings, for the roofline
    predict: bool = False  # record the cost model's prediction of each variant before any is run
    slo: SLO = SLO()


class Experiment(Displayable, EngineConfig):
    """Everything that determines a run: an engine's config, the question, and what is asked of the engine.

    The same value gives the same tokens.

        experiment = Experiment(question="What does INT8 cost?", workload={"kind": "random", "requests": 4})
        experiment.with_("cache.format=int8", "backend=eager")
    """

    question: str
    sampling: SamplingParameters = SamplingParameters()
    workload: Workload
    # how steps are carried out; uncached computes the whole text in each
    executor: AnyExecutorSettings = RealExecutor()
    measure: MeasureSettings = MeasureSettings()
    variants: dict[str, dict[str, Any]] = {}  # changes by name: {int8: {cache.format: int8}}
    sweep: Sweep | None = None  # the points that `workbench sweep` runs
    judge: CustomPart | None = None  # function from a comparison's rows to verdicts

    @property
    def is_comparison(self) -> bool:
        """True if a run of it is a table of variants rather than one set of requests."""
        fleet = isinstance(self.executor, ProcessesExecutor)
        return bool(self.variants) or self.sweep is not None or isinstance(self.workload, COMPARISONS) or fleet

    def variant(self, name: str) -> Experiment:
        """Return the experiment of the variant `name`: this one with its changes, without variants."""
        return self.single(self.variants[name], f"variants.{name}")

    def single(self, changes: Mapping[str, Any], where: str) -> Experiment:
        """Return one experiment with `changes` (dotted path -> value), without variants, sweep and judge.

        `where` is the prefix of paths in error messages."""
        values = self.model_dump(mode="json", exclude={"variants", "sweep", "judge"})
        for path, value in changes.items():
            _set(values, path, value, f"{where}.{path}")
        return Experiment.from_values(values, where)

    @classmethod
    def from_yaml(cls, text: str | bytes, overrides: tuple[str, ...] = (), where: str = "experiment") -> Experiment:
        """Read YAML and apply `path=value` overrides. Errors name the path of the wrong value."""
        values = read_yaml(text, where)
        if not isinstance(values, dict):
            kind = type(values).__name__
            raise WorkbenchError(f"{where}: must be a mapping with `question` and `workload`, not {kind}")
        for override in overrides:
            apply_override(values, override)
        return cls.from_values(values, where)

    @classmethod
    def from_values(cls, values: dict[str, Any], where: str = "experiment") -> Experiment:
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise explain(error, where, cls) from None

    @classmethod
    def from_file(cls, path: Path | str, overrides: tuple[str, ...] = ()) -> Experiment:
        """Read the experiment in a YAML file and apply `path=value` overrides.

        Where there is no such file, `experiments/NAME.yaml` is the project's own experiment of that name, which is
        installed with the package."""
        try:
            text = read_bytes(own_file(Path(path)))
        except UnreadableText as error:
            raise WorkbenchError(f"{path}: cannot read this experiment ({error.reason}); name a YAML file") from None
        return cls.from_yaml(text, overrides, str(path))

    def to_yaml(self) -> str:
        """Write the whole experiment as YAML, defaults included, the question first."""
        return yaml_text.write_yaml({"question": self.question, **self.model_dump()})

    def with_(self, *overrides: str) -> Experiment:
        """Return a changed copy: `experiment.with_("cache.page_size=16", "backend=eager")`."""
        return Experiment.from_yaml(self.to_yaml(), overrides)

    def _display_table(self) -> Table:
        rows = [(path, value) for path, value in non_default_settings(self) if path != "question"]
        return Table(self.question, rows, note="", collapsed=(("all settings, as YAML", self.to_yaml()),))


def apply_override(values: dict[str, Any], override: str) -> None:
    """Change one of the plain values by `path=value` (WorkbenchError)."""
    path, equals, text = override.partition("=")
    if not equals or not path:
        raise WorkbenchError(f"--set {override}: write it as path=value, for example --set sampling.seed=7")
    try:
        value = read_yaml(text)
    except UnreadableText:
        value = text  # a prompt may hold anything
    _set(values, path, value, f"--set {override}")


def _set(values: dict[str, Any], path: str, value: object, where: str) -> None:
    *parents, last = path.split(".")
    place = values
    for parent in parents:
        found = place.get(parent)
        if found is None:
            place[parent] = {}
        elif parent in SECTIONS and not isinstance(found, dict):  # `model: demo` for {name: demo}
            place[parent] = {SECTIONS[parent].main_setting: found}
        elif parent in KINDS and isinstance(found, str):
            place[parent] = {"kind": found}
        place = place[parent]
        if not isinstance(place, dict):
            raise WorkbenchError(f"{where}: {parent} is a value, not a group of settings")
    place[last] = value
