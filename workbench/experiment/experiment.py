"""Define an experiment: a question and all settings that answer it, as one frozen value that survives a YAML round
trip.

Its workload has a kind. Each kind is one class in one file, which is imported when an experiment names the kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import isclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field, SerializeAsAny, ValidationError, ValidationInfo, create_model
from pydantic_core import InitErrorDetails, PydanticCustomError

from workbench.custom import registered, resolve_path
from workbench.display import Displayable, Table
from workbench.engine.config import SECTIONS, EngineConfig
from workbench.errors import WorkbenchError, explain, nearest, require_tuple
from workbench.experiment import yaml as yaml_text
from workbench.experiment.settings import Sweep
from workbench.experiment.verdict import VariantRows
from workbench.experiment.workloads import LOADED_MEASURES, WORKLOADS
from workbench.files import UnreadableText, own_file, read_bytes, read_yaml
from workbench.prompt.tokenization.tokenizer import Tokenizer
from workbench.request import CustomPart, Request, SamplingParameters
from workbench.settings import Count, Settings, non_default_settings
from workbench.simulate.executor_settings import AnyExecutorSettings, ProcessesExecutor, RealExecutor
from workbench.simulate.source import TrafficSource
from workbench.units import Measure

KINDS = ("prefix", "offload", "evict", "policy", "speculate")  # settings that may be given as the name of a kind alone
Rows = list[dict[str, Any]]
Predictions = dict[str, Any]
ProgressCallback = Callable[[str], None]
RECORDED = "recorded"  # key in a validation's context: the values come from a stored record
MAX_THREADS = 1024  # with more threads the operating system ends the process before torch can refuse


@dataclass
class VariantResults:
    """The results of measured variants: `rows` has a row for each variant, `metadata` the inputs, and `tables` the raw
    data behind the rows.

    `others_cpu_share` is the fraction of the CPU that other processes used during the measured rounds. A share measured
    over the whole run would count our own ended processes as others.
    """

    rows: Rows
    metadata: dict[str, Any]
    tables: dict[str, Rows] = field(default_factory=dict, repr=False)
    others_cpu_share: float | None = None


@dataclass(frozen=True)
class ServedRequests:
    """A description of the requests of a run: the model of `experiment` serves them `repetitions` times, with its cache
    and schedule."""

    experiment: Experiment
    lengths: Mapping[tuple[int, int], int]  # (prompt, output) tokens -> number of requests
    repetitions: int = 1


@dataclass(frozen=True)
class WorkloadCost:
    """The requests and bytes that a run takes. It takes at least `min_seconds` on any machine, because its requests
    arrive over time.
    """

    served: tuple[ServedRequests, ...]
    min_seconds: float = 0.0
    other_bytes: int = 0


class Workload(Settings):
    """A kind of measurement: its settings, its measures, and the functions that measure, predict and draw an
    experiment's variants.

    A user-defined workload is a class in a file, `kind: mine.py:Name`, or a registered class, named by its registered
    name. It must define `measure`; other methods are optional."""

    measures: ClassVar[tuple[Measure, ...]] = ()  # measures of a row
    is_comparison: ClassVar[bool] = True  # a run without variants is a table of one row as well
    is_predicted: ClassVar[bool] = False  # call `predict` in every run, not only with `measure.predict`
    kind: str

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        require_tuple(cls.measures, Measure, f"{cls.__name__}: measures")
        LOADED_MEASURES.extend(cls.measures)

    def measure(self, experiment: Experiment, on_progress: ProgressCallback, predicted: Predictions) -> VariantResults:
        """Measure every variant of `experiment`. `predicted` is the result of `predict`, empty if nothing was
        predicted.
        """
        raise WorkbenchError(f"a workload of kind {self.kind!r} has no `measure`")

    def predict(self, experiment: Experiment, on_progress: ProgressCallback) -> Predictions:
        """Predict every variant before any is measured. Return {"variants": {name: numbers}}."""
        raise WorkbenchError(f"measure.predict: the cost model cannot predict a workload of kind {self.kind!r}")

    def chart(self, rows: VariantRows, title: str) -> Any:
        """Draw the rows as a `Figure`. Return None to have their usual measures drawn as bars."""
        return None

    def cost(self, experiment: Experiment) -> WorkloadCost | None:
        """Return the requests and bytes of a run, to estimate its time; None if they cannot be computed from shapes."""
        return None

    def build_requests(self, experiment: Experiment, tokenizer: Tokenizer | None, vocab: int) -> list[Request]:
        """Build the requests of a run; every call returns the same ones."""
        raise WorkbenchError(f"a workload of kind {self.kind!r} has no separate requests")

    def continued(self, count: int) -> tuple[Workload, int] | None:
        """Return a workload with `count` additional requests, and the index of the first of them; None if it cannot be
        extended.
        """
        return None

    def traffic(self) -> TrafficSource | None:
        """Return the source of arrivals under simulated time; None if the requests have their own arrival times."""
        return None


class RecordedWorkload(Workload):
    """The settings of a user-defined workload as stored in a record; the workload's Python file is not read."""

    model_config = ConfigDict(extra="allow")


def workload_class(kind: object) -> type[Workload]:
    """Return the workload class of `kind`, which names a built-in class, a registered class, or the class at
    `mine.py:Name`. Raises WorkbenchError for an unknown kind.
    """
    if kind is None:
        raise WorkbenchError(f"is missing; known: {', '.join(WORKLOADS)}")
    name = str(kind)
    if name not in WORKLOADS and ":" not in name and registered(name) is None:
        hint = nearest(name, WORKLOADS) or f"; known: {', '.join(WORKLOADS)}; your own: mine.py:Name"
        raise WorkbenchError(f"{name!r} is unknown{hint}")
    found = resolve_path(WORKLOADS.get(name, name))
    if not (isclass(found) and issubclass(found, Workload)):
        raise WorkbenchError(f"{name!r} is no workload: its class must be derived from workbench.parts.Workload")
    return found


def _of_its_kind(values: Any, info: ValidationInfo) -> Any:
    """Validate a workload's settings by the class of its kind. Settings of a record are validated by built-in classes
    only.
    """
    if not isinstance(values, Mapping):
        return values
    if (info.context or {}).get(RECORDED) and values.get("kind") not in WORKLOADS:
        return RecordedWorkload.model_validate(values)
    try:
        found = workload_class(values.get("kind"))
    except WorkbenchError as error:
        fault = PydanticCustomError("workload", "{text}", {"text": str(error)})
        line = InitErrorDetails(type=fault, loc=("kind",), input={})
        raise ValidationError.from_exception_data("Workload", [line]) from None
    return found.model_validate(values)


class SLO(Settings):
    """Service-level objective of a request, in seconds: goodput counts the requests that attain it."""

    ttft: Annotated[float, Field(gt=0)] = 1.0
    tpot: Annotated[float, Field(gt=0)] = 0.1


class MeasureSettings(Settings):
    """Settings of a measurement: warm-up, rounds, threads, ceilings, prediction, SLO."""

    warmup: Annotated[int, Field(ge=0)] = 1  # warm-up runs, which compile kernels and touch all memory once
    rounds: Count = 1  # measured rounds of each variant, in turn with the others; a row has the medians
    threads: Annotated[int, Field(ge=1, le=MAX_THREADS)] | Literal["auto"] = "auto"
    ceilings: bool = True  # measure this machine's ceilings for the roofline
    predict: bool = False  # record the cost model's prediction of each variant before any is run
    slo: SLO = SLO()


class Experiment(Displayable, EngineConfig):
    """Everything that determines a run: the engine's settings, the question, and the workload.

    Equal experiments give equal tokens.

        experiment = Experiment(question="What does INT8 cost?", workload={"kind": "random", "requests": 4})
        experiment.with_("cache.format=int8", "backend=eager")
    """

    question: str
    sampling: SamplingParameters = SamplingParameters()
    # workload that each variant serves; for a kind of your own: {kind: mine.py:Name}
    workload: Annotated[SerializeAsAny[Workload], BeforeValidator(_of_its_kind)]
    # how steps run; uncached recomputes the whole text in each step
    executor: AnyExecutorSettings = RealExecutor()
    measure: MeasureSettings = MeasureSettings()
    variants: dict[str, dict[str, Any]] = {}  # changed settings of each variant: {int8: {cache.format: int8}}
    sweep: Sweep | None = None  # points of `workbench sweep`
    judge: CustomPart | None = None  # function that turns a comparison's rows into verdicts

    @property
    def is_comparison(self) -> bool:
        """Return True if a run of this experiment gives a table of variants, not the results of one set of requests."""
        fleet = isinstance(self.executor, ProcessesExecutor)
        return bool(self.variants) or self.sweep is not None or self.workload.is_comparison or fleet

    def variant(self, name: str) -> Experiment:
        """Return the experiment of variant `name`: this one with the variant's changes, and without variants."""
        return self.single(self.variants[name], f"variants.{name}")

    def single(self, changes: Mapping[str, Any], where: str) -> Experiment:
        """Return a single experiment, without variants, sweep and judge, after applying `changes` (dotted path ->
        value).

        `where` is the prefix of paths in error messages."""
        values = self.model_dump(mode="json", exclude={"variants", "sweep", "judge"})
        for path, value in changes.items():
            _set(values, path, value, f"{where}.{path}")
        return Experiment.from_values(values, where)

    @classmethod
    def from_yaml(cls, text: str | bytes, overrides: tuple[str, ...] = (), where: str = "experiment") -> Experiment:
        """Read an experiment from YAML and apply `path=value` overrides. Errors name the path of the wrong value."""
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
            raise explain(error, where, cls._with_class_of(values.get("workload"))) from None

    @classmethod
    def from_record(cls, recorded: str | bytes | Mapping[str, Any], where: str = "experiment") -> Experiment:
        """Read the experiment of a record, which may come from an untrusted source: no file that it names is read or
        run.
        """
        values = read_yaml(recorded, where) if isinstance(recorded, str | bytes) else dict(recorded)
        try:
            return cls.model_validate(values, context={RECORDED: True})
        except ValidationError as error:
            raise explain(error, where, cls) from None

    @classmethod
    def _with_class_of(cls, workload: Any) -> type[Experiment]:
        """Return a subclass that declares the class of its workload, so that errors can name its settings."""
        try:
            return create_model(cls.__name__, __base__=cls, workload=(workload_class(workload["kind"]), ...))
        except (LookupError, TypeError, WorkbenchError):
            return cls

    @classmethod
    def from_file(cls, path: Path | str, overrides: tuple[str, ...] = ()) -> Experiment:
        """Read the experiment in a YAML file and apply `path=value` overrides.

        If there is no such file, `experiments/NAME.yaml` means the experiment of that name that is installed with the
        package."""
        try:
            text = read_bytes(own_file(Path(path)))
        except UnreadableText as error:
            raise WorkbenchError(f"{path}: cannot read the experiment ({error.reason}); pass a YAML file") from None
        return cls.from_yaml(text, overrides, str(path))

    def to_yaml(self) -> str:
        """Write the whole experiment as YAML, defaults included, the question first."""
        return yaml_text.write_yaml({"question": self.question, **self.model_dump()})

    def with_(self, *overrides: str) -> Experiment:
        """Return a copy with changed settings: `experiment.with_("cache.page_size=16", "backend=eager")`."""
        return Experiment.from_yaml(self.to_yaml(), overrides)

    def _display_table(self) -> Table:
        rows = [(path, value) for path, value in dict(non_default_settings(self)).items() if path != "question"]
        return Table(self.question, rows, note="", collapsed=(("all settings, as YAML", self.to_yaml()),))


def apply_override(values: dict[str, Any], override: str) -> None:
    """Change one setting in the plain `values` by `path=value`. Raises WorkbenchError."""
    path, equals, text = override.partition("=")
    if not equals or not path:
        raise WorkbenchError(f"--set {override}: write it as path=value, for example --set sampling.seed=7")
    try:
        value = read_yaml(text)
    except UnreadableText:
        value = text  # a prompt may hold any text
    _set(values, path, value, f"--set {override}")


def _set(values: dict[str, Any], path: str, value: object, where: str) -> None:
    *parents, last = path.split(".")
    place = values
    for parent in parents:
        found = place.get(parent)
        if found is None:
            place[parent] = {}
        elif parent in SECTIONS and not isinstance(found, dict):  # `model: demo` is short for {name: demo}
            place[parent] = {SECTIONS[parent].main_setting: found}
        elif parent in KINDS and isinstance(found, str):
            place[parent] = {"kind": found}
        place = place[parent]
        if not isinstance(place, dict):
            raise WorkbenchError(f"{where}: {parent} is a value, not a group of settings")
    place[last] = value
