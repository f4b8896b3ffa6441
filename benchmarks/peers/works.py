"""Workloads of the peer benchmark: decode, prefill, and sixteen requests at once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from workbench.errors import WorkbenchError
from workbench.request import random_token_ids

MIN_PROMPT = 16  # tokens before a decode at depth 0
PromptAndOutputTokens = tuple[int, int]  # prompt tokens, output tokens


@dataclass(frozen=True)
class PeerWorkload:
    """One workload to time. `requests` run together; `name` is its row in the table.

    tokens/s are: output tokens after the first (`decode`), prompt tokens until the first output token (`prefill`), all
    output tokens over the wall time (`mixed`)."""

    name: str
    kind: Literal["decode", "prefill", "mixed"]
    requests: tuple[PromptAndOutputTokens, ...]

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


def mixed_workload(
    count: int = 16,
    prompts: PromptAndOutputTokens = (32, 512),
    outputs: PromptAndOutputTokens = (32, 128),
    prompt_tokens: int = 4352,
    output_tokens: int = 1274,
    seed: int = 0,
) -> PeerWorkload:
    """Return a workload of `count` requests at once, with lengths drawn from the given ranges that sum to the given
    totals."""
    draw = random.Random(seed)
    lengths = zip(_drawn(draw, count, prompts, prompt_tokens), _drawn(draw, count, outputs, output_tokens), strict=True)
    return PeerWorkload(f"mixed {count}", "mixed", tuple(lengths))


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


def _drawn(draw: random.Random, count: int, ends: PromptAndOutputTokens, total: int) -> list[int]:
    least, most = ends
    if not count * least <= total <= count * most:
        raise WorkbenchError(f"{count} lengths between {least} and {most} cannot sum to {total}")
    lengths = [draw.randint(least, most) for _ in range(count)]
    while (missing := total - sum(lengths)) != 0:
        index = draw.randrange(count)
        lengths[index] = min(most, max(least, lengths[index] + missing))
    return lengths
