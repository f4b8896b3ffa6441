"""A report of the torch.compile backend: the subgraphs it took, those it left, and the reasons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from inspect import isbuiltin
from typing import Any


@dataclass(frozen=True)
class Subgraph:
    """Operations of graph number `graph`, compiled here (`taken`, by the artifact `digest`) or left to `fallback`."""

    graph: int
    taken: bool
    operations: tuple[str, ...]
    fallback: str
    reason: str
    digest: str = ""

    def __str__(self) -> str:
        what = ", ".join(f"{self.operations.count(name)} {name}" for name in dict.fromkeys(self.operations))
        verb = f"taken ({self.digest[:12]})" if self.taken else f"left to {self.fallback}"
        return f"graph {self.graph}: {verb}: {what or 'nothing'}" + (f": {self.reason}" if self.reason else "")


@dataclass(frozen=True)
class CompileReport:
    """Subgraphs in the order in which their graphs were compiled."""

    subgraphs: tuple[Subgraph, ...]

    @property
    def taken(self) -> tuple[Subgraph, ...]:
        return tuple(each for each in self.subgraphs if each.taken)

    @property
    def left(self) -> tuple[Subgraph, ...]:
        return tuple(each for each in self.subgraphs if not each.taken)

    def data(self) -> list[dict[str, Any]]:
        return [asdict(each) for each in self.subgraphs]

    def __str__(self) -> str:
        return "\n".join(str(each) for each in self.subgraphs) or "no graph was compiled yet"


def short_names(operations: Sequence[Any]) -> tuple[str, ...]:
    """Return short names of operations: `add.Tensor`."""
    plain = (each.__name__ if isbuiltin(each) else str(each) for each in operations)
    return tuple(name.removeprefix("aten.").removeprefix("prims.") for name in plain)
