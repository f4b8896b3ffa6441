"""A sampler with a state, and biases that keep to tokens that are text."""

from __future__ import annotations

from tests.prompt.samples import byte_level
from workbench.sampling.samplers import RandomSampler

# Bytes that are often drawn, so that stop strings are met, and cross the seam; and the two halves of characters.
KNOWN = {
    byte_level().vocab_size + number: -100.0 for number in range(3)
}  # the model has them, the tokenizer lacks them
BIAS = {id: 6.0 for id in byte_level().encode("abé🙂")} | KNOWN


class Counting:
    """A user's sampler whose state is how many tokens there were."""

    def start(self) -> int:
        return 0

    def choose(self, logits, uniform: float, state: int) -> tuple[int, int]:
        return RandomSampler().choose(logits, uniform)[0], state + 1
