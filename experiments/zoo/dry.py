"""DRY: lower the logits of tokens that would extend a repetition, the more the longer it already is.

"Don't Repeat Yourself" sampling (p-e-w, 2024, text-generation-webui #5677). With x the text so far and L(v) the length
of the longest end of x that occurred before, followed there by the token v:

    logit'(v)  =  logit(v) - multiplier * base ^ (L(v) - allowed)      where L(v) >= allowed

Here breakers, over which no repetition reaches, are token ids ("198,13") in place of texts, and L is at most 64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from workbench import WorkbenchError
from workbench.parts import History

LONGEST = 64  # a repetition that counts: base ** 64 is a finite number


@dataclass(frozen=True)
class DRY:
    """A filter. `multiplier` is the penalty of a repetition of `allowed` tokens, `base` its growth with each more."""

    multiplier: float = 0.8
    base: float = 1.75
    allowed: int = 2
    breakers: str = ""

    def __post_init__(self) -> None:
        if not (self.multiplier >= 0 and 1 <= self.base <= 4 and self.allowed >= 1):
            raise WorkbenchError(f"{self}: multiplier is 0 or more, base from 1 to 4, allowed 1 or more")

    def __call__(self, logits: Tensor, histories: Sequence[History]) -> Tensor:
        breakers = {int(token) for token in self.breakers.split(",") if token.strip()}
        lowered = logits.clone()
        for row, history in zip(lowered, histories, strict=True):
            for token, length in repetitions([*history.prompt_ids, *history.output_ids], breakers).items():
                if length >= self.allowed:
                    row[token] -= self.multiplier * self.base ** (min(length, LONGEST) - self.allowed)
        return lowered


def repetitions(ids: Sequence[int], breakers: set[int]) -> dict[int, int]:
    """Return L by token, for those with one: how much of the text's end stands before an earlier occurrence of it.

    The text is read backwards: its Z function at n is the length to which the end of the text stands n tokens before
    the end too. It takes linear time.
    """
    text = [-1 - place if token in breakers else token for place, token in enumerate(reversed(ids))]  # equal to none
    lengths = [0] * len(text)
    found: dict[int, int] = {}
    left = right = 0  # the match that reaches furthest is text[left:right]
    for at in range(1, len(text)):
        length = min(right - at, lengths[at - left]) if at < right else 0
        while at + length < len(text) and text[length] == text[at + length]:
            length += 1
        lengths[at] = length
        if at + length > right:
            left, right = at, at + length
        following = text[at - 1]
        if length and following >= 0:
            found[following] = max(length, found.get(following, 0))
    return found
