"""Texts that are known beforehand, fed through a runner as if it generated them: what it would have said at each place.

Everything is as in serving: the scheduler's chunks of prefill and its decodes, pages, the cache's own format, the lane.
Only the choice of the next token is taken from the text, and logits of more places than the last are looked at.
"""

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
    """Tokens, of which the first `prefilled` are a prompt and the others decode; tokens from index `first` on are
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
    """Run all `texts`; `note` receives (index of the text, index of the first token scored, logits [token, vocab]) as
    they are computed, in order within a text. Raises WorkbenchError where one of them does not run to its end."""
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
    """An executor that asks for the logits of every scored place."""

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
    """A chooser that has the text before it."""

    def __init__(self, texts: Sequence[Text]):
        self.texts = texts

    def admit(self, sequence: Served) -> None: ...

    def forget(self, request_id: str) -> None: ...

    def verify(self, logits: Tensor, sequences: list[Served], drafts: Sequence[Draft]) -> list[list[Choice]]:
        return [[Choice(self.texts[int(served.request_id)].ids[len(served.token_ids)])] for served in sequences]


@contextmanager
def _in_place_of(runner: Runner, executor: Any, chooser: Any) -> Iterator[None]:
    """Nothing is drafted. The runner's own executor, chooser and drafts come back at the end."""
    own = runner.executor, runner.served.chooser, runner.drafts
    runner.executor, runner.served.chooser, runner.drafts = executor, chooser, None
    try:
        yield
    finally:
        runner.executor, runner.served.chooser, runner.drafts = own
