"""List the features that each backend supports, in one table for `doctor`, errors, `auto` and the site.

It collects the `supports` of operators and programs, which are declared where a feature would be implemented. A feature
without a refusal in any of them is supported by every backend.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from compiled_kernels import Backend
from workbench.display import Table
from workbench.executors.programs import decode_step, eager, inductor, operators
from workbench.executors.requirements import FEATURES, Refusal, Requirements, Supports

# Roles of a backend: attention over the cache, all operators of the blocks, a decode step as one function, several
# draft steps in one call. Each includes the roles before it; only mlir has the last two.
Role = Literal["attention", "blocks", "step", "drafts"]
BLOCKS = {
    Backend.EAGER: eager.supports,
    Backend.INDUCTOR: inductor.supports,
    Backend.MLIR: operators.mlir_supports,
    Backend.TRITON: operators.triton_supports,
}
SUPPORTS: dict[Backend, dict[Role, Supports]] = {
    backend: {"attention": operators.within_attention(blocks), "blocks": blocks, "step": blocks, "drafts": blocks}
    for backend, blocks in BLOCKS.items()
}
SUPPORTS[Backend.MLIR] |= {"step": decode_step.supports, "drafts": decode_step.supports_drafts}
COLUMNS: dict[str, tuple[Backend, Role]] = {str(backend): (backend, "blocks") for backend in Backend}
COLUMNS |= {"mlir, whole step": (Backend.MLIR, "step"), "mlir, several draft steps": (Backend.MLIR, "drafts")}


def limits_of(feature: str) -> dict[str, str | None]:
    """Return, for each column of the table (see COLUMNS), the reason why it does not support a feature; None if it
    does.
    """
    return {column: SUPPORTS[backend][role].get(feature) for column, (backend, role) in COLUMNS.items()}


def capability_table() -> Table:
    """Return a table with a row for each feature and the columns COLUMNS: `yes`, or the number of a reason below the
    table.
    """
    return reasons_table({feature: limits_of(feature) for feature in FEATURES}, "What backends support", "feature")


def reasons_table(limits: Mapping[str, Mapping[str, str | None]], title: str, heading: str) -> Table:
    """Return a table of `limits`, a row for each name: `yes` for None, else the number of a reason below the table."""
    reasons = list(dict.fromkeys(reason for row in limits.values() for reason in row.values() if reason))
    rows = [
        [name, *(f"no ({reasons.index(reason) + 1})" if reason else "yes" for reason in row.values())]
        for name, row in limits.items()
    ]
    note = "\n".join(f"{number}. {reason}" for number, reason in enumerate(reasons, 1))
    return Table(title, rows, (heading, *next(iter(limits.values()))), note)


def unsupported(backend: Backend, requirements: Requirements, role: Role = "blocks") -> Refusal | None:
    """Return the reason why `backend` does not meet the requirements in this role; None if it does."""
    return SUPPORTS[backend][role](requirements)
