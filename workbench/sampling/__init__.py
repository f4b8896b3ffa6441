"""Turn logits into tokens: filters, samplers, user-defined components, and the sampler of a runner."""

from workbench.sampling.filters import (
    Filter,
    FrequencyPenalty,
    History,
    LogitBias,
    MinP,
    PresencePenalty,
    RepetitionPenalty,
    Temperature,
    TopK,
    TopP,
    build_filters,
)
from workbench.sampling.sampler import Sampler
from workbench.sampling.samplers import Greedy, RandomSampler, SampledToken, TokenSampler, uniform

__all__ = [
    "SampledToken",
    "Sampler",
    "RandomSampler",
    "Filter",
    "FrequencyPenalty",
    "Greedy",
    "History",
    "LogitBias",
    "MinP",
    "PresencePenalty",
    "RepetitionPenalty",
    "TokenSampler",
    "Temperature",
    "TopK",
    "TopP",
    "build_filters",
    "uniform",
]
