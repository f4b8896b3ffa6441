"""Watermark: a key splits the vocabulary by the token before, and tokens of the green part are made more likely.

Kirchenbauer et al., 2023, "A Watermark for Large Language Models", algorithm 2 and equation 3. The green list, a share
gamma of the vocabulary, is drawn by a generator whose seed is the key and the previous token:

    logit'(v)  =  logit(v) + delta   for v in green(previous token),   logit(v) otherwise
    z          =  (green tokens - gamma * T) / sqrt(T * gamma * (1 - gamma))

Who has the key counts the green tokens of a text: without the watermark z is near 0, with it far above.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import workbench
from workbench.parts import Finished, History


@dataclass(frozen=True)
class Watermark:
    """A filter that marks texts, and the detector of its mark."""

    delta: float = 2.0
    gamma: float = 0.25
    key: int = 15485863

    def __post_init__(self) -> None:
        if not (self.delta >= 0 and 0 < self.gamma < 1):
            raise workbench.WorkbenchError(f"{self}: delta is 0 or more, gamma between 0 and 1")

    def green(self, previous: int, vocab: int) -> Tensor:
        """Return whether each token is green after `previous`: [vocab]."""
        digest = hashlib.blake2b(f"{self.key} {previous}".encode(), digest_size=7).digest()
        order = torch.randperm(vocab, generator=torch.Generator().manual_seed(int.from_bytes(digest, "little")))
        return order < self.gamma * vocab

    def __call__(self, logits: Tensor, histories: Sequence[History]) -> Tensor:
        marked = logits.clone()
        for row, history in zip(marked, histories, strict=True):
            before = (history.output_ids or history.prompt_ids or (0,))[-1]
            row += self.delta * self.green(before, len(row)).to(row)
        return marked

    def z(self, ids: Sequence[int], vocab: int) -> float:
        """Return the z of a text's tokens; each pair of neighbours counts once, as a loop is no evidence."""
        pairs = {*zip(ids, ids[1:], strict=False)}
        count = sum(bool(self.green(before, vocab)[token]) for before, token in pairs)
        return (count - self.gamma * len(pairs)) / math.sqrt(len(pairs) * self.gamma * (1 - self.gamma))


def texts_z(filters: list) -> list[float]:
    """Return z of eight texts of 200 tokens by the demo model."""
    runner = workbench.load("demo")
    sampling = {"filters": filters, "max_tokens": 200, "ignore_eos": True, "n": 8}
    ends = [event for event in runner.stream("import os\n", **sampling) if isinstance(event, Finished)]
    return [Watermark().z(end.token_ids, runner.model.spec.vocab_size) for end in ends]


def figures() -> dict[str, float]:
    """Return the mean z of marked and of plain texts, and the share of marked ones above 4."""
    marked, plain = texts_z([{"path": f"{__file__}:Watermark"}]), texts_z([])
    return {"z_marked": sum(marked) / 8, "z_plain": sum(plain) / 8, "detected": sum(z > 4 for z in marked) / 8}
