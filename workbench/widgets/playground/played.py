"""Tokens and times of one request of the playground, gathered from its events."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from workbench.widgets.tokens.text import GeneratedToken

TokenText = Callable[[int], str]


@dataclass
class PlayedRequest:
    """`hear` takes the events of the request and of the steps it was served in, as they come. Times are in seconds.

    `pieces` are the tokens by sample, `rest` what a sample's end added to its text, `ends` how each finished.
    """

    token_text: TokenText  # a token's own text
    tokens_by_sample: dict[int, list[GeneratedToken]] = field(default_factory=dict)
    trailing_text: dict[int, str] = field(default_factory=dict)
    finish_reasons: dict[int, str] = field(default_factory=dict)
    prompt_tokens: int = 0
    arrival: float = math.nan
    first_token_time: float = math.nan  # when the first token came
    last_token_time: float = math.nan
    kv_bytes: int = 0  # of the pages that the last step was computed on
    kv_peak: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    compiles: tuple[int, int] | None = None  # of the runner, after the first and after the last of its steps
    error: str = ""

    def add_event(self, event: Any) -> None:
        match event.kind:
            case "submitted":
                self.arrival, self.prompt_tokens = event.arrival, event.prompt_tokens
            case "decoded":
                self._add_token(event)
            case "stepped":
                self.kv_bytes, self.kv_peak = event.kv_bytes, max(self.kv_peak, event.kv_bytes)
                self.steps += 1
                self.drafted, self.accepted = self.drafted + event.drafted_tokens, self.accepted + event.accepted_tokens
                self.compiles = (self.compiles or (event.compiles, 0))[0], event.compiles
            case "finished":
                self.trailing_text[event.sample], self.finish_reasons[event.sample] = event.text, event.reason
                if event.reason in ("refused", "error"):
                    self.error = self.error or event.error

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens_by_sample.values()))

    @property
    def ttft(self) -> float | None:
        return self.first_token_time - self.arrival if self.num_tokens else None

    @property
    def tpot(self) -> float | None:
        """Between the tokens of a sample after its first, as (last - first) / (n - 1) of the longest."""
        longest = max(map(len, self.tokens_by_sample.values()), default=0)
        return (self.last_token_time - self.first_token_time) / (longest - 1) if longest > 1 else None

    @property
    def throughput(self) -> float | None:
        """Tokens a second of all samples, from the request's arrival to the last token."""
        return self.num_tokens / (self.last_token_time - self.arrival) if self.num_tokens and self.last_token_time > self.arrival else None

    def text(self, sample: int = 0) -> str:
        return "".join(piece.text for piece in self.tokens_by_sample.get(sample, ())) + self.trailing_text.get(sample, "")

    def _add_token(self, event: Any) -> None:
        if not self.num_tokens:
            self.first_token_time = event.time
        self.last_token_time = event.time
        chances = tuple((self.token_text(token), math.exp(logprob)) for token, logprob in event.top_logprobs)
        chance = None if event.logprob is None else math.exp(event.logprob)
        piece = GeneratedToken(event.token_id, event.text, self.token_text(event.token_id), chance, chances)
        self.tokens_by_sample.setdefault(event.sample, []).append(piece)
