"""Check a program of one's own: what it computes is what the model's modules compute, whatever is in the batch.

The model is a demo model in float64 on the backend eager, so that only a wrong number makes a difference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from workbench.engine.runner import Runner
from workbench.executors.programs.custom import CustomProgram
from workbench.scheduler.plan import StepPlan
from workbench.speculative.config import NoSpeculation, PromptLookup, Speculation
from workbench.testing.law import ConformityReport, LawBroken, check_law
from workbench.testing.proposers import (
    PLENTY_OF_PAGES,
    SCARCE_PAGES,
    TEXTS,
    DraftScenario,
    plain_tokens,
    tokens_by_request,
)
from workbench.trace.events import Event


def _same_tokens(program: Any, speculate: Speculation, scenario: DraftScenario) -> None:
    events: list[Event] = []
    for _ in scenario.runner(speculate, events.append, program).stream(scenario.requests()):
        pass
    found, wanted = tokens_by_request(events, scenario), plain_tokens(scenario)
    for name, tokens in found.items():
        if tokens != wanted[name]:
            at = next(i for i, (a, b) in enumerate(zip(tokens, wanted[name], strict=True)) if a != b)
            raise LawBroken(f"{name} has another token {at} than by the model's modules, on {scenario}")


def _computes(program: Any, scenario: DraftScenario) -> None:
    runner = scenario.runner(NoSpeculation(), None, program)
    accepted = _accepted(runner)
    for _ in runner.stream(scenario.requests()):
        pass
    if not any(accepted):
        raise LawBroken(f"accepts no step, on {scenario}")


def _accepted(runner: Runner) -> list[bool]:
    """Return a list that grows by whether the program accepts each step."""
    found: list[bool] = []
    custom = runner.core.executor.programs[CustomProgram.kind]
    accept = custom.accept

    def noted(plan: StepPlan) -> StepPlan | None:
        rows = accept(plan)
        found.append(rows is not None)
        return rows

    custom.accept = noted  # type: ignore[method-assign] (of this runner alone)
    return found


LAWS: dict[str, tuple[Speculation, st.SearchStrategy[DraftScenario]]] = {
    "greedy tokens are those of the model's modules": (NoSpeculation(), PLENTY_OF_PAGES),
    "so they are where pages run out and sequences are preempted": (NoSpeculation(), SCARCE_PAGES),
    "so they are where drafts are verified": (PromptLookup(), PLENTY_OF_PAGES),
}
COMPUTES_LAW = "computes something"


def check_program(program: Any, examples: int = 6, model: str = "demo-draft") -> ConformityReport:
    """Try a program on small engines, and report law by law whether it holds.

    Args:
        program: a value of the setting `program`: a path (`mine.py:Program`), or a mapping with its path and arguments.
        examples: scenarios tried for each law, equal in every call.
        model: the smallest of the demo models unless given.

    Raises:
        WorkbenchError: it cannot be found or built.
    """
    everything = DraftScenario(tuple(range(len(TEXTS))), 24, 64, model)
    everything.runner(NoSpeculation(), None, program)  # the one clear error, if it cannot be built

    def tried(speculate: Speculation) -> Callable[[DraftScenario], None]:
        return lambda scenario: _same_tokens(program, speculate, replace(scenario, model=model))

    laws = [check_law(law, tried(speculate), examples, drawn) for law, (speculate, drawn) in LAWS.items()]
    laws.append(check_law(COMPUTES_LAW, lambda scenario: _computes(program, scenario), 1, st.just(everything)))
    name = program["path"] if isinstance(program, dict) else getattr(program, "path", program)
    return ConformityReport(f"program {name}", tuple(laws))
