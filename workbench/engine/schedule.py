"""Scheduling settings of an experiment: a policy by name or by import path."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from workbench.engine.policies import FCFS, DecodeFirst, Fair, PrefillFirst, Priority, ShortestPrompt, Static
from workbench.engine.policy import Policy
from workbench.errors import WorkbenchError, nearest
from workbench.request import UserPart
from workbench.shown import Brief
from workbench.user_parts import load, takes

Kind = Literal["continuous", "static", "padded"]
SetBack = Literal["auto", "recompute", "offload"]


class OwnPolicy(Brief, BaseModel):
    """A user-defined policy: `path` is `package.module:Name` or `folder/file.py:Name`."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    kind: Literal["own"] = "own"
    path: str
    arguments: dict[str, float | int | str | bool] = {}


def _named(value: Any) -> Any:
    """Accept a kind alone, or a path."""
    if isinstance(value, str):
        return {"kind": "own", "path": value} if ":" in value else {"kind": value}
    if isinstance(value, dict) and "kind" not in value and "path" in value:
        return {**value, "kind": "own"}
    return value


PolicySetting = Annotated[
    Annotated[
        FCFS | PrefillFirst | DecodeFirst | ShortestPrompt | Priority | Fair | OwnPolicy, Field(discriminator="kind")
    ],
    BeforeValidator(_named),
]
_ADAPTER: TypeAdapter[Any] = TypeAdapter(PolicySetting)
BUILT_IN: dict[str, type[Any]] = {
    cls.model_fields["kind"].default: cls for cls in (FCFS, PrefillFirst, DecodeFirst, ShortestPrompt, Priority, Fair)
}


def policy_from(value: Any, kind: Kind = "continuous") -> Policy:
    """Build the policy given by name, settings, import path or callable, for a batching mode.

    Raises:
        WorkbenchError: naming what is wrong.
    """
    value = value() if isinstance(value, type) else value
    setting = value if callable(value) else _setting(value)
    policy = _own(setting) if isinstance(setting, OwnPolicy) else cast(Policy, setting)
    if kind not in get_args(Kind):
        known = ", ".join(get_args(Kind))
        raise WorkbenchError(f"unknown schedule {kind!r}{nearest(kind, get_args(Kind))}; known: {known}")
    return policy if kind == "continuous" else Static(policy, padded=kind == "padded")


def _setting(value: Any) -> Any:
    try:
        return _ADAPTER.validate_python(value)
    except ValidationError as error:
        fault = error.errors()[0]
        place = ".".join(str(part) for part in fault["loc"])
        hint = nearest(value, BUILT_IN) if isinstance(value, str) else ""
        known = f"give {', '.join(BUILT_IN)}, or a path (mine.py:my_policy){hint}"
        raise WorkbenchError(f"policy: {place + ': ' if place else ''}{fault['msg']}; {known}") from None


def _own(setting: OwnPolicy) -> Policy:
    made = load(UserPart(path=setting.path, arguments=setting.arguments))
    if not callable(made):
        raise WorkbenchError(f"policy {setting.path}: not callable; it needs __call__(self, state)")
    takes(made, 1, f"policy {setting.path}", "(state)")
    return cast(Policy, made)
