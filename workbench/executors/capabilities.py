"""The table of what each backend carries out. `doctor`, errors, `auto` and docs/reference/backends.md read it.

It lists the `supports` of operators and programs, each of which stands beside what would have to carry a feature out. A
feature without a reason in any of them is carried out by every backend.
"""

from __future__ import annotations

from typing import Literal

from compiled_kernels import Backend
from workbench.display import Table
from workbench.executors.programs import decode_step, eager, inductor, operators
from workbench.executors.requirements import FEATURES, Refusal, Requirements, Supports

# What a backend does: attention over the cache, all operators of the blocks, a decode step as one function, or several
# such steps that draft tokens in one call. Each includes those before it; only mlir has the last two.
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
    """Return the reason why each of COLUMNS does not carry out a feature; None where it does."""
    return {column: SUPPORTS[backend][role].get(feature) for column, (backend, role) in COLUMNS.items()}


def capability_table() -> Table:
    """Return a table of features by COLUMNS: `yes`, or the number of a reason below it."""
    limits = {feature: limits_of(feature) for feature in FEATURES}
    reasons = list(dict.fromkeys(reason for row in limits.values() for reason in row.values() if reason))
    rows = [
        [feature, *(f"no ({reasons.index(reason) + 1})" if reason else "yes" for reason in row.values())]
        for feature, row in limits.items()
    ]
    note = "\n".join(f"{number}. {reason}" for number, reason in enumerate(reasons, 1))
    return Table("What backends carry out", rows, ("feature", *COLUMNS), note)


def unsupported(backend: Backend, requirements: Requirements, role: Role = "blocks") -> Refusal | None:
    """Return why `backend` cannot do all that is required in this role; None if it can."""
    return SUPPORTS[backend][role](requirements)
