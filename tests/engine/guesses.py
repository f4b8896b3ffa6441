"""A proposer that knows what will come, and runs beside those without drafts."""

from __future__ import annotations

import random
from collections import deque

import pytest

from compiled_kernels import Backend, backend_problems
from tests.engine.tiny import CONTEXT, VOCAB, runner_of
from tests.helpers.events import of
from workbench.engine.runner import Runner, generate
from workbench.kv_cache.pages import pages_for
from workbench.request import Sequence
from workbench.sampling.verify import Draft
from workbench.speculative.draft_model import CompiledDraftSteps, DraftModelProposer
from workbench.speculative.proposers import Speculator
from workbench.trace.events import Finished

needs_mlir = pytest.mark.skipif(
    backend_problems()[Backend.MLIR] is not None, reason=f"{backend_problems()[Backend.MLIR]}"
)


class Guesses:
    """Proposes what will come, from `answers`, or something else, as dice have it; seldom fewer than asked for."""

    def __init__(self, answers: dict[str, tuple[int, ...]], seed: int = 0, right: float = 0.7):
        self.answers, self.dice, self.right = answers, random.Random(seed), right
        self.kept: set[str] = set()

    def propose(self, sequences, counts) -> list[Draft]:
        self.kept |= {sequence.request_id for sequence in sequences}
        return [self._guess(sequence, count) for sequence, count in zip(sequences, counts, strict=True)]

    def _guess(self, sequence: Sequence, count: int) -> Draft:
        coming = self.answers[sequence.request_id][len(sequence.output_ids) :][:count]
        said = [t if self.dice.random() < self.right else self.dice.randrange(VOCAB) for t in coming]
        return Draft(tuple(said[: self.dice.choice([count, count, 1])]))

    def forget(self, request_id: str) -> None:
        self.kept.discard(request_id)


def drafts(proposer, most: int = 3, **more) -> Speculator:
    return Speculator(proposer, most, CONTEXT, **more)


def plain(model, requests, **settings) -> dict[str, Finished]:
    return generate(runner_of(model, **settings), requests)


def tokens(ends: dict[str, Finished]) -> dict[str, tuple]:
    return {name: (end.token_ids, end.reason, end.output_text) for name, end in ends.items()}


def check_pages(runner: Runner) -> None:
    """No sequence holds a page beyond what known tokens need, with every request committed."""
    manager = runner.kv_cache.manager
    for sequence in runner.scheduler.running:
        for table, pages in zip(manager.groups, sequence.pages, strict=True):
            assert len(pages) <= pages_for(table.quantized_until(len(sequence.token_ids)), manager.page_size)


def run_checked(runner: Runner, requests) -> dict[str, Finished]:
    box: deque = deque()
    for each in requests:
        runner.submit(each, box)
    while runner.has_unfinished_requests:
        runner.step(box)
        check_pages(runner)
    return {event.request_id: event for event in of(Finished, box)}


def model_drafts(runner: Runner, several: bool = False, **more) -> DraftModelProposer:
    call = CompiledDraftSteps(runner.model, runner.store, 5, more.get("confidence_threshold", 0.0)) if several else None
    return DraftModelProposer(
        runner.model.spec, runner.core.executor, runner.kv_cache.manager,
        runner.scheduler.limits.max_num_batched_tokens,
        multi_step=call, **more,
    )  # fmt: skip
