"""Choose the tokens whose keys and values stay when a sequence may hold only so many.

A policy chooses for each layer and each key/value head, by the attention that a token has received from the query heads
that share it, or by position alone. All policies have the same budget and evict at the same positions of the text (see
budget.py), so they can be compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from pydantic import Field, TypeAdapter, ValidatorFunctionWrapHandler, WrapValidator, model_validator
from torch import Tensor

from workbench.errors import WorkbenchError
from workbench.kv_cache.budget import MIN_TOKENS, EvictionBudget
from workbench.settings import Settings, parse_setting

PREFIX_LAW = "a warm prefix = a cold one"
FULL_ATTENTION_LAW = "every query sees all tokens before it"


@runtime_checkable
class EvictionPolicy(Protocol):
    """An eviction policy: a value that chooses the tokens to keep. The same attention mass gives the same choice."""

    @property
    def gives_up(self) -> frozenset[str]:
        """Name the laws that do not hold under it; pages of its sequences are never shared."""
        ...

    @property
    def observes(self) -> int | None:
        """Return how many of the prompt's last queries count: 0 for none, None for all, those of decodes too."""
        ...

    def budget_for(self, page_size: int, page_bytes: int) -> EvictionBudget:
        """Return the budget for a cache whose pages of `page_size` tokens take `page_bytes` in all layers together."""
        ...

    def select(self, mass: Float[Tensor, " slot"], budget: int) -> Int[Tensor, " kept"]:
        """Return the slots to keep, ascending: min(budget, slots) of them, the newest among them.

        Args:
            mass: attention that each slot's token has received in one layer, [slot]. It is summed over the query heads
                that share a key/value head and over the queries that count. Slots are in text order.
            budget: the number of slots to keep.
        """
        ...


class EvictionSettings(Settings):
    """A budget as `budget` tokens, `bytes` of all layers' pages together, or a `ratio` of the prompt: exactly one of
    them."""

    budget: Annotated[int, Field(ge=MIN_TOKENS)] | None = None
    bytes: Annotated[int, Field(ge=1)] | None = None
    ratio: Annotated[float, Field(gt=0, le=1)] | None = None

    gives_up: ClassVar[frozenset[str]] = frozenset({PREFIX_LAW, FULL_ATTENTION_LAW})
    observes: ClassVar[int | None] = 0

    @model_validator(mode="after")
    def _one_budget(self) -> EvictionSettings:
        given = [name for name in ("budget", "bytes", "ratio") if getattr(self, name) is not None]
        if len(given) != 1:
            message = f"{' and '.join(given)} were given" if given else "none was given"
            raise ValueError(f"give exactly one of budget (tokens), bytes and ratio (of the prompt); {message}")
        return self

    def budget_for(self, page_size: int, page_bytes: int) -> EvictionBudget:
        if self.bytes is None:
            return self._budget(self.budget)
        if self.bytes < page_bytes:
            raise WorkbenchError(
                f"cache.evict.bytes {self.bytes:,}: a page of {page_size} tokens takes {page_bytes:,} in all layers; "
                "give at least so many, or lower cache.page_size"
            )
        return self._budget(self.bytes // page_bytes * page_size)

    def _budget(self, tokens: int | None) -> EvictionBudget:
        return EvictionBudget(tokens, self.ratio, in_decode=False)


class _Always(EvictionSettings):
    """A policy that holds its budget at all times.

    Every `block` tokens (an eighth of the budget unless given, at most half) as many are evicted, so a sequence holds
    between budget - block and budget tokens.
    """

    block: Annotated[int, Field(ge=1)] | None = None

    def _budget(self, tokens: int | None) -> EvictionBudget:
        return EvictionBudget(tokens, self.ratio, self.block)


class SlidingWindowEviction(_Always):
    """Keep the newest tokens. Unlike the attention setting `window`, this concerns the cache alone."""

    kind: Literal["window"] = "window"

    def select(self, mass: Tensor, budget: int) -> Tensor:
        return select_recent_and_heaviest(mass, budget, budget)


class SinksRecent(_Always):
    """StreamingLLM (Xiao et al., 2023): keep the first `num_sink_tokens` tokens and the newest.

    Positions stay those of the text; the paper renumbers them.
    """

    kind: Literal["sinks_recent"] = "sinks_recent"
    num_sink_tokens: Annotated[int, Field(ge=1)] = 4

    def select(self, mass: Tensor, budget: int) -> Tensor:
        recent = max(1, budget - self.num_sink_tokens)
        return select_recent_and_heaviest(torch.zeros_like(mass), budget, recent)


class HeavyHitters(_Always):
    """H2O (Zhang et al., 2023): keep the newest tokens, and of the others those that received most attention."""

    kind: Literal["heavy_hitters"] = "heavy_hitters"
    recent: Annotated[float, Field(gt=0, le=1)] = 0.5  # fraction of the budget for the newest tokens

    observes: ClassVar[int | None] = None

    def select(self, mass: Tensor, budget: int) -> Tensor:
        return select_recent_and_heaviest(mass, budget, max(1, round(self.recent * budget)))


class SnapKV(EvictionSettings):
    """SnapKV (Li et al., 2024): evict once, after the prompt, by the smoothed attention of its last queries; keep all
    output."""

    kind: Literal["snapkv"] = "snapkv"
    observe: Annotated[int, Field(ge=1)] = 32  # queries at the prompt's end whose attention counts; their tokens stay
    pool: Annotated[int, Field(ge=1)] = 7  # attention is averaged over this many neighbours (pool // 2 on either side)

    @property
    def observes(self) -> int:
        return self.observe

    def select(self, mass: Tensor, budget: int) -> Tensor:
        reach = self.pool // 2
        padded = torch.nn.functional.pad(mass[None, None], (reach, reach))
        smooth = torch.nn.functional.avg_pool1d(padded, 2 * reach + 1, stride=1)[0, 0]
        return select_recent_and_heaviest(smooth, budget, min(self.observe, budget))


def _validate(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """Accept a policy of one's own as it is."""
    return value if isinstance(value, EvictionPolicy) else validate(value)


EvictionSetting = Annotated[
    Annotated[SlidingWindowEviction | SinksRecent | HeavyHitters | SnapKV, Field(discriminator="kind")],
    WrapValidator(_validate),
]
_EVICT: TypeAdapter[Any] = TypeAdapter(EvictionSetting | None)


def parse_eviction(value: Mapping[str, Any] | EvictionPolicy | None) -> EvictionPolicy | None:
    """Parse an eviction policy: settings such as `{"kind": "snapkv", "budget": 256}`, a user-defined
    policy, or None."""
    return parse_setting(_EVICT, value, "evict", "for example {kind: heavy_hitters, budget: 256}")


def select_recent_and_heaviest(mass: Tensor, budget: int, newest: int) -> Tensor:
    """Select the last `newest` slots, and the rest of the budget by mass; of equal ones the older."""
    slots = len(mass)
    if slots <= budget:
        return torch.arange(slots, device=mass.device)
    older = slots - newest
    order = mass[:older].sort(descending=True, stable=True).indices[: budget - newest]
    return torch.cat([order.sort().values, torch.arange(older, slots, device=mass.device)])
