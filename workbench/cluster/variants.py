"""Divide the requests of a fleet among its variants: tenants that have a fixed variant get it, all other requests are
divided by shares.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from workbench.cluster.fleet_model import FleetModel
from workbench.engine.config import EngineConfig
from workbench.request import Request


@dataclass(eq=False)
class DeployedVariant:
    """A config that replicas serve under a name; only the front's thread changes it."""

    name: str
    config: EngineConfig
    model: FleetModel
    wanted: int  # number of replicas
    failed_starts: int = 0  # consecutive failed starts of replacements for lost replicas
    fingerprint: str = ""  # fingerprint of its replicas, once one serves


@dataclass(frozen=True)
class VariantShares:
    """The division of requests among variants. Every change returns a new value.

    Args:
        shares: share by variant name, of the requests without a tenant in `keys`; they add up to 1.
        keys: variant by tenant, for tenants that always get the same variant.
        unavailable: reason by variant, for variants without replicas whose requests no other variant can take.
    """

    shares: Mapping[str, float] = field(default_factory=lambda: {"": 1.0})
    keys: Mapping[str, str] = field(default_factory=dict)
    unavailable: Mapping[str, str] = field(default_factory=dict)

    def of(self, request: Request) -> str:
        """Return the variant of a request, which is fixed by its tenant, or by its id without a tenant."""
        found = self.of_tenant(request.tenant)
        return self._by_share(request.request_id) if found is None else found

    def of_tenant(self, tenant: str) -> str | None:
        """Return the variant that answers all requests of a tenant. For an empty tenant it is None if several variants
        have a share.
        """
        if tenant in self.keys:
            return self.keys[tenant]
        names = [name for name, share in self.shares.items() if share]
        return names[0] if len(names) == 1 else self._by_share(tenant) if tenant else None

    def _by_share(self, text: str) -> str:
        place = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) / 2**64
        reached, last = 0.0, ""
        for variant, share in self.shares.items():
            reached += share
            last = variant if share else last  # if rounding leaves the sum below 1
            if place < reached:
                return variant
        return last

    def with_variant(self, name: str, share: float, keys: Iterable[str] = ()) -> VariantShares:
        """Return the division of requests with `share` and `keys` for `name`; the other variants keep their
        proportions, or with share 1 get no requests.
        """
        others = {each: part * (1 - share) for each, part in self.shares.items() if share < 1}
        kept = {tenant: variant for tenant, variant in self.keys.items() if variant in others}
        why = {variant: words for variant, words in self.unavailable.items() if variant in others}
        return VariantShares({**others, name: share}, kept | dict.fromkeys(keys, name), why)

    def without(self, name: str, why: str) -> VariantShares:
        """Return the division of requests with the share of `name` given to the other variants; `name` is unavailable
        if no other variant has a share.
        """
        others = {each: part for each, part in self.shares.items() if each != name}
        total = sum(part for each, part in others.items() if each not in self.unavailable)
        if name not in self.shares:
            return self
        if not total:
            return replace(self, unavailable={**self.unavailable, name: why})
        shares = {each: 0.0 if each in self.unavailable else part / total for each, part in others.items()}
        return replace(self, shares=shares, keys={key: each for key, each in self.keys.items() if each != name})

    def with_available(self, name: str) -> VariantShares:
        """Return the division of requests with `name` marked as available."""
        return replace(self, unavailable={each: why for each, why in self.unavailable.items() if each != name})
