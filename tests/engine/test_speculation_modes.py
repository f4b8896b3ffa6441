"""Speculation under every policy and under `batch_invariant`: the same tokens, and there the same bits."""

from __future__ import annotations

import torch

from tests.engine.guesses import Guesses, drafts, needs_mlir, run_checked, tokens
from tests.engine.tiny import layer, model_of, request, runner_of, spec_of
from tests.helpers.recorded import Around
from workbench.engine.runner import Runner
from workbench.executors.programs.rows import RowsProgram
from workbench.executors.step_runner import StepRunner
from workbench.scheduler.plan import StepPlan

MODEL = model_of(spec_of(layer(4, 2), layer(4, 2, sliding_window=9)))
ASKED = [request(f"r{i}", 3 + 5 * i, 6 + 3 * (i % 3)) for i in range(5)]


class Bits(Around):
    """Keeps, for each request, the logits after each text that was known or drafted, and asserts that they have the
    same bits every time."""

    def __init__(self, runner: Runner, known: dict | None = None):
        super().__init__(runner)
        self.known = {} if known is None else known
        self.met = self.drafted = 0
        self.differing: list[tuple] = []

    def forward(self, plan: StepPlan) -> torch.Tensor:
        logits = self.inner.forward(plan)
        rows = iter(logits.clone())
        for span in plan.spans:
            for place in range(len(span.draft_token_ids) + 1) if span.needs_sample else ():
                text = (*span.sequence.token_ids, *span.draft_token_ids[:place])
                row = next(rows)
                self.drafted += place > 0
                if text in self.known:
                    self.met += 1
                    self.differing += [] if torch.equal(self.known[text], row) else [text]
                self.known.setdefault(text, row)
        return logits


def invariant_runner(**more) -> Runner:
    runner = runner_of(MODEL, prefix="radix", **more)
    runner.core.executor = StepRunner(RowsProgram(MODEL, runner.store, (1, 3, 8)))
    return runner


@needs_mlir
def test_checks_have_the_bits_of_single_tokens_under_batch_invariant() -> None:
    """Each row of a check is bit for bit that of a run without drafts, alone; and so are the outputs."""
    alone: dict = {}
    single = {}
    for each in ASKED:
        runner = invariant_runner(pages=80)
        Bits(runner, alone)
        single |= tokens(run_checked(runner, [each]))
    for right, pages, budget in ((0.8, 80, 16), (0.5, 24, 7)):
        runner = invariant_runner(
            pages=pages, max_num_batched_tokens=budget, policy="shortest_prompt",
            speculator=drafts(Guesses({name: end[0] for name, end in single.items()}, 1, right)),
        )  # fmt: skip
        bits = Bits(runner, dict(alone))
        assert tokens(run_checked(runner, ASKED)) == single
        assert bits.drafted and bits.met >= sum(len(end[0]) for end in single.values()) and bits.differing == []
