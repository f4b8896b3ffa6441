"""Configure an engine: every setting of a runner, declared once.

`EngineConfig` groups the settings as YAML does. `EngineConfig.build` also takes them flat, by their own names:
`page_size=16` is `cache={"page_size": 16}`. `workbench.load` and `Runner` take what it builds; `Experiment` extends it.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import BaseModel, BeforeValidator, Field, ValidationError, field_validator, model_validator

from workbench.custom import load_registrations
from workbench.errors import WorkbenchError, explain, nearest
from workbench.executors.build import CompileUnit
from workbench.kv_cache.eviction import EvictionSetting
from workbench.kv_cache.format import CacheFormat
from workbench.kv_cache.settings import NoOffload, NoPrefixCache, OffloadSetting, PreemptionMode, PrefixCacheSetting
from workbench.model.attention_config import AttentionConfig
from workbench.model.quantized import Activations, WeightDtype, WeightFormat
from workbench.request import CustomPartSetting
from workbench.scheduler.limits import SchedulerLimits
from workbench.scheduler.policies import BatchingMode, Interleaved, PolicySetting
from workbench.settings import Count, Seed, Settings
from workbench.speculative.config import NoSpeculation, SpeculationSetting
from workbench.tensor_parallel.ranks import Transport

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
WeightSetting = Literal["auto", "dense", "int8", "int4"]
Overflow = Literal["refuse", "cut_oldest"]
DtypeName = Annotated[
    Literal["auto", "float32", "bfloat16", "float16", "float64"],
    BeforeValidator(lambda value: str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value),
]


class ModelConfig(Settings):
    """Settings of the model: a folder, a GGUF file, `demo`, `demo-chat`, `smollm2`, or `shape:NAME` (random
    weights).
    """

    main_setting: ClassVar = "name"

    name: str = "demo"  # name of a workbench model, or path of a folder or file
    dtype: DtypeName = "auto"  # type of weights and activations; auto: the files' type, bfloat16 for shapes
    weights: WeightSetting = "auto"  # format of matrices; auto: the files' format if a product supports it, else dense
    head_weights: WeightDtype | None = None  # format of the output head; None: as `weights`
    expert_weights: WeightDtype | None = None  # format of experts in a mixture; None: as `weights`
    weight_group: Annotated[int, Field(ge=8, multiple_of=8)] = 64  # columns that share a scale in int4
    activations: Activations = (
        WeightFormat.activations
    )  # input of products with integer weights; int8: activations quantized per call
    device: str = "cpu"  # device of weights and cache: cpu, cuda or cuda:N
    context: Count | None = None  # maximum tokens of a text; None: the model's (see attention.rotary)
    seed: Seed = 0  # random seed of random weights
    custom: str | None = None  # file or module, imported first, that registers the model's family

    @property
    def format(self) -> WeightFormat:
        """Return the storage format of the weights; for auto, the format of a dense model."""
        weights = "dense" if self.weights == "auto" else self.weights
        return WeightFormat.parse(weights, self.head_weights, self.weight_group, self.activations, self.expert_weights)

    @field_validator("custom")
    @classmethod
    def _registers(cls, path: str | None) -> str | None:
        if path is not None:
            load_registrations(path)
        return path

    @model_validator(mode="after")
    def _format_is_known(self) -> Self:
        try:
            assert self.format
        except WorkbenchError as error:
            raise ValueError(str(error)) from None
        return self


class CacheConfig(CacheFormat):
    """Settings of the KV cache. `pages: auto` gives every sequence its full context, within 1 GiB."""

    main_setting: ClassVar = "format"

    page_size: Count = 64  # tokens per page
    pages: Count | Literal["auto"] = "auto"  # number of pages of each cache group
    prefix: PrefixCacheSetting = NoPrefixCache()  # reuse of full pages with the same tokens
    offload: OffloadSetting = NoOffload()  # storage for swapped-out pages of preempted sequences
    evict: EvictionSetting | None = None  # policy that limits a sequence's tokens and chooses which to keep


class SchedulerConfig(SchedulerLimits):
    """Settings of the scheduler: batching, policy, limits of a step, preemption."""

    main_setting: ClassVar = "kind"

    kind: BatchingMode = "continuous"  # static: a batch runs until its last request ends; no request joins it
    policy: PolicySetting = Interleaved()  # order in which requests are scheduled
    preemption_mode: PreemptionMode = "auto"  # recompute, offload, or auto: offload where configured
    overflow: Overflow = "refuse"  # refuse a prompt that fills the context; cut_oldest drops its first tokens


class ParallelConfig(Settings):
    """Settings of several processes that compute one model together: tensor parallelism."""

    main_setting: ClassVar = "tensor"

    tensor: Count = 1  # number of ranks: processes with a share of each layer's matrices and of the cache
    transport: Transport = "shared_memory"  # gloo: torch.distributed, over several hosts too; nccl: CUDA
    rank_timeout: Annotated[float, Field(gt=0)] = 60.0  # maximum seconds that a rank waits for another within a step


SECTIONS: dict[str, type[ModelConfig] | type[CacheConfig] | type[SchedulerConfig] | type[ParallelConfig]] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "schedule": SchedulerConfig,
    "parallel": ParallelConfig,
}


class EngineConfig(Settings):
    """All settings of an engine.

    config = EngineConfig.build("demo", cache="int8", page_size=32, backend="eager")
    runner = Runner(config)
    """

    model: ModelConfig = ModelConfig()
    backend: str = "auto"  # eager, inductor, triton, mlir, or auto: the fastest that supports the other settings
    compile: CompileUnit = "block"  # unit that the inductor backend compiles for decode
    program: CustomPartSetting | None = None  # user-defined; computes the steps that it accepts
    batch_invariant: bool = False  # the same bits for a request in any batch composition, chunking and prefix reuse
    attention: AttentionConfig = AttentionConfig()  # changes to the model's attention
    cache: CacheConfig = CacheConfig()
    schedule: SchedulerConfig = SchedulerConfig()
    speculate: SpeculationSetting = NoSpeculation()  # speculative decoding: the proposer of draft tokens
    parallel: ParallelConfig = ParallelConfig()

    @model_validator(mode="before")
    @classmethod
    def _expand_sections(cls, values: Any) -> Any:
        """Accept the main setting alone for a section: `cache: int8` for `cache: {format: int8}`."""
        if not isinstance(values, Mapping):
            return values
        return {name: _expand(SECTIONS[name], value) if name in SECTIONS else value for name, value in values.items()}

    @model_validator(mode="after")
    def _settings_are_compatible(self) -> Self:
        for pair in EXCLUSIVE:
            if all(_differs(self, name) for name in pair):
                raise ValueError(exclusion(*pair))
        device, transport = self.model.device, self.parallel.transport
        if self.parallel.tensor > 1 and (device == "cpu") is (transport == "nccl"):
            pair = f"transport {transport} and model.device {device}: nccl is for device: cuda, the others for cpu"
            raise ValueError(f"parallel.tensor: {self.parallel.tensor} ranks with {pair}")
        return self

    @classmethod
    def build(cls, model: str | Path | Mapping[str, Any] = "demo", **settings: Any) -> Self:
        """Build the config of `model` from sections and from flat settings (`FLAT_NAMES`).

        Raises:
            WorkbenchError: names the path of each unknown or wrong setting.
        """
        if isinstance(model, EngineConfig):
            raise WorkbenchError("a whole config is given to Runner(config); load takes a model's name and settings")
        values: dict[str, Any] = {"model": _expand(ModelConfig, model)}
        flat = []
        for name, value in settings.items():
            if name in cls.model_fields:
                if value is not None:
                    values[name] = _expand(SECTIONS[name], value) if name in SECTIONS else value
            elif name in FLAT_NAMES:
                flat.append(name)
            else:
                raise WorkbenchError(f"no setting {name!r}{nearest(name, (*cls.model_fields, *FLAT_NAMES))}")
        for name in flat:
            section = values.setdefault(FLAT_NAMES[name], {})
            if not isinstance(section, dict):
                continue  # refused below, by its path
            if name in section:
                raise WorkbenchError(f"{name}: given twice, by itself and within {FLAT_NAMES[name]}; leave one out")
            section[name] = settings[name]
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise explain(error, "", cls) from None

    def cache_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of unquantized keys and values."""
        return model_dtype if self.cache.dtype == "auto" else parse_dtype(self.cache.dtype)

    @property
    def engine(self) -> EngineConfig:
        """Return the settings of the engine only, without the fields that a subclass adds."""
        return EngineConfig.model_construct(**{name: getattr(self, name) for name in EngineConfig.model_fields})


# Pairs of settings that exclude each other if both differ from their defaults, and the reason.
EXCLUSIVE = {
    ("batch_invariant", "cache.evict"): "the tokens that remain of a prompt depend on its chunks",
    ("speculate", "cache.evict"): "a policy may weigh drafted tokens that are rejected later",
    ("cache.prefix", "cache.evict"): "pages of sequences that lose tokens cannot be shared",
    ("parallel.tensor", "cache.evict"): "each rank sees only the attention weights of its own heads",
    ("parallel.tensor", "cache.offload"): "each rank holds its pages in a process of its own",
    ("parallel.tensor", "cache.codecs"): "a codec may read all heads, and each rank has only some of them",
    ("parallel.tensor", "compile"): "ranks compile block by block",
    ("batch_invariant", "program"): "a custom program may sum a row in another order in a larger batch",
    ("parallel.tensor", "program"): "ranks exchange sums between attention and feed-forward of each layer",
}
DEFAULTS = EngineConfig.model_construct()


def exclusion(setting: str, other: str) -> str:
    """Return the reason why two settings that EXCLUSIVE lists cannot be combined."""
    return f"{setting}: not with {other}: {EXCLUSIVE[setting, other]}; leave one out"


def _differs(config: EngineConfig, setting: str) -> bool:
    """Return whether a setting has a value other than its default."""
    return attrgetter(setting)(config) != attrgetter(setting)(DEFAULTS)


# Flat settings of `EngineConfig.build`, and the section of each. A section's main setting has the section's name # (the
# main setting of `parallel` also has its own); settings of the cache's format are given within `cache`.
FLAT_NAMES = {
    name: section
    for section, settings in SECTIONS.items()
    for name in settings.model_fields
    if (section != "cache" or name not in CacheFormat.model_fields)
    and (name != settings.main_setting or section == "parallel")
}


def _expand(section: type[Any], value: Any) -> Any:
    """Return a section's settings as a mapping if `value` is only its main setting, or an object of another class."""
    if isinstance(value, BaseModel):
        return {name: getattr(value, name) for name in value.model_fields_set}
    if isinstance(value, str | Path):
        return {section.main_setting: str(value)}
    if section is ParallelConfig and type(value) is int:
        return {section.main_setting: value}
    return dict(value) if isinstance(value, Mapping) else value


def parse_dtype(name: str | torch.dtype) -> torch.dtype:
    name = str(name).removeprefix("torch.")
    if name not in DTYPES:
        raise WorkbenchError(f"unknown dtype {name!r}{nearest(name, DTYPES)}; known: {', '.join(DTYPES)}")
    return DTYPES[name]
