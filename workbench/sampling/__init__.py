"""Turn logits into tokens: filters, samplers, user-defined components, and the sampler of a runner."""

from workbench.sampling.choice import Choice
from workbench.sampling.choose import Chooser
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
    pipeline,
)
from workbench.sampling.samplers import Draw, Greedy, Sampler, uniform

__all__ = [
    "Choice",
    "Chooser",
    "Draw",
    "Filter",
    "FrequencyPenalty",
    "Greedy",
    "History",
    "LogitBias",
    "MinP",
    "PresencePenalty",
    "RepetitionPenalty",
    "Sampler",
    "Temperature",
    "TopK",
    "TopP",
    "pipeline",
    "uniform",
]
