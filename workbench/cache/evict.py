"""Which tokens' keys and values stay when a sequence may hold only so many: policies that look at attention.

A window, or sinks and a window, need no policy: they are attention values (`window`, `sinks`) and keep every law. The
policies here choose by how much attention a token has received, layer by layer, and give laws up for it.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Protocol

import torch
from jaxtyping import Float, Int
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

CHUNKED = "chunked = whole"
PREFIX = "prefix reuse"
FULL = "full context in sight"


class Evict(Protocol):
    """Chooses what stays. A policy is a value: the same mass gives the same choice."""

    @property
    def gives_up(self) -> frozenset[str]:
        """Names of the laws that do not hold under it."""
        ...

    @property
    def observes(self) -> int | None:
        """How many of a step's last queries' attention counts; None: of all."""
        ...

    @property
    def in_decode(self) -> bool:
        """Whether it goes on evicting while a sequence decodes."""
        ...

    def keep(self, mass: Float[Tensor, " slot"], budget: int) -> Int[Tensor, " kept"]:
        """The slots that stay, ascending: min(budget, slots) of them, the newest among them.

        `mass` is the attention each slot's token has received so far, summed over heads and queries; slots are in the
        order of the text.
        """
        ...


class _Policy(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    gives_up: ClassVar[frozenset[str]] = frozenset({CHUNKED, PREFIX, FULL})


class HeavyHitters(_Policy):
    """H2O (Zhang et al., 2023): the newest tokens, and of the others those that received most attention."""

    kind: Literal["heavy_hitters"] = "heavy_hitters"
    budget: Annotated[int, Field(ge=2)]
    recent: Annotated[float, Field(gt=0, le=1)] = 0.5  # share of the budget that the newest tokens have

    observes: ClassVar[int | None] = None
    in_decode: ClassVar[bool] = True

    def keep(self, mass: Tensor, budget: int) -> Tensor:
        return _newest_and_heaviest(mass, budget, max(1, round(self.recent * budget)))


class SnapKV(_Policy):
    """SnapKV (Li et al., 2024): once, when the prompt is computed, what its last queries look at, smoothed over
    neighbours; what is generated stays."""

    kind: Literal["snapkv"] = "snapkv"
    budget: Annotated[int, Field(ge=2)]
    observe: Annotated[int, Field(ge=1)] = 32  # queries at the prompt's end that vote, and stay themselves
    pool: Annotated[int, Field(ge=1)] = 7  # votes are averaged over this many neighbours (pool // 2 on either side)

    in_decode: ClassVar[bool] = False

    @property
    def observes(self) -> int:
        return self.observe

    def keep(self, mass: Tensor, budget: int) -> Tensor:
        reach = self.pool // 2
        padded = torch.nn.functional.pad(mass[None, None], (reach, reach))
        smooth = torch.nn.functional.avg_pool1d(padded, 2 * reach + 1, stride=1)[0, 0]
        return _newest_and_heaviest(smooth, budget, min(self.observe, budget))


EvictPart = Annotated[HeavyHitters | SnapKV, Field(discriminator="kind")]


def _newest_and_heaviest(mass: Tensor, budget: int, newest: int) -> Tensor:
    """`newest` slots at the end, and the rest of the budget by mass; of equal ones the older."""
    slots = len(mass)
    if slots <= budget:
        return torch.arange(slots)
    older = slots - newest
    order = mass[:older].sort(descending=True, stable=True).indices[: budget - newest]
    return torch.cat([order.sort().values, torch.arange(older, slots)])
