"""Divide the requests of a fleet among its variants: by tenant where a variant has its key, else by share."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from workbench.cluster.fleet_model import FleetModel
from workbench.engine.config import EngineConfig
from workbench.request import Request


@dataclass(eq=False)
class DeployedVariant:
    """A config that replicas serve under a name; changed in the front's thread alone."""

    name: str
    config: EngineConfig
    model: FleetModel
    wanted: int  # replicas
    failed_starts: int = 0  # one after another, of replicas that are to take the place of lost ones
    fingerprint: str = ""  # of its replicas, once one serves


@dataclass(frozen=True)
class VariantShares:
    """The division of requests among variants, whose names are those of `shares`. Every change is a new value.

    Args:
        shares: of the requests whose tenant has no key; they add up to 1.
        keys: the variant of tenants that always get the same one, by tenant.
        unavailable: why no replica of a variant can be started, where no other variant can take its requests.
    """

    shares: Mapping[str, float] = field(default_factory=lambda: {"": 1.0})
    keys: Mapping[str, str] = field(default_factory=dict)
    unavailable: Mapping[str, str] = field(default_factory=dict)

    def of(self, request: Request) -> str:
        """Return the variant of a request: always the same for a tenant, or for a request without one by its id."""
        found = self.of_tenant(request.tenant)
        return self._by_share(request.request_id) if found is None else found

    def of_tenant(self, tenant: str) -> str | None:
        """Return the variant of all requests of a tenant; None where they have none, and several variants a share."""
        if tenant in self.keys:
            return self.keys[tenant]
        names = [name for name, share in self.shares.items() if share]
        return names[0] if len(names) == 1 else self._by_share(tenant) if tenant else None

    def _by_share(self, text: str) -> str:
        place = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) / 2**64
        reached, last = 0.0, ""
        for variant, share in self.shares.items():
            reached += share
            last = variant if share else last  # where rounding leaves the sum below 1
            if place < reached:
                return variant
        return last

    def with_variant(self, name: str, share: float, keys: Iterable[str] = ()) -> VariantShares:
        """Return them with a share and keys for `name`; the others keep their proportions, and end at a share of 1."""
        others = {each: part * (1 - share) for each, part in self.shares.items() if share < 1}
        kept = {tenant: variant for tenant, variant in self.keys.items() if variant in others}
        why = {variant: words for variant, words in self.unavailable.items() if variant in others}
        return VariantShares({**others, name: share}, kept | dict.fromkeys(keys, name), why)

    def without(self, name: str, why: str) -> VariantShares:
        """Return them with the requests of `name` divided among the others; unavailable where no other has a share."""
        others = {each: part for each, part in self.shares.items() if each != name}
        total = sum(part for each, part in others.items() if each not in self.unavailable)
        if name not in self.shares:
            return self
        if not total:
            return replace(self, unavailable={**self.unavailable, name: why})
        shares = {each: 0.0 if each in self.unavailable else part / total for each, part in others.items()}
        return replace(self, shares=shares, keys={key: each for key, each in self.keys.items() if each != name})

    def with_available(self, name: str) -> VariantShares:
        """Return them with `name` available."""
        return replace(self, unavailable={each: why for each, why in self.unavailable.items() if each != name})
