"""Rows of logits for tests: random, tied, constant, peaked, and with tokens already removed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from workbench.sampling.filters import History

ROW_KINDS = ("random", "tied", "constant", "peaked", "wide")
REMOVED_AMOUNTS = ("none", "some", "half", "all but one")


@dataclass(frozen=True, eq=False)
class LogitsRow:
    """Logits `[vocab]` with at least one finite entry, the tokens before them, and a description."""

    logits: Tensor
    history: History
    kind: str

    def __repr__(self) -> str:
        return f"a row of {len(self.logits)} logits ({self.kind})"

    @classmethod
    def generic(cls, vocab: int, seed: int, history: History) -> LogitsRow:
        """Draw a row of normal logits: no two tokens are nearly equal."""
        generator = torch.Generator().manual_seed(seed)
        return cls(torch.randn(vocab, generator=generator), history, f"normal, seed {seed}")


def make_logits(vocab: int, kind: str, removed: str, seed: int) -> Tensor:
    """Draw logits `[vocab]` of one of `ROW_KINDS`, with some tokens removed; at least one token is left."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(vocab, generator=generator)
    logits = {
        "random": noise * 3,
        "tied": (noise * 2).round(),
        "constant": torch.full((vocab,), float(seed % 7) - 3),
        "peaked": noise + 40 * (torch.arange(vocab) == seed % vocab),
        "wide": noise * 1e4,
    }[kind]
    order = torch.randperm(vocab, generator=generator)
    gone = {"none": 0, "some": vocab // 8, "half": vocab // 2, "all but one": vocab - 1}[removed]
    logits[order[:gone]] = -torch.inf
    return logits


def logits_rows(vocab: int) -> st.SearchStrategy[LogitsRow]:
    """Return a hypothesis strategy for rows of one vocabulary, each with a history of its own."""
    tokens = st.lists(st.integers(0, vocab - 1), max_size=8)

    def row(kind: str, removed: str, seed: int, prompt: list[int], output: list[int]) -> LogitsRow:
        label = f"{kind}, removed: {removed}, seed {seed}"
        return LogitsRow(make_logits(vocab, kind, removed, seed), History(prompt, output), label)

    seeds = st.integers(0, 10_000)
    return st.builds(row, st.sampled_from(ROW_KINDS), st.sampled_from(REMOVED_AMOUNTS), seeds, tokens, tokens)
