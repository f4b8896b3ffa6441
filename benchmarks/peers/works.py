"""Workloads of the peer benchmark: decode, prefill, and sixteen requests at once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from workbench.bench.model import PromptAndOutput, mixed_lengths
from workbench.errors import WorkbenchError
from workbench.request import random_token_ids

MIN_PROMPT = 16  # tokens before a decode at depth 0


@dataclass(frozen=True)
class PeerWorkload:
    """One workload to time. `requests` run together; `name` is its row in the table.

    tokens/s are: output tokens after the first (`decode`), prompt tokens until the first output token (`prefill`), all
    output tokens over the wall time (`mixed`)."""

    name: str
    kind: Literal["decode", "prefill", "mixed"]
    requests: tuple[PromptAndOutput, ...]

    @property
    def longest(self) -> int:
        return max(prompt + output for prompt, output in self.requests)

    def repetition(self, vocab: int, seed: int) -> list[dict]:
        """Return the requests with random prompts of their own, so that no prefix cache helps the next repetition."""
        draw = random.Random(f"{self.name}/{seed}")
        return [
            {"prompt": random_token_ids(draw, vocab, prompt), "output_tokens": output}
            for prompt, output in self.requests
        ]


def decode_workload(depth: int = 0, output_tokens: int = 128) -> PeerWorkload:
    """Return a workload of one request that decodes after `depth` tokens (at least a short prompt)."""
    return PeerWorkload(f"decode at {depth}", "decode", ((max(depth, MIN_PROMPT), output_tokens),))


def prefill_workload(tokens: int) -> PeerWorkload:
    """Return a workload that times the first token after a prompt of `tokens`."""
    return PeerWorkload(f"prefill {tokens}", "prefill", ((tokens, 1),))


def mixed_workload(*arguments: Any, **settings: Any) -> PeerWorkload:
    """Return a workload of requests at once, their lengths drawn by `mixed_lengths`, whose arguments it takes."""
    lengths = mixed_lengths(*arguments, **settings)
    return PeerWorkload(f"mixed {len(lengths)}", "mixed", lengths)


def standard_workloads() -> tuple[PeerWorkload, ...]:
    return decode_workload(0), decode_workload(4096), prefill_workload(512), prefill_workload(2048), mixed_workload()


def parse_workloads(names: Sequence[str]) -> tuple[PeerWorkload, ...]:
    """Parse workloads from the command line: `decode`, `decode@4096`, `prefill@512`, `mixed`; `all` is the standard
    five."""
    chosen: list[PeerWorkload] = []
    for name in names:
        kind, _, number = name.partition("@")
        if name == "all":
            chosen += standard_workloads()
        elif kind == "decode" and (number.isdigit() or "@" not in name):
            chosen.append(decode_workload(int(number or 0)))
        elif kind == "prefill" and number.isdigit() and int(number):
            chosen.append(prefill_workload(int(number)))
        elif name == "mixed":
            chosen.append(mixed_workload())
        else:
            raise WorkbenchError(f"work {name!r}: is none of decode, decode@DEPTH, prefill@TOKENS, mixed, all")
    return tuple(dict.fromkeys(chosen))
