"""Classifier-free guidance: push the next token away from what it would be without the prompt.

Sanchez et al., 2023, "Stay on topic with Classifier-Free Guidance", equation 7, with c the prompt, w the tokens so far,
and c- the end of the prompt, or a negative prompt:

    log p'(w(i))  =  log p(w(i) | w, c-)  +  gamma * (log p(w(i) | w, c) - log p(w(i) | w, c-))

gamma = 1 is the model as it is. Here a negative prompt is given as token ids ("12,7"), to be followed by the last
`keep` tokens of the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from workbench import WorkbenchError
from workbench.parts import History


@dataclass(frozen=True)
class Guidance:
    """A filter over a second stream, whose prompt is `negative` and the last `keep` tokens of the request's."""

    gamma: float = 1.5
    keep: int = 1
    negative: str = ""

    def __post_init__(self) -> None:
        if not (self.gamma > 0 and self.keep >= 1):
            raise WorkbenchError(f"{self}: gamma is above 0, keep 1 or more")

    def second_prompt(self, prompt_ids: Sequence[int]) -> tuple[int, ...]:
        return (*(int(token) for token in self.negative.split(",") if token.strip()), *prompt_ids[-self.keep :])

    def __call__(self, logits: Tensor, histories: Sequence[History], second: Tensor) -> Tensor:
        with_prompt, without = logits.log_softmax(-1), second.log_softmax(-1)
        return without + self.gamma * (with_prompt - without)
