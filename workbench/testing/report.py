"""Results of a conformity kit, law by law."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class LawBroken(AssertionError):
    """Raised where a law does not hold; the message says how."""


class Law(NamedTuple):
    """The result of one law: `ok` unless it was seen to be broken.

    A law that was not `tried`, for the reason in `detail`, does not count.
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
        """Raise AssertionError with the whole report where a law is broken."""
        if not self.passed:
            raise AssertionError(str(self))

    def __str__(self) -> str:
        tried = [law for law in self.laws if law.tried]
        rest = f", {left} not tried" if (left := len(self.laws) - len(tried)) else ""
        lines = [f"{self.part}: {sum(law.ok for law in tried)} of {len(tried)} laws hold{rest}"]
        lines += [f"  {law.verdict:6}  {law.law} ({law.detail})" for law in self.laws]
        return "\n".join(lines)
