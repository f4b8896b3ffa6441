"""XTC: now and then exclude the top choices, all tokens of some probability but the least probable of them.

"Exclude Top Choices" (p-e-w, 2024, text-generation-webui #6335). With p the distribution of the next token:

    with probability `probability`, remove  { v : p(v) >= threshold }  without its least probable member;
    otherwise remove nothing; then sample

Here one uniform number u decides both: u < probability excludes, and u / probability, or (u - probability) / (1 -
probability), which is again uniform, samples the token. So the request's seed alone decides, in any batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from workbench import WorkbenchError
from workbench.parts import sample_categorical


@dataclass(frozen=True)
class XTC:
    """A sampler without a state."""

    threshold: float = 0.1
    probability: float = 0.5

    def __post_init__(self) -> None:
        if not (0 < self.threshold < 1 and 0 <= self.probability <= 1):
            raise WorkbenchError(f"{self}: threshold lies between 0 and 1, probability from 0 to 1")

    def start(self) -> None:
        return None

    def choose(self, logits: Tensor, uniform: float, state: None) -> tuple[int, None]:
        weights = logits.double().softmax(-1)
        if uniform < self.probability:
            weights, uniform = self.without_top(weights), uniform / self.probability
        else:
            uniform = (uniform - self.probability) / (1 - self.probability)
        return sample_categorical(weights[None], [uniform])[0], None

    def without_top(self, weights: Tensor) -> Tensor:
        """Return the weights [vocab] without the top choices; ties are kept by the higher token id."""
        top = (weights >= self.threshold).nonzero()[:, 0]
        if len(top) < 2:
            return weights
        order = weights[top].sort(descending=True, stable=True).indices
        return weights.index_fill(0, top[order[:-1]], 0.0)
