"""Define the workloads of the peer benchmark: decode, prefill, and sixteen requests at once."""

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
    """One workload to time. Its `requests` run together, and `name` is its row in the table.

    Its tokens per second count, for `decode`, output tokens after the first; for `prefill`, prompt tokens until the
    first output token; for `mixed`, all output tokens, each divided by the wall time that they took."""

    name: str
    kind: Literal["decode", "prefill", "mixed"]
    requests: tuple[PromptAndOutput, ...]

    @property
    def longest(self) -> int:
        return max(prompt + output for prompt, output in self.requests)

    def repetition(self, vocab: int, seed: int) -> list[dict]:
        """Return the requests of one repetition, with new random prompts, so that no prefix cache from an earlier
        repetition helps."""
        draw = random.Random(f"{self.name}/{seed}")
        return [
            {"prompt": random_token_ids(draw, vocab, prompt), "output_tokens": output}
            for prompt, output in self.requests
        ]


def decode_workload(depth: int = 0, output_tokens: int = 128) -> PeerWorkload:
    """Return a workload of one request that decodes `output_tokens` tokens after a context of `depth` tokens (at least
    a short prompt)."""
    return PeerWorkload(f"decode at {depth}", "decode", ((max(depth, MIN_PROMPT), output_tokens),))


def prefill_workload(tokens: int) -> PeerWorkload:
    """Return a workload that times the first token after a prompt of `tokens` tokens."""
    return PeerWorkload(f"prefill {tokens}", "prefill", ((tokens, 1),))


def mixed_workload(*arguments: Any, **settings: Any) -> PeerWorkload:
    """Return a workload of requests that run at once. Its arguments are those of `mixed_lengths`, which draws the
    lengths."""
    lengths = mixed_lengths(*arguments, **settings)
    return PeerWorkload(f"mixed {len(lengths)}", "mixed", lengths)


def standard_workloads() -> tuple[PeerWorkload, ...]:
    return decode_workload(0), decode_workload(4096), prefill_workload(512), prefill_workload(2048), mixed_workload()


def parse_workloads(names: Sequence[str]) -> tuple[PeerWorkload, ...]:
    """Parse workload names from the command line: `decode`, `decode@4096`, `prefill@512`, `mixed`; `all` means the
    standard five."""
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
