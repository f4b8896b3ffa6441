"""Record a request's logits, bit for bit, at every computed position."""

from __future__ import annotations

import random
from dataclasses import replace

import torch
from torch import Tensor

from tests.engine.tiny import Objection, runner_of
from tests.helpers.recorded import Around
from workbench.engine.runner import Runner, generate
from workbench.executors.programs.rows import RowsProgram
from workbench.executors.step_runner import StepRunner
from workbench.model.transformer import Transformer
from workbench.request import Request, SamplingParameters, random_token_ids
from workbench.scheduler.plan import StepPlan

Rows = dict[int, Tensor]  # by position


class Scribe(Around):
    """Stands in for a runner's executor and asks for the logits of every token of a step."""

    def __init__(self, runner: Runner):
        super().__init__(runner)
        self.rows: dict[str, Rows] = {}

    def forward(self, plan: StepPlan) -> Tensor:
        try:
            logits = self.inner.forward(
                replace(plan, spans=tuple(span._replace(requested_logits=span.length) for span in plan.spans))
            )
        except Exception as error:  # the runner would end the requests with it, and the test would go on
            raise Objection(f"the step failed: {type(error).__name__}: {error}") from error
        last, taken = [], 0
        for span in plan.spans:
            rows = logits[taken : taken + span.length].clone()
            taken += span.length
            mine = self.rows.setdefault(span.sequence.request_id, {})
            mine |= dict(zip(range(span.start, span.end), rows, strict=True))
            last += [rows[-1]] if span.needs_sample else []
        return torch.stack(last) if last else logits[:0]


def asked(name: str, prompt: int, most: int, vocab: int, shared: int = 0) -> Request:
    """`shared` tokens that all such requests begin with, then `prompt` of its own."""
    beginning = random_token_ids(random.Random(shared), vocab, shared)
    ids = beginning + random_token_ids(random.Random(name), vocab, prompt)
    return Request(name, ids, SamplingParameters(max_tokens=most, ignore_eos=True, temperature=0))


def served(model: Transformer, *turns: list[Request], buckets: tuple[int, ...] = (), **settings) -> dict[str, Rows]:
    """The rows of all requests, one list of them after another, on one runner whose cache begins as NaN; with `buckets`
    under `batch_invariant`."""
    runner = runner_of(model, **settings)
    if buckets:
        runner.core.executor = StepRunner(RowsProgram(model, runner.store, buckets))
    scribe = Scribe(runner)
    for requests in turns:
        ends = generate(runner, requests)
        broken = {name: end.error for name, end in ends.items() if end.reason != "length" and "NaN" not in end.error}
        assert not broken, broken
    return scribe.rows


def differing(ours: Rows, theirs: Rows) -> list[int]:
    """Positions computed in both whose logits differ in any bit."""
    both = ours.keys() & theirs.keys()
    assert both, "nothing was computed in both"
    return sorted(at for at in both if not torch.equal(ours[at], theirs[at]))
