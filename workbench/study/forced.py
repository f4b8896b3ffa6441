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
from workbench.sampling.choice import Choice
from workbench.sampling.verify import Draft

Note = Callable[[int, int, Tensor], None]


@dataclass(frozen=True)
class Text:
    """A tokenized text to score.

    The first `num_prompt_tokens` tokens are the prompt, the others are decoded. Tokens from index `first_scored` on are
    scored: token i by the logits at position i - 1."""

    ids: tuple[int, ...]
    first: int
    prefilled: int

    def __post_init__(self) -> None:
        if not 1 <= self.first < len(self.ids) or not 1 <= self.prefilled < len(self.ids):
            raise ValueError(
                f"{len(self.ids)} tokens: first {self.first} and prefilled {self.prefilled} must be in 1.."
            )


def score(runner: Runner, texts: Sequence[Text], note: Note) -> None:
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
            text.ids[: text.prefilled],
            SamplingParameters(temperature=0.0, max_tokens=len(text.ids) - text.prefilled, ignore_eos=True),
        )
        for index, text in enumerate(texts)
    ]
    with _in_place_of(runner, _Watched(runner.executor, texts, note), _Given(texts)):
        ends = generate(runner, requests)
    for name, end in ends.items():
        if end.reason != "length":
            raise WorkbenchError(f"text {name} of {len(texts[int(name)].ids)} tokens: {end.error or end.reason}")


class _Watched:
    """An executor that requests the logits of every scored position."""

    def __init__(self, inner: Executor, texts: Sequence[Text], note: Note):
        self.inner, self.texts, self.note = inner, texts, note
        self.next = [text.first - 1 for text in texts]  # positions: what is computed again is not noted again

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def forward(self, plan: StepPlan) -> Tensor:
        indices = [int(span.sequence.request_id) for span in plan.spans]
        first = [max(span.start, self.next[index]) for span, index in zip(plan.spans, indices, strict=True)]
        wanted = [max(0, span.end - place) for span, place in zip(plan.spans, first, strict=True)]
        asked = [max(rows, int(span.samples)) for span, rows in zip(plan.spans, wanted, strict=True)]
        spans = tuple(span._replace(scored=rows) for span, rows in zip(plan.spans, asked, strict=True))
        logits = self.inner.forward(replace(plan, spans=spans))
        sampled = []
        for index, span, rows, part in zip(indices, spans, wanted, logits.split(asked), strict=True):
            if rows:
                self.note(index, span.end - rows + 1, part[len(part) - rows :])
                self.next[index] = span.end
            if span.samples:
                sampled.append(part[-1])
        return torch.stack(sampled) if sampled else logits[:0]


class _Given:
    """A sampler that returns the next token of the text."""

    def __init__(self, texts: Sequence[Text]):
        self.texts = texts

    def admit(self, sequence: Served) -> None: ...

    def forget(self, request_id: str) -> None: ...

    def verify(self, logits: Tensor, sequences: list[Served], drafts: Sequence[Draft]) -> list[list[Choice]]:
        return [[Choice(self.texts[int(served.request_id)].ids[len(served.token_ids)])] for served in sequences]


@contextmanager
def _in_place_of(runner: Runner, executor: Any, chooser: Any) -> Iterator[None]:
    """Replace the runner's executor and sampler and disable drafting; restore all of them at the end."""
    own = runner.executor, runner.served.chooser, runner.drafts
    runner.executor, runner.served.chooser, runner.drafts = executor, chooser, None
    try:
        yield
    finally:
        runner.executor, runner.served.chooser, runner.drafts = own
