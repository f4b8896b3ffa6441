"""Teacher forcing: run known texts through a runner as if it generated them, and score each token.

The run is like serving: chunked prefill and decode, pages, the cache's own format, the backend. Only the next token is
taken from the text, and logits of more positions than the last are computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from workbench.engine.executors import Executor
from workbench.engine.plan import StepPlan
from workbench.engine.runner import Runner, generate
from workbench.errors import WorkbenchError
from workbench.request import Request, SamplingParameters
from workbench.request import Sequence as Served
from workbench.sampling.choice import SampledToken
from workbench.sampling.verify import Draft

LogitsCallback = Callable[[int, int, Tensor], None]


@dataclass(frozen=True)
class ForcedText:
    """A tokenized text to score.

    The first `num_prompt_tokens` tokens are the prompt, the others are decoded. Tokens from index `first_scored` on are
    scored: token i by the logits at position i - 1."""

    ids: tuple[int, ...]
    first_scored: int
    num_prompt_tokens: int

    def __post_init__(self) -> None:
        if not 1 <= self.first_scored < len(self.ids) or not 1 <= self.num_prompt_tokens < len(self.ids):
            raise ValueError(
                f"{len(self.ids)} tokens: first {self.first_scored} and prefilled {self.num_prompt_tokens} must be in 1.."
            )


def score_texts(runner: Runner, texts: Sequence[ForcedText], on_logits: LogitsCallback) -> None:
    """Run all texts with teacher forcing and pass on the logits of every scored position.

    Args:
        runner: The runner to use; its sampler and proposer are restored at the end.
        texts: Texts to score.
        on_logits: Receives (index of the text, index of the first scored token, logits [token, vocab]) as they are
            computed, in order within a text.

    Raises:
        WorkbenchError: Where a text does not run to its end.
    """
    requests = [
        Request(
            str(index),
            text.ids[: text.num_prompt_tokens],
            SamplingParameters(temperature=0.0, max_tokens=len(text.ids) - text.num_prompt_tokens, ignore_eos=True),
        )
        for index, text in enumerate(texts)
    ]
    with _replaced(runner, _ScoringExecutor(runner.executor, texts, on_logits), _ForcedSampler(texts)):
        ends = generate(runner, requests)
    for name, end in ends.items():
        if end.reason != "length":
            raise WorkbenchError(f"text {name} of {len(texts[int(name)].ids)} tokens: {end.error or end.reason}")


class _ScoringExecutor:
    """An executor that requests the logits of every scored position."""

    def __init__(self, inner: Executor, texts: Sequence[ForcedText], on_logits: LogitsCallback):
        self.inner, self.texts, self.note = inner, texts, on_logits
        self.next = [text.first_scored - 1 for text in texts]  # positions: what is computed again is not noted again

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def forward(self, plan: StepPlan) -> Tensor:
        indices = [int(span.sequence.request_id) for span in plan.spans]
        first = [max(span.start, self.next[index]) for span, index in zip(plan.spans, indices, strict=True)]
        wanted = [max(0, span.end - place) for span, place in zip(plan.spans, first, strict=True)]
        asked = [max(rows, int(span.needs_sample)) for span, rows in zip(plan.spans, wanted, strict=True)]
        spans = tuple(span._replace(requested_logits=rows) for span, rows in zip(plan.spans, asked, strict=True))
        logits = self.inner.forward(replace(plan, spans=spans))
        sampled = []
        for index, span, rows, part in zip(indices, spans, wanted, logits.split(asked), strict=True):
            if rows:
                self.note(index, span.end - rows + 1, part[len(part) - rows :])
                self.next[index] = span.end
            if span.needs_sample:
                sampled.append(part[-1])
        return torch.stack(sampled) if sampled else logits[:0]


class _ForcedSampler:
    """A sampler that returns the next token of the text."""

    def __init__(self, texts: Sequence[ForcedText]):
        self.texts = texts

    def admit(self, sequence: Served) -> None: ...

    def forget(self, request_id: str) -> None: ...

    def verify(self, logits: Tensor, sequences: list[Served], drafts: Sequence[Draft]) -> list[list[SampledToken]]:
        return [[SampledToken(self.texts[int(served.request_id)].ids[len(served.token_ids)])] for served in sequences]


@contextmanager
def _replaced(runner: Runner, executor: Any, chooser: Any) -> Iterator[None]:
    """Replace the runner's executor and sampler and disable drafting; restore all of them at the end."""
    own = runner.executor, runner.tracker.sampler, runner.speculator
    runner.executor, runner.tracker.sampler, runner.speculator = executor, chooser, None
    try:
        yield
    finally:
        runner.executor, runner.tracker.sampler, runner.speculator = own
