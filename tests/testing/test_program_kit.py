"""The kit for programs passes what computes as the modules do, and names the law that another breaks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import workbench
from tests.engine.tiny import Whole, finals, model_of, request, runner_of, spec_of
from tests.helpers.refusals import refuses
from workbench.parts import EagerProgram, StepPlan, TokenBatch
from workbench.testing import check_program


class Decodes(EagerProgram):
    """Compute decodes alone."""

    def accept(self, plan: StepPlan) -> StepPlan | None:
        return plan if plan.decode_only and not plan.layers else None


class Late(Decodes):
    """See positions that are off by one."""

    def __call__(self, batch: TokenBatch, layers: tuple[int, ...] = ()) -> torch.Tensor:
        batch.positions.add_(1)
        return super().__call__(batch, layers)


class Hot(EagerProgram):
    """Double the logits: greedy tokens stay."""

    def __call__(self, batch: TokenBatch, layers: tuple[int, ...] = ()) -> torch.Tensor:
        return 2 * super().__call__(batch, layers)


class Willing(EagerProgram):
    def accept(self, plan: StepPlan) -> Any:
        return True


class Reversed(EagerProgram):
    def accept(self, plan: StepPlan) -> StepPlan | None:
        return replace(plan, spans=plan.spans[::-1])


class InCalls(EagerProgram):
    every_row = True


class Never(EagerProgram):
    def accept(self, plan: StepPlan) -> StepPlan | None:
        return None


class Short(EagerProgram):
    def __call__(self, batch: TokenBatch, layers: tuple[int, ...] = ()) -> torch.Tensor:
        return super().__call__(batch, layers)[:, :-1]


class Failing(EagerProgram):
    def pack(self, plan: StepPlan) -> Any:
        raise KeyError("rows")


MODEL = model_of(spec_of())
for each in (Whole, Decodes, Late, Hot, Willing, Reversed, InCalls, Never, Short, Failing):
    workbench.register(f"program {each.__name__}")(each)


@pytest.mark.parametrize("name", ["Whole", "Decodes"])
def test_a_right_program_holds_every_law(name: str) -> None:
    check_program(f"program {name}", examples=2).raise_if_failed()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Late", "has another token"),
        ("Hot", "the log-probability of token 0 is"),
        ("Willing", "program program Willing: accept returned a bool, not a StepPlan or None"),
        ("Reversed", "program program Reversed: accept returned other tokens"),
        ("Never", "accepts no step"),
        ("Short", r"program program Short: returned \[\d+, \d+\], not logits"),
        ("Failing", "program program Failing: KeyError: 'rows'"),
    ],
)
def test_the_law_that_a_wrong_program_breaks_is_named(name: str, words: str) -> None:
    report = check_program({"path": f"program {name}"}, examples=1)
    assert not report.passed
    with pytest.raises(AssertionError, match=words):
        report.raise_if_failed()


def test_what_is_no_program_is_refused() -> None:
    workbench.register("no program")(print)
    refuses("calls and every_row are for programs of a backend", runner_of, MODEL, program="program InCalls")
    refuses("no program: must be a class that extends StepProgram", runner_of, MODEL, program="no program")


def test_steps_that_it_leaves_are_the_backends() -> None:
    asked = [request("a", 9, 5), request("b", 3, 7)]
    plain = finals(runner_of(MODEL), asked)
    assert finals(runner_of(MODEL, program="program Decodes"), asked) == plain
    runner = runner_of(MODEL, program={"path": "program Decodes"})
    own = runner.core.executor.programs["custom"]
    assert list(runner.core.executor.programs) == ["custom", "blocks"] and own.kernels(1).description
