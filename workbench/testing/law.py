"""Check a law on many examples, the same in every call, and report the results law by law."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis.strategies import SearchStrategy, tuples

SHRINK_TRIES = 30
SUPPRESSED_CHECKS = (HealthCheck.nested_given, HealthCheck.too_slow, HealthCheck.differing_executors)


class LawBroken(AssertionError):
    """Raised if a law does not hold; the message describes how."""


class Law(NamedTuple):
    """The result of checking one law: `ok` is False if an example broke the law.

    A law that was not `tried` does not count; `detail` has the reason.
    """

    law: str
    ok: bool
    detail: str
    tried: bool = True

    @property
    def verdict(self) -> str:
        return "BROKEN" if not self.ok else "holds" if self.tried else "-"


@dataclass(frozen=True)
class ConformityReport:
    """The results of all laws: print it, read `passed`, or call `raise_if_failed` in a test."""

    part: str
    laws: tuple[Law, ...]

    @property
    def passed(self) -> bool:
        return all(law.ok for law in self.laws)

    def raise_if_failed(self) -> None:
        """Raise AssertionError with the whole report if a law is broken."""
        if not self.passed:
            raise AssertionError(str(self))

    def __str__(self) -> str:
        tried = [law for law in self.laws if law.tried]
        rest = f", {left} not tried" if (left := len(self.laws) - len(tried)) else ""
        lines = [f"{self.part}: {sum(law.ok for law in tried)} of {len(tried)} laws hold{rest}"]
        lines += [f"  {law.verdict:6}  {law.law} ({law.detail})" for law in self.laws]
        return "\n".join(lines)


def check_law(law: str, check: Callable[..., None], examples: int, *drawn: SearchStrategy[Any]) -> Law:
    """Check `law` on drawn examples and return the result: `check` is called with drawn values, and raises if they
    break the law.

    A failing example is simplified in up to `SHRINK_TRIES` further tries.
    """
    tried = []
    faults: dict[str, Exception] = {}  # errors by drawn values
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
        if later > SHRINK_TRIES:  # stop simplifying: repeat only known failures
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
    except Exception as error:  # errors of the part, or of hypothesis for nondeterministic results
        return Law(law, False, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
    return Law(law, True, f"{len(tried)} examples")
