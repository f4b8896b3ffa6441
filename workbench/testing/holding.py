"""Trying one law on many examples, the same ones every time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis.strategies import SearchStrategy, tuples

from workbench.testing.report import Broken, Law

SIMPLER = 30
HEALTH = (HealthCheck.nested_given, HealthCheck.too_slow, HealthCheck.differing_executors)


def held(law: str, check: Callable[..., None], examples: int, *drawn: SearchStrategy[Any]) -> Law:
    """The verdict on `law`: `check` is called with what is drawn, and raises where the law is broken. What broke it is
    made simpler in `SIMPLER` further tries."""
    tried = []
    faults: dict[str, Exception] = {}  # by what was drawn
    later = 0  # tries since the first of them

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        verbosity=Verbosity.quiet,
        report_multiple_bugs=False,
        suppress_health_check=HEALTH,
        phases=(Phase.generate, Phase.shrink),
    )
    @given(tuples(*drawn))
    def hold(values: tuple[Any, ...]) -> None:
        nonlocal later
        tried.append(None)
        later += bool(faults)
        if later > SIMPLER:  # enough: what is known to break it stays the example
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
    except Broken as broken:
        return Law(law, False, str(broken))
    except Exception as error:  # whatever a part raises, and hypothesis where it answers differently each time
        return Law(law, False, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
    return Law(law, True, f"{len(tried)} examples")
