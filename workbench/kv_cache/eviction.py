"""Choose the tokens that stay in the cache when a sequence exceeds its budget.

A policy chooses for each layer and key/value head, by the attention that a token has received from the head's queries,
or by position alone. All policies have the same budget and evict at the same positions of the text (see budget.py), so
they can be compared.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Protocol, cast, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field, TypeAdapter, ValidatorFunctionWrapHandler, WrapValidator, model_validator
from torch import Tensor

from workbench.custom import load_custom
from workbench.errors import WorkbenchError
from workbench.kv_cache.budget import MIN_TOKENS, EvictionBudget
from workbench.request import CustomPart
from workbench.settings import Settings, parse_setting

PREFIX_LAW = "a warm prefix = a cold one"
FULL_ATTENTION_LAW = "every query sees all tokens before it"


class LayerTokens:
    """The tokens that one layer holds of one sequence, by key/value head and slot; slots are in text order.

    Attributes:
        layer: the number of the layer, among the `num_layers` with own keys and values.
        mass: attention that each token has received, [kv_head, slot], in float64: summed over the query heads that
            share a key/value head and over the queries that count (see `EvictionPolicy`).
        slots: the maximum number of tokens that a head may keep.
    """

    def __init__(
        self, layer: int, num_layers: int, mass: Tensor, slots: int, read: Callable[[], tuple[Tensor, Tensor]]
    ):
        self.layer, self.num_layers, self.mass, self.slots = layer, num_layers, mass, slots
        self._read = read

    @functools.cached_property
    def _keys_values(self) -> tuple[Tensor, Tensor]:
        return self._read()

    @property
    def keys(self) -> Float[Tensor, "kv_head slot head_dim"]:
        """Return the keys as attention reads them: after rotary and after the loss of the cache format."""
        return self._keys_values[0]

    @property
    def values(self) -> Float[Tensor, "kv_head slot head_dim"]:
        """Return the values as attention reads them."""
        return self._keys_values[1]


class _Evicts(Protocol):
    """The common part of all eviction policies: see `EvictionPolicy`."""

    @property
    def gives_up(self) -> frozenset[str]:
        """Name the laws that do not hold under this policy; pages of its sequences are never shared."""
        ...

    @property
    def observes(self) -> int | None:
        """Return the number of queries at the prompt's end that count: 0 for none, None for all, decodes included."""
        ...

    def budget_for(self, page_size: int, page_bytes: int) -> EvictionBudget:
        """Return the budget for a cache whose pages of `page_size` tokens take `page_bytes` in all layers together."""
        ...


@runtime_checkable
class EvictionPolicy(_Evicts, Protocol):
    """An eviction policy: it chooses the tokens to keep by the attention mass that they have received. The same mass
    always gives the same choice.

    Each query that counts multiplies the earlier mass by an attribute `decay` (default 1); 0: only the last query
    counts.
    """

    def select(self, mass: Float[Tensor, " slot"], budget: int) -> Int[Tensor, " kept"]:
        """Return the slots to keep, ascending: min(budget, slots) of them, the newest among them.

        Args:
            mass: attention that each slot's token has received in one layer, [slot]. It is summed over the query heads
                that share a key/value head and over the queries that count. Slots are in text order.
            budget: the number of slots to keep.
        """
        ...


@runtime_checkable
class LayerEvictionPolicy(_Evicts, Protocol):
    """An eviction policy that sees all heads of a layer, with keys and values; in other respects like `EvictionPolicy`.

    An attribute `spread` above 1 lets heads and layers keep different numbers of tokens (see `EvictionBudget`). An
    optional method `merge(layer, keep)` returns keys and values, each [kv_head, slot, head_dim], and those of kept
    slots are stored: it may merge evicted tokens into kept ones.
    """

    def select_layer(self, layer: LayerTokens, budget: int) -> Bool[Tensor, "kv_head slot"]:
        """Return a boolean for each head and slot: whether the head keeps the slot's token. The newest token is always
        kept.

        Each head keeps `budget` tokens. With a `spread` heads share the budget of all layers: each keeps at most
        `layer.slots`, and all together at most `budget` on average.
        """
        ...


def policy_spread(policy: AnyPolicy) -> float:
    """Return how many times its budget one head may keep at most; above 1 if heads keep different numbers of tokens."""
    return float(getattr(policy, "spread", 1.0))


def select_slots(policy: AnyPolicy, layer: LayerTokens, budget: int) -> Bool[Tensor, "kv_head slot"]:
    """Return a boolean for each head and slot of a layer: whether the head keeps the slot's token.

    Raises:
        WorkbenchError: the policy keeps too many or too few tokens, or evicts the newest.
    """
    heads, held = layer.mass.shape
    if isinstance(policy, LayerEvictionPolicy):
        keep = policy.select_layer(layer, budget)
        if keep.shape != layer.mass.shape or keep.dtype != torch.bool:
            what = f"{tuple(keep.shape)} {str(keep.dtype).removeprefix('torch.')}"
            message = f"select_layer gave {what}, not {(heads, held)} bool (which slots each head keeps)"
            raise WorkbenchError(f"cache.evict: {policy!r} {message}")
        counts = keep.sum(1).tolist()
    else:
        keep, counts = torch.zeros_like(layer.mass, dtype=torch.bool), []
        for row, mass in zip(keep, layer.mass, strict=True):
            slots = cast(EvictionPolicy, policy).select(mass, budget)
            row[slots] = True
            counts.append(len(slots))
    even = policy_spread(policy) == 1
    for count in counts:
        if count != budget if even else not 1 <= count <= layer.slots:
            wanted = f"not {budget}" if even else f"where a head may keep 1 to {layer.slots}"
            raise WorkbenchError(f"cache.evict: {policy!r} kept {count} of {held} tokens, {wanted}")
    if not bool(keep[:, -1].all()):
        raise WorkbenchError(f"cache.evict: {policy!r} evicted the newest token, which must stay")
    return keep


class EvictionSettings(Settings):
    """The budget of an eviction policy, as exactly one of three: `budget` tokens, `bytes` of all layers' pages
    together, or `ratio`, a fraction of the prompt's tokens. Tokens are evicted once, after the prompt."""

    budget: Annotated[int, Field(ge=MIN_TOKENS)] | None = None  # tokens that a sequence keeps
    bytes: Annotated[int, Field(ge=1)] | None = None  # bytes of a sequence's pages, in all layers
    ratio: Annotated[float, Field(gt=0, le=1)] | None = None  # fraction of the prompt's tokens that a sequence keeps

    gives_up: ClassVar[frozenset[str]] = frozenset({PREFIX_LAW, FULL_ATTENTION_LAW})
    observes: ClassVar[int | None] = 0
    decay: ClassVar[float] = 1.0  # factor on the attention so far, for each query that counts
    spread: ClassVar[float] = 1.0  # one head may keep this many times its budget

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
                "give at least one page, or lower cache.page_size"
            )
        return self._budget(int(self.bytes // page_bytes * page_size / self.spread))

    def _budget(self, tokens: int | None) -> EvictionBudget:
        return EvictionBudget(tokens, self.ratio, in_decode=False, spread=self.spread)


AnyPolicy = EvictionPolicy | LayerEvictionPolicy | EvictionSettings  # settings that have `select` or `select_layer`


class ContinuousEviction(EvictionSettings):
    """An eviction policy that holds a sequence within its budget at all times.

    After every `block` new tokens (default an eighth of the budget, at most half) `block` tokens are evicted, so a
    sequence holds between budget - block and budget tokens.
    """

    block: Annotated[int, Field(ge=1)] | None = None

    def _budget(self, tokens: int | None) -> EvictionBudget:
        return EvictionBudget(tokens, self.ratio, self.block)


class SlidingWindowEviction(ContinuousEviction):
    """Keep the newest tokens. Unlike the attention setting `window`, this only affects the cache."""

    kind: Literal["window"] = "window"

    def select(self, mass: Tensor, budget: int) -> Tensor:
        return select_recent_and_heaviest(mass, budget, budget)


class SinksRecent(ContinuousEviction):
    """StreamingLLM (Xiao et al., 2023): keep the first `num_sink_tokens` tokens and the newest.

    Positions stay those of the text; the paper renumbers them.
    """

    kind: Literal["sinks_recent"] = "sinks_recent"
    num_sink_tokens: Annotated[int, Field(ge=1)] = 4

    def select(self, mass: Tensor, budget: int) -> Tensor:
        recent = max(1, budget - self.num_sink_tokens)
        return select_recent_and_heaviest(torch.zeros_like(mass), budget, recent)


class HeavyHitters(ContinuousEviction):
    """H2O (Zhang et al., 2023): keep the newest tokens, and of the remaining tokens those that received most
    attention.
    """

    kind: Literal["heavy_hitters"] = "heavy_hitters"
    recent: Annotated[float, Field(gt=0, le=1)] = 0.5  # fraction of the budget for the newest tokens

    observes: ClassVar[int | None] = None

    def select(self, mass: Tensor, budget: int) -> Tensor:
        return select_recent_and_heaviest(mass, budget, max(1, round(self.recent * budget)))


class SnapKV(EvictionSettings):
    """SnapKV (Li et al., 2024): evict once, after the prompt, by the smoothed attention of its last queries; keep all
    output tokens.
    """

    kind: Literal["snapkv"] = "snapkv"
    observe: Annotated[int, Field(ge=1)] = 32  # number of queries at the prompt's end that count; their tokens stay
    pool: Annotated[int, Field(ge=1)] = 7  # attention is averaged over this many neighbours (pool // 2 on either side)

    @property
    def observes(self) -> int:
        return self.observe

    def select(self, mass: Tensor, budget: int) -> Tensor:
        return select_recent_and_heaviest(smooth_mass(mass, self.pool), budget, min(self.observe, budget))


class CustomEviction(Settings):
    """A user-defined policy: `path` is `package.module:Name`, `folder/file.py:Name`, or a registered name."""

    kind: Literal["custom"] = "custom"
    path: str
    arguments: dict[str, float | int | str | bool] = {}  # keyword arguments of the policy's constructor


def _validate(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """Accept a path, alone or with arguments, and a policy object."""
    if isinstance(value, EvictionPolicy | LayerEvictionPolicy):
        return value
    if isinstance(value, str):
        value = {"kind": "custom", "path": value}
    elif isinstance(value, Mapping) and "kind" not in value and "path" in value:
        value = {**value, "kind": "custom"}
    return validate(value)


EvictionSetting = Annotated[
    Annotated[
        SlidingWindowEviction | SinksRecent | HeavyHitters | SnapKV | CustomEviction, Field(discriminator="kind")
    ],
    WrapValidator(_validate),
]
_EVICT: TypeAdapter[Any] = TypeAdapter(EvictionSetting | None)


def parse_eviction(value: str | Mapping[str, Any] | AnyPolicy | Settings | None) -> AnyPolicy | None:
    """Parse an eviction policy: settings such as `{"kind": "snapkv", "budget": 256}`, the path of a user-defined policy
    (alone, or `{"path": ..., "arguments": {...}}`), a policy object, or None."""
    found = parse_setting(_EVICT, value, "evict", "for example {kind: heavy_hitters, budget: 256}")
    if not isinstance(found, CustomEviction):
        return found
    policy = load_custom(CustomPart(path=found.path, arguments=found.arguments))
    if not isinstance(policy, EvictionPolicy | LayerEvictionPolicy):
        needs = "gives_up, observes, budget_for, and select or select_layer"
        raise WorkbenchError(f"cache.evict {found.path}: is not an eviction policy: it needs {needs}")
    return policy


def smooth_mass(mass: Float[Tensor, "... slot"], pool: int) -> Float[Tensor, "... slot"]:
    """Return, for each slot, the mean of `mass` over the slot and its pool // 2 neighbours on either side; beyond the
    ends the mass counts as 0.
    """
    reach = pool // 2
    padded = torch.nn.functional.pad(mass.reshape(1, -1, mass.shape[-1]), (reach, reach))
    return torch.nn.functional.avg_pool1d(padded, 2 * reach + 1, stride=1).view(mass.shape)


def select_recent_and_heaviest(mass: Tensor, budget: int, newest: int) -> Tensor:
    """Select `budget` slots: the last `newest`, and the slots with the most mass among the rest; of equal ones the
    older.
    """
    slots = len(mass)
    if slots <= budget:
        return torch.arange(slots, device=mass.device)
    older = slots - newest
    order = mass[:older].sort(descending=True, stable=True).indices[: budget - newest]
    return torch.cat([order.sort().values, torch.arange(older, slots, device=mass.device)])
