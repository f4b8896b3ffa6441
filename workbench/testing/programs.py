"""Check a user-defined program: for any batch it must compute the same results as the model's modules.

The model is a demo model in float64 on the backend eager, so that differences mean errors, not rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from workbench.engine.runner import Runner
from workbench.executors.programs.custom import CustomProgram
from workbench.scheduler.plan import StepPlan
from workbench.speculative.config import NoSpeculation, PromptLookup, Speculation
from workbench.testing.law import ConformityReport, LawBroken, check_law
from workbench.testing.proposers import PLENTY_OF_PAGES, SCARCE_PAGES, TEXTS, DraftScenario
from workbench.trace.events import Decoded, Finished

MAX_ERROR = 1e-6  # of log-probabilities in float64: far above rounding, far below the effect of a wrong model

Answers = dict[str, list[tuple[int, float]]]  # tokens and their log-probabilities by request


def _answers(runner: Runner, scenario: DraftScenario) -> Answers:
    found: Answers = {}
    asked = [replace(each, sampling=each.sampling.model_copy(update={"logprobs": 0})) for each in scenario.requests()]
    for event in runner.stream(asked):
        if isinstance(event, Decoded) and event.logprob is not None:
            found.setdefault(event.request_id, []).append((event.token_id, event.logprob))
        elif isinstance(event, Finished) and event.reason != "length":
            raise LawBroken(f"{event.request_id} ended: {event.error or event.reason}, on {scenario}")
    return found


@functools.lru_cache(maxsize=256)
def _plain(scenario: DraftScenario) -> Answers:
    return _answers(scenario.runner(NoSpeculation()), scenario)


def _compare(found: Answers, scenario: DraftScenario) -> None:
    for name, wanted in _plain(scenario).items():
        for at, ((token, logprob), (plain, exact)) in enumerate(zip(found[name], wanted, strict=True)):
            if token != plain:
                raise LawBroken(f"{name} has another token {at} than by the model's modules, on {scenario}")
            if abs(logprob - exact) > MAX_ERROR:
                raise LawBroken(
                    f"{name}: the log-probability of token {at} is {logprob:.6f}, and {exact:.6f} by the model's "
                    f"modules, on {scenario}"
                )


def _same_answers(program: Any, speculate: Speculation, scenario: DraftScenario) -> None:
    _compare(_answers(scenario.runner(speculate, None, program), scenario), scenario)


def _computes(program: Any, scenario: DraftScenario) -> None:
    runner = scenario.runner(NoSpeculation(), None, program)
    accepted = _accepted(runner)
    _compare(_answers(runner, scenario), scenario)
    if fault := next((each for each in accepted if isinstance(each, Exception)), None):
        raise LawBroken(f"{fault}, on {scenario}")  # after the error its spans were computed one by one
    if not any(accepted):
        raise LawBroken(f"accepts no step of these, on {scenario}")


def _accepted(runner: Runner) -> list[bool | Exception]:
    """Return a list to which each step appends whether the program accepted it, or the program's error."""
    found: list[bool | Exception] = []
    custom = runner.core.executor.programs[CustomProgram.kind]
    accept = custom.accept

    def noted(plan: StepPlan) -> StepPlan | None:
        try:
            rows = accept(plan)
        except Exception as error:
            found.append(error)
            raise
        found.append(rows is not None)
        return rows

    custom.accept = noted  # type: ignore[method-assign] (of this runner alone)
    return found


LAWS: dict[str, tuple[Speculation, st.SearchStrategy[DraftScenario]]] = {
    "greedy tokens and their log-probabilities are those of the model's modules": (NoSpeculation(), PLENTY_OF_PAGES),
    "they are the same when pages run out and sequences are preempted": (NoSpeculation(), SCARCE_PAGES),
    "they are the same when drafts are verified": (PromptLookup(), PLENTY_OF_PAGES),
}
COMPUTES_LAW = "accepts a step with several requests, and computes it correctly"


def check_program(program: Any, examples: int = 6, model: str = "demo-draft") -> ConformityReport:
    """Try a program on small engines, and report for each law whether it holds.

    Args:
        program: a value of the setting `program`: a path (`mine.py:Program`), or a mapping with its path and arguments.
        examples: number of scenarios tried for each law, the same in every call.
        model: name of the model (default: the smallest demo model).

    Raises:
        WorkbenchError: if it cannot be found or built.
    """
    everything = DraftScenario(tuple(range(len(TEXTS))), 24, 64, model)
    everything.runner(NoSpeculation(), None, program)  # raises a clear error if it cannot be built

    def tried(speculate: Speculation) -> Callable[[DraftScenario], None]:
        return lambda scenario: _same_answers(program, speculate, replace(scenario, model=model))

    laws = [check_law(law, tried(speculate), examples, drawn) for law, (speculate, drawn) in LAWS.items()]
    laws.append(check_law(COMPUTES_LAW, lambda scenario: _computes(program, scenario), 1, st.just(everything)))
    name = program["path"] if isinstance(program, dict) else getattr(program, "path", program)
    return ConformityReport(f"program {name}", tuple(laws))
