"""Two tokens after a prompt: their exact distribution, and their counts through the sampler."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import torch
from hypothesis import strategies as st

from workbench.request import CustomPart, Request, SamplingParameters, Sequence
from workbench.sampling.enumeration import DENOMINATOR
from workbench.sampling.filters import History, build_filters
from workbench.sampling.sampler import Sampler
from workbench.sampling.samplers import uniform
from workbench.sampling.verify import DRAFT_STREAM, NO_DRAFT, Draft

VOCAB = 3


def chances() -> st.SearchStrategy[tuple[float, ...]]:
    """Distributions over the vocabulary in quarters."""
    cuts = st.lists(st.integers(0, DENOMINATOR), min_size=VOCAB - 1, max_size=VOCAB - 1).map(sorted)
    return cuts.map(
        lambda cut: tuple((b - a) / DENOMINATOR for a, b in zip([0, *cut], [*cut, DENOMINATOR], strict=True))
    )


SIZE = 5
DICE = torch.Generator().manual_seed(20)
MODEL, SMALL = torch.randn(SIZE, SIZE, SIZE, generator=DICE) * 1.5, torch.randn(SIZE, SIZE, generator=DICE)
PROMPT = (1, 2)
Proposes = Callable[[int, tuple[int, ...]], Draft]  # by a request's seed and what it has put out
TRIALS = 1500
WAYS = {
    "plain": SamplingParameters(),
    "temperature": SamplingParameters(temperature=0.6),
    "top-k and top-p": SamplingParameters(top_k=4, top_p=0.8),
    "min-p": SamplingParameters(min_p=0.3, temperature=1.4),
    "penalties": SamplingParameters(repetition_penalty=1.7, presence_penalty=0.8, frequency_penalty=0.9),
    "bias": SamplingParameters(logit_bias={0: 1.0, 3: -float("inf")}),
    "own filter": SamplingParameters(
        filters=(CustomPart(path="tests.sampling.parts:Ban", arguments={"token": 2}),), top_p=0.9
    ),
}


def sequence(sampling: SamplingParameters, output: tuple[int, ...] = (), name: str = "r") -> Sequence:
    made = Sequence.from_request(Request(name, PROMPT, sampling), arrival_index=0)
    made.token_ids.extend(output)
    return made


def expected(sampling: SamplingParameters) -> dict[tuple[int, int], float]:
    """The joint distribution of two tokens, by the filters alone."""
    first = filtered(sampling, ())
    return {(a, b): float(first[a] * filtered(sampling, (a,))[b]) for a in range(SIZE) for b in range(SIZE) if first[a]}


def filtered(sampling: SamplingParameters, output: tuple[int, ...]) -> torch.Tensor:
    row = MODEL[(*PROMPT, *output)[-2:]][None]
    for rule in build_filters(sampling):
        row = rule(row, [History(PROMPT, output)])
    for part in sampling.filters:
        row[:, int(part.arguments["token"])] = -torch.inf
    return row[0].double().softmax(-1)


def drafted(kind: str | Proposes, seed: int, output: tuple[int, ...]) -> Draft:
    """Two tokens: drawn from the small model; the same every time; or as a function has it."""
    if not isinstance(kind, str):
        return kind(seed, output)
    if kind == "certain":
        return Draft((4, 1))
    ids, rows = [], []
    for place in range(2):
        row = SMALL[(*PROMPT, *output, *ids)[-1]].double().softmax(-1)
        share = uniform(seed, len(output) + place, DRAFT_STREAM)
        ids.append(int((row.cumsum(-1) > share).to(torch.uint8).argmax()))
        rows.append(row)
    return Draft(tuple(ids), torch.stack(rows))


def first_two(way: SamplingParameters, kind: str | Proposes) -> Counter:
    """Two tokens of each of many requests that differ in their seeds."""
    ways = [way.model_copy(update={"seed": seed}) for seed in range(TRIALS)]
    output: list[tuple[int, ...]] = [()] * TRIALS
    sampler = Sampler(SIZE)
    while short := [seed for seed in range(TRIALS) if len(output[seed]) < 2]:
        asked = [sequence(ways[seed], output[seed], str(seed)) for seed in short]
        drafts = [NO_DRAFT if kind == "none" else drafted(kind, seed, output[seed]) for seed in short]
        logits = torch.stack(
            [
                MODEL[(*PROMPT, *output[seed], *draft.token_ids[:place])[-2:]]
                for seed, draft in zip(short, drafts, strict=True)
                for place in range(1 + len(draft))
            ]
        )
        for seed, choices in zip(short, sampler.verify(logits, asked, drafts), strict=True):
            assert not any(choice.error for choice in choices)
            output[seed] += tuple(choice.token_id for choice in choices)
    return Counter(tokens[:2] for tokens in output)


def chi_square_p(counts: Counter, chances: dict) -> float:
    """Return the probability that counts deviate so much or more under `chances` (Wilson and Hilferty, 1931)."""
    impossible = sum(n for outcome, n in counts.items() if chances.get(outcome, 0) < 1e-12)
    if impossible:
        return 0.0
    total = sum(counts.values())
    cells = [(counts[outcome], total * chance) for outcome, chance in chances.items() if total * chance >= 5]
    rest = total - sum(n for n, _ in cells), total - sum(e for _, e in cells)
    cells += [rest] if rest[1] >= 5 else []
    deviation, free = sum((n - e) ** 2 / e for n, e in cells), len(cells) - 1
    z = ((deviation / free) ** (1 / 3) - (1 - 2 / (9 * free))) / math.sqrt(2 / (9 * free))
    return 0.5 * math.erfc(z / math.sqrt(2))


LEVEL = 0.001 / 10  # Bonferroni: all of them together fail a right sampler once in a thousand drawings
