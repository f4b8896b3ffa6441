"""Scheduling settings of an experiment: a policy by name or by import path."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from workbench.engine.policies import FCFS, DecodeFirst, Fair, PrefillFirst, Priority, ShortestPrompt, StaticBatching
from workbench.engine.policy import SchedulingPolicy
from workbench.errors import WorkbenchError, nearest
from workbench.request import CustomPart
from workbench.shown import ConciseRepr
from workbench.user_parts import load_custom, check_arity

BatchingMode = Literal["continuous", "static", "padded"]
PreemptionMode = Literal["auto", "recompute", "offload"]


class CustomPolicy(ConciseRepr, BaseModel):
    """A user-defined policy: `path` is `package.module:Name` or `folder/file.py:Name`."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    kind: Literal["custom"] = "custom"
    path: str
    arguments: dict[str, float | int | str | bool] = {}


def _named(value: Any) -> Any:
    """Accept a kind alone, or a path."""
    if isinstance(value, str):
        return {"kind": "custom", "path": value} if ":" in value else {"kind": value}
    if isinstance(value, dict) and "kind" not in value and "path" in value:
        return {**value, "kind": "custom"}
    return value


PolicySetting = Annotated[
    Annotated[
        FCFS | PrefillFirst | DecodeFirst | ShortestPrompt | Priority | Fair | CustomPolicy, Field(discriminator="kind")
    ],
    BeforeValidator(_named),
]
_ADAPTER: TypeAdapter[Any] = TypeAdapter(PolicySetting)
BUILT_IN_POLICIES: dict[str, type[Any]] = {
    cls.model_fields["kind"].default: cls for cls in (FCFS, PrefillFirst, DecodeFirst, ShortestPrompt, Priority, Fair)
}


def parse_policy(value: Any, kind: BatchingMode = "continuous") -> SchedulingPolicy:
    """Build the policy given by name, settings, import path or callable, for a batching mode.

    Raises:
        WorkbenchError: naming what is wrong.
    """
    value = value() if isinstance(value, type) else value
    setting = value if callable(value) else _setting(value)
    policy = _load_custom_policy(setting) if isinstance(setting, CustomPolicy) else cast(SchedulingPolicy, setting)
    if kind not in get_args(BatchingMode):
        known = ", ".join(get_args(BatchingMode))
        raise WorkbenchError(f"unknown schedule {kind!r}{nearest(kind, get_args(BatchingMode))}; known: {known}")
    return policy if kind == "continuous" else StaticBatching(policy, padded=kind == "padded")


def _setting(value: Any) -> Any:
    try:
        return _ADAPTER.validate_python(value)
    except ValidationError as error:
        fault = error.errors()[0]
        place = ".".join(str(part) for part in fault["loc"])
        hint = nearest(value, BUILT_IN_POLICIES) if isinstance(value, str) else ""
        known = f"give {', '.join(BUILT_IN_POLICIES)}, or a path (mine.py:my_policy){hint}"
        raise WorkbenchError(f"policy: {place + ': ' if place else ''}{fault['msg']}; {known}") from None


def _load_custom_policy(setting: CustomPolicy) -> SchedulingPolicy:
    made = load_custom(CustomPart(path=setting.path, arguments=setting.arguments))
    if not callable(made):
        raise WorkbenchError(f"policy {setting.path}: not callable; it needs __call__(self, state)")
    check_arity(made, 1, f"policy {setting.path}", "(state)")
    return cast(SchedulingPolicy, made)
