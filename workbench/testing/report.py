"""What a conformity kit found, law by law, in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Broken(AssertionError):
    """A law does not hold; the message says how."""


class Law(NamedTuple):
    """`ok` unless it was seen to be broken; one that was not tried, for the reason in `detail`, counts for nothing."""

    law: str
    ok: bool
    detail: str
    tried: bool = True

    @property
    def verdict(self) -> str:
        return "BROKEN" if not self.ok else "holds" if self.tried else "-"


@dataclass(frozen=True)
class Report:
    """`print` it, ask whether it `passed`, or call `raise_if_failed` in a test."""

    part: str
    laws: tuple[Law, ...]

    @property
    def passed(self) -> bool:
        return all(law.ok for law in self.laws)

    def raise_if_failed(self) -> None:
        """Raises AssertionError with the whole report when a law is broken."""
        if not self.passed:
            raise AssertionError(str(self))

    def __str__(self) -> str:
        tried = [law for law in self.laws if law.tried]
        rest = f", {left} not tried" if (left := len(self.laws) - len(tried)) else ""
        lines = [f"{self.part}: {sum(law.ok for law in tried)} of {len(tried)} laws hold{rest}"]
        lines += [f"  {law.verdict:6}  {law.law} ({law.detail})" for law in self.laws]
        return "\n".join(lines)
