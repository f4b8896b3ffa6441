"""Context-aware decoding: trust the context in the prompt more than what the model learnt before.

Shi et al., 2023, "Trusting Your Evidence: Hallucinate Less with Context-aware Decoding", equation 2, with c the
context, x the question, which is the end of the prompt, and y the answer so far:

    logit'(v)  =  (1 + alpha) * logit(v | c, x, y)  -  alpha * logit(v | x, y)

alpha = 0 is the model as it is. Here the question is the last `question` tokens of the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import workbench
from workbench.parts import Finished, History


@dataclass(frozen=True)
class ContextAware:
    """A filter over a second stream, whose prompt is the question alone."""

    alpha: float = 0.5
    question: int = 16

    def __post_init__(self) -> None:
        if not (self.alpha >= 0 and self.question >= 1):
            raise workbench.WorkbenchError(f"{self}: alpha is 0 or more, question 1 or more")

    def second_prompt(self, prompt_ids: Sequence[int]) -> tuple[int, ...]:
        return tuple(prompt_ids[-self.question :])

    def __call__(self, logits: Tensor, histories: Sequence[History], second: Tensor) -> Tensor:
        removed = logits == -torch.inf
        return (logits + self.alpha * (logits - second)).masked_fill(removed, -torch.inf)


NAMES = ("fetch", "resize", "parse_row", "close_all", "add_user", "total", "lookup", "draw")
CONTEXT = "class Thing:\n    def __init__(self):\n        pass\n\n    def NAME(self):\n        return 1\n\n\n"
QUESTION = "thing = Thing()\nthing."  # the method that the context defines is the answer


def followed(alpha: float) -> float:
    """Return the share of names for which the demo model's greedy answer is the one in the context."""
    runner = workbench.load("demo")
    assert runner.tokenizer is not None
    arguments = {"alpha": alpha, "question": len(runner.tokenizer.encode(QUESTION))}
    part = {"path": f"{__file__}:ContextAware", "arguments": arguments}
    right = 0
    for name in NAMES:
        prompt = CONTEXT.replace("NAME", name) + QUESTION
        events = runner.stream(prompt, temperature=0, max_tokens=8, filters=[part])
        right += any(event.output_text.startswith(name) for event in events if isinstance(event, Finished))
    return right / len(NAMES)


def figures() -> dict[str, float]:
    """Return the share of answers from the context, without the filter and with it, and the difference, if any is."""
    plain, aware = followed(0.0), followed(0.5)
    if plain == aware == 0.0:
        return {"context_plain": plain, "context_aware_share": aware}
    return {"context_plain": plain, "context_aware_share": aware, "context_gain": aware - plain}
