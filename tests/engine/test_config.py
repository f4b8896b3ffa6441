"""`EngineConfig`: every setting of it reaches the engine, by its own name and within its section."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from tools.structure import declared_fields, modules
from workbench.engine.config import EXCLUSIVE, FLAT_NAMES, SECTIONS, EngineConfig
from workbench.engine.load import load
from workbench.engine.loaded_model import LoadedModel
from workbench.engine.runner import Runner, generate
from workbench.errors import WorkbenchError
from workbench.model.attention_config import AttentionConfig
from workbench.request import Request, SamplingParameters
from workbench.scheduler.limits import SchedulerLimits
from workbench.scheduler.policies import FCFS
from workbench.settings import non_default_settings

HERE = Path(__file__).with_name("tiny.py")
SHARED = {"attention.pattern": ["window", "full"], "attention.sliding_window": 8}
SOFT = {**SHARED, "attention.pattern": ["window", "soft"], "attention.kinds": {"soft": {"softcap": 3.0}}}
# Each setting: a value that is not its default; the parts of `engine_of` that it changes, and no others; what the
# first of them has then (a regular expression) and had not before; and the settings beside which it has an effect.
CHANGES: dict[str, tuple[Any, ...]] = {
    "model.name": ("demo-draft", "spec weights store", "'draft'"),
    "model.dtype": ("float32", "weights store", "torch.float32"),
    "model.weights": ("int8", "weights format", "qkv.weight': .torch.int8"),
    "model.head_weights": ("int8", "weights format", "head.weight': .torch.int8"),
    "model.expert_weights": ("int8", "format", "experts=.*codes='int8'"),
    "model.weight_group": (32, "format weights", "blocks=.*'int4', group=32", {"model.weights": "int4"}),
    "model.activations": ("int8", "format", "activations='int8'", {"model.weights": "int8"}),
    "model.device": ("cuda:77", "refused", "device 'cuda:77' does not work here"),
    "model.context": (64, "spec", "'max_position_embeddings': 64"),
    "model.seed": (1, "weights", ""),
    "model.custom": ("tabnanny", "custom", "True"),
    "backend": ("inductor", "backends ends", "InductorProgram"),
    "compile": ("step", "backends", "compile: step has no effect, since eager decodes"),
    "program": (f"{HERE}:Whole", "backends", "CustomProgram"),
    "batch_invariant": (True, "backends", "batch_invariant: asked for", {"backend": "mlir"}),
    "attention.num_kv_heads": ("multi_query", "spec weights store", "'num_kv_heads': 1"),
    "attention.num_heads": (8, "spec weights", "'num_heads': 8"),
    "attention.head_dim": (32, "spec weights store", "'head_dim': 32"),
    "attention.sliding_window": (8, "spec store", "'sliding_window': 8"),
    "attention.chunk_size": (8, "spec", "'chunk_size': 8"),
    "attention.temperature": ({"strength": 0.1, "floor": 4}, "spec", "'strength': 0.1"),
    "attention.num_sink_tokens": (2, "spec store", "'num_sink_tokens': 2", {"attention.sliding_window": 8}),
    "attention.softcap": (20.0, "spec", "'softcap': 20.0"),
    "attention.scale": (0.5, "spec", "'scale': 0.5"),
    "attention.qk_norm": (True, "weights spec", "query_norm.weight"),
    "attention.position": ("alibi", "spec", "'alibi'"),
    "attention.rotary": ({"rope_theta": 50.0}, "spec", "'rope_theta': 50.0"),
    "attention.sink_logits": (True, "weights spec", "sink_logits"),
    "attention.kv_shared_with": (0, "refused", "layer 0 reads the keys and values of layer 0"),
    "attention.mask": (f"{HERE}:even", "spec", "'mask': .*tiny.py:even"),
    "attention.score": (f"{HERE}:farther", "spec", "'score': .*tiny.py:farther"),
    "attention.pages": (f"{HERE}:Kept", "spec store", "'pages': .*tiny.py:Kept"),
    "attention.module": ({"path": "experiments/zoo/gated_attention.py:GatedAttention",
                            "arguments": {"bias": 4.0}}, "weights spec", "attention.gate'"),
    "attention.regroup": ("first", "weights", "", {"model.name": "demo", "attention.num_kv_heads": 1}),
    "attention.pattern": (["full", "window"], "store spec", "sliding_window=None.*sliding_window=8", SHARED),
    "attention.kinds": ({"soft": {"softcap": 9.0}}, "spec", "'softcap': 9.0", SOFT),
    "attention.layers": ({1: {"softcap": 9.0}}, "spec", "'softcap': 9.0"),
    "cache.format": ("int8", "store pools", "format='int8'"),
    "cache.keys": ("int8", "store pools", "keys='int8'"),
    "cache.values": ("int8", "store pools", "values='int8'"),
    "cache.quant_group": (32, "store", "quant_group=32", {"cache.format": "int8"}),
    "cache.columns": (8, "store", "columns=8", {"cache.format": "int8"}),
    "cache.residual_length": (128, "store", "residual_length=128", {"cache.format": "int8"}),
    "cache.num_sink_tokens": (4, "store", "int8', num_sink_tokens=4", {"cache.format": "int8"}),
    "cache.rotate": (True, "store", "rotate=True", {"cache.format": "int8"}),
    "cache.codec": (f"{HERE}:Halved", "store", "codec=.*tiny.py:Halved"),
    "cache.calibration.text": (__file__, "codecs", "", {"cache.codec": "tests.engine.test_calibration:ByHead"}),
    "cache.calibration.tokens": (9, "codecs", "", {"cache.codec": "tests.engine.test_calibration:ByHead"}),
    "cache.dtype": ("float32", "store", "torch.float32"),
    "cache.layers": ({1: {"format": "int8"}}, "store pools", "format='int8'"),
    "cache.page_size": (32, "pools store", "40, 32"),
    "cache.pages": (9, "pools store", "9, 64"),
    "cache.prefix": ("radix", "reuse", "RadixCache"),
    "cache.offload": ("memory", "reuse", "False"),
    "cache.evict": ({"kind": "snapkv", "budget": 64}, "reuse backends evictor", "tokens=64"),
    "schedule.kind": ("static", "scheduler", "StaticBatching"),
    "schedule.policy": ("fair", "scheduler", "policies.Fair"),
    "schedule.max_num_seqs": (3, "scheduler", "max_num_seqs=3"),
    "schedule.max_num_batched_tokens": (100, "scheduler", "max_num_batched_tokens=100"),
    "schedule.chunked_prefill": (False, "scheduler", "chunked_prefill=False"),
    "schedule.chunk_tokens": (64, "scheduler", "chunk_tokens=64"),
    "schedule.preemption_mode": ("recompute", "swaps", "recompute", {"cache.offload": "memory"}),
    "schedule.overflow": ("cut_oldest", "ends", "length"),
    "speculate": ("prompt_lookup", "speculator", "PromptLookupProposer"),
    "parallel.tensor": (2, "ranks weights backends store ends", " 2,"),
    "parallel.rank_timeout": (77.0, "ranks", "77.0", {"parallel.tensor": 2}),
    "parallel.transport": ("gloo", "ranks", "distributed_c10d", {"parallel.tensor": 2}),
}  # fmt: skip


def settings(model: type[BaseModel], path: str = "") -> Iterator[str]:
    """Every setting of a config, by path; a section's settings each."""
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from settings(inner, f"{path}{name}.")
        else:
            yield f"{path}{name}"


def config_of(changes: dict[str, Any]) -> EngineConfig:
    sys.modules.pop("tabnanny", None)  # a config imports `model.custom`
    values: dict[str, Any] = {}
    for path, value in changes.items():
        *parents, last = path.split(".")
        place = values
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return EngineConfig.model_validate(values)


def engine_of(config: EngineConfig) -> dict[str, Any]:
    """Return the configuration that a runner of `config` has, read from its parts, or the refusal's words."""
    try:
        runner = Runner(config, report=lambda line: None)
    except WorkbenchError as error:
        return {"refused": str(error)}
    model, manager = runner.model, runner.kv_cache.manager
    limits = {name: getattr(runner.scheduler.limits, name) for name in SchedulerLimits.model_fields}
    context = model.spec.max_position_embeddings
    too_long = Request("a", (1,) * context, SamplingParameters(max_tokens=1), prompt=None)
    ranks = getattr(model, "ranks", None)
    runner.close()
    ends = {} if ranks is not None or runner.core.backends.decode != "eager" else generate(runner, [too_long])
    return {
        "spec": model.spec.model_dump(),
        "weights": {name: (each.dtype, each.double().sum().item()) for name, each in model.state_dict().items()},
        "format": (model.format, model.device),
        "custom": "tabnanny" in sys.modules,
        "backends": (
            str(runner.core.backends),
            runner.core.backends.reason,
            [*map(type, runner.core.executor.programs.values())],
        ),
        "store": (runner.store.specs, runner.store.dtype, runner.store.page_size, runner.store.bytes),
        "codecs": [float(tensor.sum()) for tensor in runner.store.codec_tensors],
        "pools": [(pool.num_pages, pool.page_size) for pool in runner.scheduler.pools],
        "reuse": (type(manager.prefix_cache), runner.kv_cache.cpu_store is None, vars(manager).get("budget")),
        "swaps": manager.preemption_mode,
        "evictor": None if runner.kv_cache.evictor is None else runner.kv_cache.evictor.policy,
        "scheduler": (SchedulerLimits(**limits), repr(runner.scheduler.policy), type(runner.scheduler.policy)),
        "speculator": repr(runner.core.speculator),
        "ranks": None if ranks is None else (type(ranks.group), ranks.size, ranks.timeout),
        "ends": [end.reason for end in ends.values()],  # of a request that is too long
    }


def test_there_is_a_change_for_every_setting() -> None:
    assert set(CHANGES) == set(settings(EngineConfig))


@pytest.mark.parametrize("path", CHANGES)
def test_a_setting_reaches_the_engine(path: str) -> None:
    """By its own effect, and no other."""
    value, parts, words, *more = CHANGES[path]
    beside = more[0] if more else {}
    base = {"model.name": "shape:tiny", "backend": "eager", "cache.pages": 40, **beside}
    before, after = engine_of(config_of(base)), engine_of(config_of({**base, path: value}))
    assert "refused" not in before, f"refused without {path}: {before}"
    first = parts.split()[0]
    assert {part for part in after if part not in before or before[part] != after[part]} == {*parts.split()}
    assert re.search(words, str(after[first]), re.DOTALL), after[first]
    assert not words or not re.search(words, str(before.get(first)), re.DOTALL), "it was so before"


# Names that others have for a fact of their own, and classes that say again what a config says, as they see none.
OWN_FACTS = "seed context num_sink_tokens"  # of each workload; of texts that are judged; of quantized pages
WITHOUT_CONFIG = (
    *("AttentionLaunches", "AttentionParameters", "HeadShape", "QuantizationRule", "SlidingWindow"),  # kernels
    *("KVCacheGroup", "KVCacheSpec", "PolicyScenario"),  # pages of any model; limits that are drawn
    "Requirements",  # demands of a model, as few as possible
)


def test_a_setting_is_declared_once() -> None:
    """A name, type and default of a setting stand in one class."""
    sections = (EngineConfig, AttentionConfig, *SECTIONS.values())
    owners = {base.__name__ for section in sections for base in section.__mro__}
    for (name, *_), classes in declared_fields(modules()).items():
        again = classes.difference(WITHOUT_CONFIG)
        assert not classes & owners or len(again) == 1 or name in OWN_FACTS.split(), f"{name}: in {again}"


def test_the_default_is_what_load_takes_without_settings() -> None:
    assert EngineConfig.build() == EngineConfig()
    assert EngineConfig.build("demo", dtype=torch.float32, attention=None, speculate=None).model.dtype == "float32"


@given(st.dictionaries(st.sampled_from(sorted(FLAT_NAMES)), st.none(), min_size=1))
def test_a_flat_name_means_the_setting_of_its_section(names: dict[str, None]) -> None:
    flat = {name: CHANGES[f"{FLAT_NAMES[name]}.{name}"] for name in names}
    nested: dict[str, Any] = {"weights": "int8"} if "activations" in flat else {}
    given_flat = {name: value for name, (value, *_) in flat.items()} | nested
    if {"chunk_tokens", "chunked_prefill"} <= set(flat):
        del given_flat["chunk_tokens"]
    for first, second in (*EXCLUSIVE, ("parallel.tensor", "model.device")):
        if second.rpartition(".")[2] in given_flat:
            given_flat.pop(first.rpartition(".")[2], None)
    sections: dict[str, Any] = {}
    for name, value in given_flat.items():
        sections.setdefault(FLAT_NAMES[name], {})[name] = value
    assert EngineConfig.build("demo", **given_flat) == EngineConfig.model_validate(sections)


@pytest.mark.parametrize("section", SECTIONS)
def test_a_section_alone_is_its_main_setting(section: str) -> None:
    main = SECTIONS[section].main_setting
    value = CHANGES[f"{section}.{main}"][0]
    assert EngineConfig.model_validate({section: value}) == EngineConfig.model_validate({section: {main: value}})
    assert list(non_default_settings(EngineConfig.model_validate({section: value}))) == [(f"{section}.{main}", value)]


def test_a_policy_may_be_an_object_of_ones_own() -> None:
    class Mine(FCFS):
        """First come, first served, again."""

    class Rude:
        steady = False

        def __call__(self, state: Any) -> Any:
            return FCFS()(state)

    for policy in (Mine(), Rude, Rude()):
        runner = load("shape:tiny", backend="eager", policy=policy, pages=4)
        assert isinstance(runner.scheduler.policy, Mine if isinstance(policy, Mine) else Rude)


def test_a_model_put_together_by_hand_has_its_own_backend() -> None:
    model = load("shape:tiny", backend="eager").model
    runner = Runner(EngineConfig.build(pages=4), LoadedModel(model))
    assert runner.model is model and str(runner.core.backends) == "eager" and not runner.is_from_config
