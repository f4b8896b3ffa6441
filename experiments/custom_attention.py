"""Define custom attention variants outside of the library, as a user would.

Run it to see each one drawn, checked, and put into the demo model: `python experiments/custom_attention.py`. In an
experiment they are named by their path, or by the name they were registered under:

    attention:
      mask: {path: "experiments/custom_attention.py:Dilated", arguments: {near: 32, step: 4}}
      pattern: [window, window, full]
      sliding_window: 64
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import workbench
from workbench.inspect.mask_picture import draw_mask
from workbench.model.layers import Attention
from workbench.testing import check_attention

TEXT = "def fibonacci(n):\n"
PICTURES = Path("pictures")


# %% A mask is a predicate over positions: True where the query sees the key.
@workbench.register("dilated")
@dataclass(frozen=True)
class Dilated:
    """A mask of the last `near` tokens, and of every `step`-th token before them.

    Longformer's dilated window (Beltagy et al., 2020).
    """

    near: int = 8
    step: int = 4

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & ((query - key < self.near) | (key % self.step == 0))


# %% A score function replaces each score: here far keys fade, faster for later heads.
def fading(score: Tensor, head: Tensor, query: Tensor, key: Tensor, rate: float = 0.02) -> Tensor:
    """Lower scores in proportion to distance with one slope for each head, as in ALiBi but with equally spaced
    slopes."""
    return score - rate * (head + 1) * (query - key)


# %% A module may change everything: it extends ours, and may hold parameters of its own.
class Gated(Attention):
    """Attention that gates each head's output by a value computed from the head's query.

    Qiu et al. (2025) compute the gate from the layer's input instead.
    """

    def __init__(self, *slots, open: float = 1.0, **more):
        super().__init__(*slots, **more)
        self.gate = nn.Parameter(torch.full((self.spec.num_heads, self.spec.head_dim), open))

    def attend(self, q, batch, cache, backend=None) -> Tensor:
        opened = torch.sigmoid((q * self.gate).sum(-1, keepdim=True))
        return super().attend(q, batch, cache, backend) * opened


# %% A mistake: this mask sees the future.
def peeking(query: Tensor, key: Tensor) -> Tensor:
    return key <= query + 1


def continued(text: str, tokens: int, **attention: object) -> str:
    """Return the demo model's greedy continuation of `text`, with its attention changed by the given settings."""
    runner = workbench.load("demo", attention=attention, backend="eager", dtype="float32")
    return "".join(event.text for event in runner.stream(text, max_tokens=tokens, temperature=0))


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    (PICTURES / "dilated.svg").write_text(draw_mask(Dilated(), 32))
    for part in (Dilated, fading, Gated, peeking):
        print(check_attention(part, examples=10, backends=["eager", "inductor", "mlir"]), end="\n\n")
    here = "experiments/custom_attention.py:"
    windows = {"sliding_window": 16}, {"sliding_window": 16, "num_sink_tokens": 4}
    for attention in ({}, {"mask": "dilated"}, {"score": here + "fading"}, *windows):
        print(f"--- {attention or 'as trained'}\n{TEXT}{continued(TEXT, 40, **attention)}\n")


if __name__ == "__main__":
    main()
