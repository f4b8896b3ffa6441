"""Check a custom attention variant against the laws of the workbench's own."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

from torch import nn

from compiled_kernels import Lane
from workbench.errors import WorkbenchError
from workbench.model.composition import AttentionPart
from workbench.testing import attention_lanes, attention_laws, position_laws
from workbench.testing.attention_scenes import Scene, scenes
from workbench.testing.holding import held
from workbench.testing.report import Law, Report
from workbench.user_parts import build, find, named


def check_attention(
    part: object,
    examples: int = 20,
    arguments: Mapping[str, Any] | None = None,
    lanes: Iterable[str] = tuple(Lane),
) -> Report:
    """Try `part` in small models, and report law by law whether it holds.

    Args:
        part: a mask (query, key) -> visible, a score function (score, head, query, key) -> score, an attention module,
            or a composition as in a configuration (`{"window": 8, "sinks": 2}`). An instance, a class, a function, or
            an import path (`package.module:Name`, `folder/file.py:Name`).
        examples: texts tried for each law, equal in every call.
        arguments: builds `part` where it is a class.
        backends: compared with the reference as far as they support the variant; compiling for inductor takes seconds.

    Raises:
        WorkbenchError: `part` cannot be found or built.
    """
    if isinstance(part, (dict, AttentionPart)):
        composition = AttentionPart.of(part)
        change = composition.model_dump(exclude_defaults=True)
        return Report(f"attention {change}", _laws(change, None, "composition", examples, lanes))
    name = part if isinstance(part, str) else getattr(part, "__qualname__", None) or repr(part)
    found = find(part) if isinstance(part, str) else part
    kind, made = _kind(found, arguments or {}, name)
    if kind is None:
        told = "takes neither (query, key) nor (score, head, query, key), and is no module"
        return Report(name, (Law("is a mask, a score function or an attention module", False, told),))
    with nullcontext(part) if isinstance(part, str) else named(found) as path:
        change = {kind: {"path": path, "arguments": dict(arguments or {})}}
        return Report(f"{kind} {name}", _laws(change, made, kind, examples, lanes))


def _kind(found: Any, arguments: Mapping[str, Any], name: str) -> tuple[str | None, Any]:
    """Return the kind of `found`, by the arguments it can be called with, and the callable where it is one."""
    if inspect.isclass(found) and issubclass(found, nn.Module):
        return "module", None
    made = build(found, arguments, name)
    for kind, count in (("mask", 2), ("score", 4)):
        if callable(made) and _takes(made, count):
            return kind, made
    return None, None


def _takes(function: Callable[..., Any], count: int) -> bool:
    try:
        inspect.signature(function).bind(*range(count))
    except (TypeError, ValueError):
        return False
    return True


def _laws(change: dict[str, Any], made: Any, kind: str, examples: int, lanes: Iterable[str]) -> tuple[Law, ...]:
    found = []
    for law, check in position_laws.LAWS.get(kind, {}).items():
        found.append(held(law, functools.partial(check, made), 5 * examples, position_laws.positions()))
    if all(law.ok for law in found[:1]):  # without results of the right shape, further laws are not tried
        problem = _unbuildable(change)
        if problem:
            return (*found, Law("goes into a model", False, problem))
        for law, check in attention_laws.LAWS.items():
            found.append(held(law, functools.partial(check, change), examples, scenes()))
        for lane in lanes:
            found.append(attention_lanes.law(Lane(lane), change, examples))
    return tuple(found)


def _unbuildable(change: dict[str, Any]) -> str | None:
    scene = Scene(0, 1, 2, 4, (2,), 1, 1)
    try:
        scene.model(change)
    except WorkbenchError as error:
        return str(error)
    return None
