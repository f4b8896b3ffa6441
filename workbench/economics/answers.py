"""What prompts and answers cost against each other: a detailed prompt, thinking before the answer."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from workbench.economics.prices import Prices
from workbench.economics.usage import Usage


def dearest_answer(prices: Prices, prompt: int, other_prompt: int, other_answer: int, read: bool = False) -> Fraction:
    """The tokens of the answer at which a `prompt` costs as much as `other_prompt` with `other_answer`: with a shorter
    answer it costs less. Below 0 it never does. `read`: the prompt comes from a prompt cache."""
    budget = prices.cost(Usage(input=other_prompt, output=other_answer))
    mine = prices.cost(Usage(cache_read=prompt) if read else Usage(input=prompt))
    return (budget - mine) / prices.a_token("output")


def ratio_to_pay(prompt: int, answer: int, other_prompt: int, other_answer: int) -> Fraction | None:
    """How many times an output token must cost an input token for `prompt` and `answer` to cost less than the other
    two; None where no ratio does."""
    if answer >= other_answer:
        return Fraction(0) if prompt < other_prompt else None
    return Fraction(max(0, prompt - other_prompt), other_answer - answer)


@dataclass(frozen=True)
class Thinking:
    """An answer with and without hidden tokens before it."""

    cost: Fraction
    cost_without: Fraction
    context: int  # positions it takes, of the model's context and of its cache
    context_without: int

    @property
    def share(self) -> Fraction:
        """What thinking costs, of the bill."""
        return (self.cost - self.cost_without) / self.cost if self.cost else Fraction(0)


def thinking(prices: Prices, prompt: int, hidden: int, answer: int) -> Thinking:
    """Hidden tokens are decoded like any other, and billed as output."""
    with_, without = Usage(input=prompt, output=hidden + answer), Usage(input=prompt, output=answer)
    return Thinking(prices.cost(with_), prices.cost(without), prompt + hidden + answer, prompt + answer)
