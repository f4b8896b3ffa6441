"""Check a ranking of samples, or a search over branches, against laws on which the engine relies.

Samples are empty, equal and different texts; branches have only the prompt or also tokens, with tied or peaked logits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from hypothesis import strategies as st

from workbench.custom import build_custom, resolve_path
from workbench.decoding.search import Branch, advance_search
from workbench.sampling.ranking import rank_samples
from workbench.testing.law import ConformityReport, LawBroken, check_law
from workbench.testing.samplers import ROW_KINDS, make_logits
from workbench.trace.events import Finished

VOCAB, HIDDEN, MAX_BRANCHES = 32, 6, 5

texts = st.text("ab 12\n", max_size=8)
samples = st.lists(st.tuples(texts, st.floats(-50, 0)), min_size=1, max_size=6).map(
    lambda drawn: [
        Finished(0.0, "a", output_text=text, token_ids=tuple(map(ord, text)), sample=at, score=score)
        for at, (text, score) in enumerate(drawn)
    ]
)


def _branches(count: int, tokens: int, kind: str, seed: int) -> list[Branch]:
    """Draw branches of `tokens` tokens each; with 0 tokens, all branches have only the prompt."""
    generator = torch.Generator().manual_seed(seed)

    def branch(number: int) -> Branch:
        ids = torch.randint(VOCAB, (tokens,), generator=generator).tolist()
        logprobs = (-3 * torch.rand(tokens, generator=generator)).tolist()
        states = torch.randn(1 + tokens, HIDDEN, generator=generator)
        return Branch(tuple(ids), tuple(logprobs), states, make_logits(VOCAB, kind, "none", seed + number))

    return [branch(number) for number in range(count)] if tokens else [branch(0)] * count


branches = st.builds(
    _branches, st.integers(1, MAX_BRANCHES), st.integers(0, 4), st.sampled_from(ROW_KINDS), st.integers(0, 10_000)
)


def check_ranking(part: object, examples: int = 50, arguments: Mapping[str, Any] | None = None) -> ConformityReport:
    """Try a ranking on many lists of samples, and report for each law whether it holds.

    Args:
        part: a ranking: an instance, a class, a function, or an import path as in a configuration.
        examples: number of lists tried for each law, the same in every call.
        arguments: arguments of `part`'s constructor, if it is a class.

    Raises:
        WorkbenchError: if `part` cannot be found or built.
    """
    return _check("ranking", rank_samples, "gives one finite score for each sample", samples, part, examples, arguments)


def check_search(part: object, examples: int = 50, arguments: Mapping[str, Any] | None = None) -> ConformityReport:
    """Try a search on many sets of branches, and report for each law whether it holds.

    Args:
        part: a search: an instance, a class, or an import path as in a configuration.
        examples: number of sets tried for each law, the same in every call.
        arguments: arguments of `part`'s constructor, if it is a class.

    Raises:
        WorkbenchError: if `part` cannot be found or built.
    """
    law = "names only existing branches and tokens"
    return _check("search", advance_search, law, branches, part, examples, arguments)


def _check(
    kind: str, call: Callable[[Any, Any, str], object], law: str, drawn: st.SearchStrategy[Any], part: object,
    examples: int, arguments: Mapping[str, Any] | None,
) -> ConformityReport:  # fmt: skip
    name = part if isinstance(part, str) else getattr(part, "__qualname__", None) or repr(part)
    source = resolve_path(part) if isinstance(part, str) else part
    build = functools.partial(build_custom, source, arguments or {}, name)
    made = build()

    def answers(given: Any) -> None:
        call(made, given, name)

    def repeats(given: Any) -> None:
        first = call(made, given, name)
        if call(made, given, name) != first:
            raise LawBroken(f"another answer at the second call than {first}")
        if call(build(), given, name) != first:
            raise LawBroken(f"a new part does not answer {first}: the answer depends on earlier calls")

    laws = {law: answers, "gives the same result for the same input, whatever came before": repeats}
    tried = (check_law(each, check, examples, drawn) for each, check in laws.items())
    return ConformityReport(f"{kind} {name}", tuple(tried))
