"""Try one law on many examples, equal in every call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis.strategies import SearchStrategy, tuples

from workbench.testing.report import LawBroken, Law

SHRINK_TRIES = 30
SUPPRESSED_CHECKS = (HealthCheck.nested_given, HealthCheck.too_slow, HealthCheck.differing_executors)


def check_law(law: str, check: Callable[..., None], examples: int, *drawn: SearchStrategy[Any]) -> Law:
    """Return the result of `law`: `check` is called with drawn values, and raises where the law is broken.

    A failing example is simplified in up to `SHRINK_TRIES` further tries.
    """
    tried = []
    faults: dict[str, Exception] = {}  # by the drawn values
    later = 0  # tries since the first fault

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        verbosity=Verbosity.quiet,
        report_multiple_bugs=False,
        suppress_health_check=SUPPRESSED_CHECKS,
        phases=(Phase.generate, Phase.shrink),
    )
    @given(tuples(*drawn))
    def hold(values: tuple[Any, ...]) -> None:
        nonlocal later
        tried.append(None)
        later += bool(faults)
        if later > SHRINK_TRIES:  # enough: a known failure stays the example
            if repr(values) in faults:
                raise faults[repr(values)]
            return
        try:
            check(*values)
        except Exception as error:
            faults[repr(values)] = error
            raise

    try:
        hold()
    except LawBroken as broken:
        return Law(law, False, str(broken))
    except Exception as error:  # errors of the part, and hypothesis's own where results are not deterministic
        return Law(law, False, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
    return Law(law, True, f"{len(tried)} examples")
