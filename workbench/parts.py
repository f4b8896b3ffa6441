"""Everything that a part of your own is written against, by kind: protocols, values and building blocks.

    from workbench.parts import History, SchedulerDecision

A part is a file of yours, named in a setting by `{path: "mine.py:Name", arguments: {...}}`, and `workbench.testing` has
its laws. Like `import workbench` this loads nothing before a name is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from compiled_kernels.masks import ALiBi, Causal, Chunked, SlidingWindow
    from compiled_kernels.quantized_attention.quantize import hadamard_rotate
    from workbench.batch import TokenBatch
    from workbench.constrained.custom import TokenConstraint
    from workbench.decoding.search import Branch, Search
    from workbench.executors.programs.eager import EagerProgram
    from workbench.executors.programs.program import StepProgram
    from workbench.kv_cache.budget import EvictionBudget
    from workbench.kv_cache.codec import Codec, CodecPair
    from workbench.kv_cache.codes import affine_codes, affine_numbers, nearest_levels, pack_bits, project, unpack_bits
    from workbench.kv_cache.eviction import (
        ContinuousEviction,
        EvictionPolicy,
        EvictionSettings,
        LayerEvictionPolicy,
        LayerTokens,
        select_recent_and_heaviest,
        smooth_mass,
    )
    from workbench.measure.quality.held_out import training_texts
    from workbench.model.layers import Attention
    from workbench.request import Sequence
    from workbench.sampling.combiners import LayerCombiner, StreamCombiner
    from workbench.sampling.filters import Filter, History
    from workbench.sampling.ranking import Ranking
    from workbench.sampling.samplers import TokenSampler, sample_categorical
    from workbench.sampling.verify import NO_DRAFT, Draft
    from workbench.scheduler.ordering import sorted_with_aging, with_aging
    from workbench.scheduler.plan import Span, StepPlan
    from workbench.scheduler.policies import BuiltInPolicy
    from workbench.scheduler.policy import RequestView, SchedulerDecision, SchedulerState, SchedulingPolicy, Turn
    from workbench.speculative.custom import SpeculationTarget
    from workbench.speculative.proposers import Proposer, Verification
    from workbench.trace.events import Finished

# By kind, then by name: a line a name here and one above, where type checkers read it.
PARTS: dict[str, dict[str, str]] = {
    "attention": {
        "ALiBi": "compiled_kernels.masks",
        "Attention": "workbench.model.layers",
        "Causal": "compiled_kernels.masks",
        "Chunked": "compiled_kernels.masks",
        "SlidingWindow": "compiled_kernels.masks",
    },
    "format": {
        "Codec": "workbench.kv_cache.codec",
        "CodecPair": "workbench.kv_cache.codec",
        "affine_codes": "workbench.kv_cache.codes",
        "affine_numbers": "workbench.kv_cache.codes",
        "hadamard_rotate": "compiled_kernels.quantized_attention.quantize",
        "nearest_levels": "workbench.kv_cache.codes",
        "pack_bits": "workbench.kv_cache.codes",
        "project": "workbench.kv_cache.codes",
        "unpack_bits": "workbench.kv_cache.codes",
    },
    "eviction": {
        "ContinuousEviction": "workbench.kv_cache.eviction",
        "EvictionBudget": "workbench.kv_cache.budget",
        "EvictionPolicy": "workbench.kv_cache.eviction",
        "EvictionSettings": "workbench.kv_cache.eviction",
        "LayerEvictionPolicy": "workbench.kv_cache.eviction",
        "LayerTokens": "workbench.kv_cache.eviction",
        "select_recent_and_heaviest": "workbench.kv_cache.eviction",
        "smooth_mass": "workbench.kv_cache.eviction",
    },
    "sampling": {
        "Branch": "workbench.decoding.search",
        "Filter": "workbench.sampling.filters",
        "Finished": "workbench.trace.events",
        "History": "workbench.sampling.filters",
        "LayerCombiner": "workbench.sampling.combiners",
        "Ranking": "workbench.sampling.ranking",
        "Search": "workbench.decoding.search",
        "StreamCombiner": "workbench.sampling.combiners",
        "TokenConstraint": "workbench.constrained.custom",
        "TokenSampler": "workbench.sampling.samplers",
        "sample_categorical": "workbench.sampling.samplers",
    },
    "draft": {
        "Draft": "workbench.sampling.verify",
        "NO_DRAFT": "workbench.sampling.verify",
        "Proposer": "workbench.speculative.proposers",
        "Sequence": "workbench.request",
        "SpeculationTarget": "workbench.speculative.custom",
        "Verification": "workbench.speculative.proposers",
        "training_texts": "workbench.measure.quality.held_out",
    },
    "program": {
        "EagerProgram": "workbench.executors.programs.eager",
        "Span": "workbench.scheduler.plan",
        "StepPlan": "workbench.scheduler.plan",
        "StepProgram": "workbench.executors.programs.program",
        "TokenBatch": "workbench.batch",
    },
    "schedule": {
        "BuiltInPolicy": "workbench.scheduler.policies",
        "RequestView": "workbench.scheduler.policy",
        "SchedulerDecision": "workbench.scheduler.policy",
        "SchedulerState": "workbench.scheduler.policy",
        "SchedulingPolicy": "workbench.scheduler.policy",
        "Turn": "workbench.scheduler.policy",
        "sorted_with_aging": "workbench.scheduler.ordering",
        "with_aging": "workbench.scheduler.ordering",
    },
}

__all__ = [
    "ALiBi", "Attention", "Branch", "BuiltInPolicy", "Causal", "Chunked", "Codec", "CodecPair", "ContinuousEviction",
    "Draft", "EagerProgram", "EvictionBudget", "EvictionPolicy", "EvictionSettings", "Filter", "Finished", "History",
    "LayerCombiner", "LayerEvictionPolicy", "LayerTokens", "NO_DRAFT", "Proposer", "Ranking", "RequestView",
    "SchedulerDecision", "SchedulerState", "SchedulingPolicy", "Search", "Sequence", "SlidingWindow", "Span",
    "SpeculationTarget", "StepPlan", "StepProgram", "StreamCombiner", "TokenBatch", "TokenConstraint", "TokenSampler",
    "Turn", "Verification", "affine_codes", "affine_numbers", "hadamard_rotate", "nearest_levels", "pack_bits",
    "project", "sample_categorical", "select_recent_and_heaviest", "smooth_mass", "sorted_with_aging", "training_texts",
    "unpack_bits", "with_aging",
]  # fmt: skip


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> object:
    for home in (names[name] for names in PARTS.values() if name in names):
        return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module 'workbench.parts' has no attribute {name!r}")
