"""Compare the costs of prompts and answers: a detailed prompt, or thinking before the answer."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from workbench.economics.prices import Prices
from workbench.economics.usage import Usage


def break_even_answer_tokens(prices: Prices, prompt: int, other_prompt: int, other_answer: int, from_cache: bool = False) -> Fraction:
    """Return the break-even answer length: with fewer answer tokens, `prompt` costs less than `other_prompt` with
    `other_answer`.

    A value below 0 means that it never does. `from_cache`: the prompt is read from a prompt cache."""
    budget = prices.cost(Usage(input=other_prompt, output=other_answer))
    mine = prices.cost(Usage(cache_read=prompt) if from_cache else Usage(input=prompt))
    return (budget - mine) / prices.token_price("output")


def break_even_price_ratio(prompt: int, answer: int, other_prompt: int, other_answer: int) -> Fraction | None:
    """Return the break-even price ratio of an output token to an input token.

    Above it, `prompt` and `answer` cost less than the other two. None where no ratio does."""
    if answer >= other_answer:
        return Fraction(0) if prompt < other_prompt else None
    return Fraction(max(0, prompt - other_prompt), other_answer - answer)


@dataclass(frozen=True)
class ThinkingCost:
    """Cost and context of an answer with and without hidden tokens before it."""

    cost: Fraction
    cost_without: Fraction
    context: int  # positions it takes, of the model's context and of its cache
    context_without: int

    @property
    def thinking_fraction(self) -> Fraction:
        """Return the fraction of the bill that thinking costs."""
        return (self.cost - self.cost_without) / self.cost if self.cost else Fraction(0)


def thinking_cost(prices: Prices, prompt: int, hidden: int, answer: int) -> ThinkingCost:
    """Price an answer with `hidden` thinking tokens, which are decoded and billed as output."""
    with_, without = Usage(input=prompt, output=hidden + answer), Usage(input=prompt, output=answer)
    return ThinkingCost(prices.cost(with_), prices.cost(without), prompt + hidden + answer, prompt + answer)
