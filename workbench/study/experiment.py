"""A question as one frozen value: YAML in, YAML out, equal after the round trip."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from workbench.cache.evict import EvictPart
from workbench.cache.format import CacheFormat
from workbench.cache.settings import NoOffload, NoPrefix, Offload, Prefix
from workbench.engine.excluded import excluded
from workbench.engine.limits import Limits
from workbench.engine.policies import FCFS
from workbench.engine.schedule import Kind, PolicySetting, SetBack
from workbench.engine.speculation import NoSpeculation, Speculate
from workbench.errors import WorkbenchError, explain
from workbench.files import UnreadableText, read_bytes, read_yaml
from workbench.fleet.settings import Executor, RealExecutor
from workbench.model.composition import AttentionPart
from workbench.model.quantized import Activations, Format, WeightFormat
from workbench.request import SamplingParameters, UserPart
from workbench.shown import Brief, Shown, Table, differing
from workbench.study import yaml_text
from workbench.study.company_workload import CompanyWorkload
from workbench.study.interruption_workload import InterruptionWorkload
from workbench.study.lengths_workload import LengthsWorkload
from workbench.study.parts import Count, Part
from workbench.study.quality_workload import QualityWorkload, SharedPrefixWorkload
from workbench.study.speculation_workload import SpeculationWorkload
from workbench.study.streaming_workload import StreamingWorkload
from workbench.study.sweep_part import Sweep
from workbench.study.texts_workload import TextsWorkload
from workbench.traffic.settings import TrafficWorkload

MOST_THREADS = 1024  # beyond it the system, not torch, says no, and ends the process


class ModelPart(Part):
    """Which model: a folder, `demo`, `demo-draft`, or `shape:NAME` with random weights from `seed`."""

    name: str = "demo"
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    weights: Format = "dense"  # of the products' matrices
    head_weights: Format | None = None  # of the output head; None is as `weights`
    weight_group: Annotated[int, Field(ge=2, multiple_of=2)] = 64  # columns that share a scale in int4
    activations: Activations = "float"  # what int8 weights are multiplied with; int8: each row quantized as it comes
    device: str = "cpu"
    seed: Annotated[int, Field(ge=0)] = 0

    @property
    def format(self) -> WeightFormat:
        return WeightFormat.of(self.weights, self.head_weights, self.weight_group, self.activations)

    @model_validator(mode="after")
    def _activations_are_for_int8(self) -> ModelPart:
        try:
            assert self.format
        except WorkbenchError as error:
            raise ValueError(str(error)) from None
        return self


class CachePart(Brief, CacheFormat):
    """How keys and values are kept. `auto` pages: full context for every sequence, within 1 GiB."""

    page_size: Count = 64
    pages: Count | Literal["auto"] = "auto"
    prefix: Prefix = NoPrefix()  # whether full pages are found again by their tokens, and for how long
    offload: Offload = NoOffload()  # where pages of a sequence that is set back may lie
    evict: EvictPart | None = None  # which tokens stay when a sequence may hold only so many


class SchedulePart(Part):
    """How requests share the steps."""

    kind: Kind = "continuous"  # static: a batch waits for its last, and nobody joins it
    policy: PolicySetting = FCFS()  # who is served next
    max_num_seqs: Count = 16
    max_num_batched_tokens: Count = 512
    chunked_prefill: bool = True  # a prompt may be cut where a step's tokens end
    chunk_tokens: Count | None = None  # a step's prefill tokens at most; None: all its tokens
    set_back: SetBack = "auto"  # what becomes of the pages of who gives way; auto: offload, where there is a place
    overflow: Literal["refuse", "cut_oldest"] = "refuse"

    @model_validator(mode="after")
    def _possible(self) -> SchedulePart:
        Limits(self.max_num_seqs, self.max_num_batched_tokens, self.chunk_tokens, self.chunked_prefill)
        return self


class PromptsWorkload(Part):
    """The texts given, all at once, each `copies` times with seeds counted up from the sampling's."""

    kind: Literal["prompts"] = "prompts"
    prompts: Annotated[tuple[str, ...], Field(min_length=1)]
    copies: Count = 1


class RandomWorkload(Part):
    """`requests` prompts of random tokens; outputs have full length whatever the model says."""

    kind: Literal["random"] = "random"
    requests: Count = 16
    prompt_tokens: Count = 32
    output_tokens: Count = 128
    seed: Annotated[int, Field(ge=0)] = 0


# Those whose run is a table of variants.
COMPARISONS = (
    QualityWorkload
    | SharedPrefixWorkload
    | CompanyWorkload
    | SpeculationWorkload
    | InterruptionWorkload
    | StreamingWorkload
    | LengthsWorkload
    | TextsWorkload
)
Workload = Annotated[PromptsWorkload | RandomWorkload | TrafficWorkload | COMPARISONS, Field(discriminator="kind")]


class Promise(Part):
    """What a request is promised, in seconds: goodput counts those that get it."""

    ttft: Annotated[float, Field(gt=0)] = 1.0
    tpot: Annotated[float, Field(gt=0)] = 0.1


class MeasurePart(Part):
    """What is run besides the run that is recorded."""

    warmup: Annotated[int, Field(ge=0)] = 1  # runs before, which compile and touch everything once
    rounds: Count = 1  # that are measured of each variant, in turn; a row has their medians
    threads: Annotated[int, Field(ge=1, le=MOST_THREADS)] | Literal["auto"] = "auto"
    ceilings: bool = True  # measure what this machine could do, for the roofline
    predict: bool = False  # of variants: write down, before any is run, what the cost model makes of them
    promise: Promise = Promise()


class Experiment(Shown, Part):
    """Everything that decides what a run does. The same value gives the same tokens.

        experiment = Experiment(question="What does INT8 cost?", workload={"kind": "random", "requests": 4})
        experiment.with_("cache.format=int8", "lane=eager")
    """

    question: str
    model: ModelPart = ModelPart()
    lane: str = "auto"
    compile: Literal["block", "step"] = "block"  # what the lane inductor compiles at once in decode
    batch_invariant: bool = False  # a request has the same bits in any company, chunking, prefix
    attention: AttentionPart = AttentionPart()  # what changes in the model's
    cache: CachePart = CachePart()
    schedule: SchedulePart = SchedulePart()
    speculate: Speculate = NoSpeculation()  # tokens proposed for what comes next, checked by the next step
    sampling: SamplingParameters = SamplingParameters()
    workload: Workload
    executor: Executor = RealExecutor()
    measure: MeasurePart = MeasurePart()
    variants: dict[str, dict[str, Any]] = {}  # by name, what each changes: {int8: {cache.format: int8}}
    sweep: Sweep | None = None  # the points that `workbench sweep` runs
    judge: UserPart | None = None  # what makes verdicts of a comparison's rows: rows -> verdicts

    @model_validator(mode="after")
    def _possible(self) -> Experiment:
        if problem := excluded(self.batch_invariant, self.cache.evict is not None, self.speculate.kind != "none"):
            raise ValueError(problem)
        return self

    @property
    def compares(self) -> bool:
        """Whether a run of it is a table of variants, and not one of requests."""
        return bool(self.variants) or self.sweep is not None or isinstance(self.workload, COMPARISONS)

    def variant(self, name: str) -> Experiment:
        """The experiment that the variant `name` is: this one with its changes, and no variants."""
        return self.alone(self.variants[name], f"variants.{name}")

    def alone(self, changes: Mapping[str, Any], where: str) -> Experiment:
        """One experiment of the many that this is: with `changes` (dotted path -> value), and without variants, sweep
        and judge."""
        values = self.model_dump(mode="json", exclude={"variants", "sweep", "judge"})
        for path, value in changes.items():
            _set(values, path, value, f"{where}.{path}")
        return Experiment.of(values, where)

    @classmethod
    def from_yaml(cls, text: str | bytes, overrides: tuple[str, ...] = (), where: str = "experiment") -> Experiment:
        """Read YAML and apply `path=value` overrides; whatever is wrong is named by its path."""
        values = read_yaml(text, where)
        if not isinstance(values, dict):
            kind = type(values).__name__
            raise WorkbenchError(f"{where}: must be a mapping with `question` and `workload`, not {kind}")
        for override in overrides:
            _override(values, override)
        return cls.of(values, where)

    @classmethod
    def of(cls, values: dict[str, Any], where: str = "experiment") -> Experiment:
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise explain(error, where, cls) from None

    @classmethod
    def read(cls, path: Path | str, overrides: tuple[str, ...] = ()) -> Experiment:
        """The experiment in a YAML file. Where there is no such file, `experiments/NAME.yaml` is the project's own of
        that name, which is installed with it: so README's commands run outside of a checkout too."""
        try:
            text = read_bytes(_file_of(Path(path)))
        except UnreadableText as error:
            raise WorkbenchError(f"{path}: cannot read this experiment ({error.reason}); name a YAML file") from None
        return cls.from_yaml(text, overrides, str(path))

    def to_yaml(self) -> str:
        """The whole experiment, defaults included, in the order of the fields."""
        return yaml_text.write(self.model_dump(mode="json"))

    def with_(self, *overrides: str) -> Experiment:
        """A changed copy: `experiment.with_("cache.page_size=16", "lane=eager")`."""
        return Experiment.from_yaml(self.to_yaml(), overrides)

    def _shown(self) -> Table:
        rows = [(path, value) for path, value in differing(self) if path != "question"]
        return Table(self.question, rows, note="", folded=(("all settings, as YAML", self.to_yaml()),))


def _file_of(path: Path) -> Path:
    """`path`, or the project's own experiment that it names."""
    ours = Path(__file__).resolve().parents[2] / "experiments" / path.name
    return ours if path.parent == Path("experiments") and not path.exists() and ours.is_file() else path


def _override(values: dict[str, Any], override: str) -> None:
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
        if place.get(parent) is None:
            place[parent] = {}
        place = place[parent]
        if not isinstance(place, dict):
            raise WorkbenchError(f"{where}: {parent} is a value, not a group of settings")
    place[last] = value
