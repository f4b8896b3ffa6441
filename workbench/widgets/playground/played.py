"""Tokens and times of one request of the playground, gathered from its events."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from workbench.widgets.tokens.text import Piece

Spell = Callable[[int], str]


@dataclass
class Played:
    """`hear` takes the events of the request and of the steps it was served in, as they come. Times are in seconds.

    `pieces` are the tokens by sample, `rest` what a sample's end added to its text, `ends` how each finished.
    """

    spell: Spell  # a token's own text
    pieces: dict[int, list[Piece]] = field(default_factory=dict)
    rest: dict[int, str] = field(default_factory=dict)
    ends: dict[int, str] = field(default_factory=dict)
    prompt_tokens: int = 0
    arrival: float = math.nan
    first: float = math.nan  # when the first token came
    last: float = math.nan
    kv_bytes: int = 0  # of the pages that the last step was computed on
    kv_peak: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    compiles: tuple[int, int] | None = None  # of the runner, after the first and after the last of its steps
    error: str = ""

    def hear(self, event: Any) -> None:
        match event.kind:
            case "submitted":
                self.arrival, self.prompt_tokens = event.arrival, event.prompt_tokens
            case "decoded":
                self._decoded(event)
            case "stepped":
                self.kv_bytes, self.kv_peak = event.kv_bytes, max(self.kv_peak, event.kv_bytes)
                self.steps += 1
                self.drafted, self.accepted = self.drafted + event.drafted_tokens, self.accepted + event.accepted_tokens
                self.compiles = (self.compiles or (event.compiles, 0))[0], event.compiles
            case "finished":
                self.rest[event.sample], self.ends[event.sample] = event.text, event.reason
                if event.reason in ("refused", "error"):
                    self.error = self.error or event.error

    @property
    def tokens(self) -> int:
        return sum(map(len, self.pieces.values()))

    @property
    def ttft(self) -> float | None:
        return self.first - self.arrival if self.tokens else None

    @property
    def tpot(self) -> float | None:
        """Between the tokens of a sample after its first, as (last - first) / (n - 1) of the longest."""
        longest = max(map(len, self.pieces.values()), default=0)
        return (self.last - self.first) / (longest - 1) if longest > 1 else None

    @property
    def throughput(self) -> float | None:
        """Tokens a second of all samples, from the request's arrival to the last token."""
        return self.tokens / (self.last - self.arrival) if self.tokens and self.last > self.arrival else None

    def text(self, sample: int = 0) -> str:
        return "".join(piece.text for piece in self.pieces.get(sample, ())) + self.rest.get(sample, "")

    def _decoded(self, event: Any) -> None:
        if not self.tokens:
            self.first = event.time
        self.last = event.time
        chances = tuple((self.spell(token), math.exp(logprob)) for token, logprob in event.top_logprobs)
        chance = None if event.logprob is None else math.exp(event.logprob)
        piece = Piece(event.token_id, event.text, self.spell(event.token_id), chance, chances)
        self.pieces.setdefault(event.sample, []).append(piece)
