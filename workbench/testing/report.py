"""What a conformity kit found, law by law, in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Broken(AssertionError):
    """A law does not hold; the message says how."""


class Law(NamedTuple):
    law: str
    ok: bool
    detail: str


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
        held = sum(law.ok for law in self.laws)
        lines = [f"{self.part}: {held} of {len(self.laws)} laws hold"]
        lines += [f"  {'holds ' if law.ok else 'BROKEN'}  {law.law} ({law.detail})" for law in self.laws]
        return "\n".join(lines)
