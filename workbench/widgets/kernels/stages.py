"""Fetch operators and their compilation stages on demand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from workbench.errors import WorkbenchError, in_words

FIRST = {"inductor": "post_grad", "mlir": "linalg", "triton": "source", "eager": "source"}  # where fusion shows best


@contextmanager
def told() -> Iterator[None]:
    """Raise errors of the kernels as WorkbenchError."""
    from compiled_kernels.lanes import LaneError

    try:
        yield
    except LaneError as error:
        raise WorkbenchError(str(error)) from None


def known(kind: str, word: str, words: Iterable[str]) -> str:
    from compiled_kernels.cases import known as chosen

    return chosen(kind, word, words)


def operators() -> list[str]:
    from compiled_kernels.cases import suites

    return [suite.operator for suite in suites()]


def cases(operator: str) -> list[str]:
    """Return names of an operator's cases, timed ones first."""
    from compiled_kernels.cases import suite_of

    return [case.name for case in sorted(suite_of(operator).cases, key=lambda case: not case.timed)]


def case_name(operator: str, name: str | None) -> str:
    from compiled_kernels.cases import case_of, suite_of

    return case_of(suite_of(operator), name).name


def stages(operator: str, case: str, lane: str) -> Any:
    """Return the `Stages` of a backend, or as text the reason why it cannot make them here."""
    from compiled_kernels.cases import case_of, suite_of
    from compiled_kernels.lanes import Lane
    from compiled_kernels.stages import stages_of

    suite = suite_of(operator)
    try:
        return stages_of(suite, None if lane == Lane.TRITON else case_of(suite, case), Lane(lane))
    except Exception as error:  # compilers raise many kinds; the other lanes can still be shown
        return f"cannot be made here: {in_words(error)}"


def fusion(made: Any) -> Mapping[str, Any] | None:
    stage = made.stages.get("fusion") if hasattr(made, "stages") else None
    return None if stage is None else stage.data


def first(lane: str, texts: Mapping[str, str]) -> str:
    return FIRST[lane] if FIRST[lane] in texts else next(iter(texts))
