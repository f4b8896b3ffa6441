"""Fetch operators and their compilation stages on demand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from workbench.errors import WorkbenchError, describe_error

DEFAULT_STAGE = {"inductor": "post_grad", "mlir": "linalg", "triton": "source", "eager": "source"}  # where fusion shows best


@contextmanager
def as_workbench_error() -> Iterator[None]:
    """Raise errors of the kernels as WorkbenchError."""
    from compiled_kernels.backends import BackendError

    try:
        yield
    except BackendError as error:
        raise WorkbenchError(str(error)) from None


def validate_name(kind: str, word: str, words: Iterable[str]) -> str:
    from compiled_kernels.cases import require_known as require_known

    return require_known(kind, word, words)


def operator_names() -> list[str]:
    from compiled_kernels.cases import suites

    return [suite.operator for suite in suites()]


def case_names(operator: str) -> list[str]:
    """Return names of an operator's cases, timed ones first."""
    from compiled_kernels.cases import suite_of

    return [case.name for case in sorted(suite_of(operator).cases, key=lambda case: not case.timed)]


def case_name(operator: str, name: str | None) -> str:
    from compiled_kernels.cases import case_of, suite_of

    return case_of(suite_of(operator), name).name


def make_stages(operator: str, case: str, backend: str) -> Any:
    """Return the `Stages` of a backend, or as text the reason why it cannot make them here."""
    from compiled_kernels.cases import case_of, suite_of
    from compiled_kernels.backends import Backend
    from compiled_kernels.stages import stages_of

    suite = suite_of(operator)
    try:
        return stages_of(suite, None if backend == Backend.TRITON else case_of(suite, case), Backend(backend))
    except Exception as error:  # compilers raise many kinds; the other backends can still be shown
        return f"cannot be made here: {describe_error(error)}"


def fusion_data(made: Any) -> Mapping[str, Any] | None:
    stage = made.stages.get("fusion") if hasattr(made, "stages") else None
    return None if stage is None else stage.data


def default_stage(backend: str, texts: Mapping[str, str]) -> str:
    return DEFAULT_STAGE[backend] if DEFAULT_STAGE[backend] in texts else next(iter(texts))
