"""Define the gateway's settings: the group `gateway` of a server's settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from workbench.errors import explain
from workbench.gateway.accounting import AccountingConfig
from workbench.gateway.answer_cache import AnswerCacheConfig
from workbench.gateway.bounds import Bounds
from workbench.gateway.limits.limits import CallerLimits, Holder
from workbench.gateway.moderation import ModerationConfig
from workbench.gateway.router import RouterConfig
from workbench.serve.call import Caller
from workbench.settings import Settings

NO_LIMITS = CallerLimits()


class LimitsConfig(Settings):
    """Rate and spending limits of keys and tenants; a call counts against both."""

    each_key: CallerLimits = NO_LIMITS  # limits of a key that is not in `keys`
    keys: dict[str, CallerLimits] = {}  # limits by key id
    each_tenant: CallerLimits = NO_LIMITS
    tenants: dict[str, CallerLimits] = {}  # limits by owner of keys
    redis: str | None = None  # redis://host:port/database, for several gateways; None: this process counts alone
    on_failure: Literal["closed", "open"] = "closed"  # without Redis: refuse calls, or admit them uncounted
    lease_seconds: Annotated[float, Field(gt=0)] = 300.0  # seconds after which reservations of a dead gateway expire

    @property
    def has_money(self) -> bool:
        """Return whether any key or tenant has a spending limit."""
        callers = (self.each_key, self.each_tenant, *self.keys.values(), *self.tenants.values())
        return any(each.money_per_day is not None for each in callers)

    def holders(self, caller: Caller) -> tuple[Holder, ...]:
        """Return those of the caller's key and tenant that have limits."""
        found = (
            Holder(f"key:{caller.key}", self.keys.get(caller.key, self.each_key)),
            Holder(f"tenant:{caller.tenant}", self.tenants.get(caller.tenant, self.each_tenant)),
        )
        return tuple(each for each in found if each.limits != NO_LIMITS)


class GatewayConfig(Settings):
    """Settings of the gateway. A missing group switches its function off: no keys, no limits, ..."""

    keys: Path | None = None  # the key file of `workbench keys`; None: every caller is admitted, as an administrator
    bounds: Bounds = Bounds()
    limits: LimitsConfig = LimitsConfig()
    moderation: ModerationConfig | None = None
    router: RouterConfig | None = None
    answers: AnswerCacheConfig | None = None
    accounting: AccountingConfig = AccountingConfig()

    @classmethod
    def from_values(cls, values: Mapping[str, Any], where: str = "gateway") -> GatewayConfig:
        """Parse plain YAML values; the WorkbenchError for an invalid one names its path."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise explain(error, where, cls) from None
