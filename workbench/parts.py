"""Offer what user-defined parts need, by kind of part: protocols, values and building blocks.

    from workbench.parts import History, SchedulerDecision

A part is a class or function in a file of yours. A setting names it by `{path: "mine.py:Name", arguments: {...}}`;
a workload is named by its kind. `workbench.testing` checks a part against the laws of its kind. Like
`import workbench`, this module loads nothing before a name is used.
"""

from workbench.lazy import attach

# ruff: noqa: F401
TYPE_CHECKING = False
if TYPE_CHECKING:
    from compiled_kernels.masks import ALiBi, Causal, Chunked, SlidingWindow
    from compiled_kernels.quantized_attention.quantize import hadamard_rotate
    from workbench.batch import TokenBatch
    from workbench.constrained.custom import TokenConstraint
    from workbench.decoding.search import Branch, Search
    from workbench.executors.programs.eager import EagerProgram
    from workbench.executors.programs.program import StepProgram
    from workbench.experiment.experiment import ServedRequests, VariantResults, Workload, WorkloadCost
    from workbench.experiment.variants import described, every_variant
    from workbench.experiment.verdict import RuleChange, Verdict, variant_row
    from workbench.figures.bars import Bar, bars
    from workbench.figures.figure import Figure, beside
    from workbench.figures.lines import Series, lines
    from workbench.figures.points import Point, points
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
    from workbench.measure.rounds import load_runners
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
    from workbench.svg import Axis
    from workbench.trace.events import Finished
    from workbench.units import Measure, duration

PARTS = {  # by kind
    "attention": ("ALiBi", "Attention", "Causal", "Chunked", "SlidingWindow"),
    "format": (
        "Codec",
        "CodecPair",
        "affine_codes",
        "affine_numbers",
        "hadamard_rotate",
        "nearest_levels",
        "pack_bits",
        "project",
        "unpack_bits",
    ),
    "eviction": (
        "ContinuousEviction",
        "EvictionBudget",
        "EvictionPolicy",
        "EvictionSettings",
        "LayerEvictionPolicy",
        "LayerTokens",
        "select_recent_and_heaviest",
        "smooth_mass",
    ),
    "sampling": (
        "Branch",
        "Filter",
        "Finished",
        "History",
        "LayerCombiner",
        "Ranking",
        "Search",
        "StreamCombiner",
        "TokenConstraint",
        "TokenSampler",
        "sample_categorical",
    ),
    "draft": ("Draft", "NO_DRAFT", "Proposer", "Sequence", "SpeculationTarget", "Verification", "training_texts"),
    "program": ("EagerProgram", "Span", "StepPlan", "StepProgram", "TokenBatch"),
    "schedule": (
        "BuiltInPolicy",
        "RequestView",
        "SchedulerDecision",
        "SchedulerState",
        "SchedulingPolicy",
        "Turn",
        "sorted_with_aging",
        "with_aging",
    ),
    "workload": (
        "Axis",
        "Bar",
        "Figure",
        "Measure",
        "Point",
        "Series",
        "ServedRequests",
        "VariantResults",
        "Workload",
        "WorkloadCost",
        "bars",
        "beside",
        "described",
        "duration",
        "every_variant",
        "lines",
        "load_runners",
        "points",
    ),
    "claim": ("RuleChange", "Verdict", "variant_row"),
}
__getattr__, __dir__ = attach(__name__)
