"""Check a user-defined attention variant against the laws of the built-in variants."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

from torch import nn

from compiled_kernels import Backend
from workbench.custom import build_custom, resolve_path, temporarily_registered
from workbench.errors import WorkbenchError
from workbench.model.attention_config import AttentionConfig
from workbench.model.custom import load_pages, page_size_of, takes_head
from workbench.testing import attention_backends, attention_laws, position_laws
from workbench.testing.attention_scenarios import LONGEST, AttentionScenario, attention_scenarios
from workbench.testing.law import ConformityReport, Law, check_law


def check_attention(
    part: object,
    examples: int = 20,
    arguments: Mapping[str, Any] | None = None,
    backends: Iterable[str] = tuple(Backend),
) -> ConformityReport:
    """Try `part` in small models, and report for each law whether it holds.

    Args:
        part: a mask (query, key) or (query, key, head) -> visible, a score function (score, head, query, key) ->
            score, a choice of pages (query, *summaries) -> term, an attention module, or a composition as in a
            configuration (`{"sliding_window": 8, "num_sink_tokens": 2}`). An instance, a class, a function, or an
            import path (`package.module:Name`, `folder/file.py:Name`).
        examples: number of texts tried for each law, the same texts in every call.
        arguments: arguments of `part`'s constructor, if it is a class.
        backends: backends to compare with the reference, if they support the variant; compilation for inductor takes
            seconds.

    Raises:
        WorkbenchError: if `part` cannot be found or built.
    """
    if isinstance(part, (dict, AttentionConfig)):
        composition = AttentionConfig.parse(part)
        change = composition.model_dump(exclude_defaults=True)
        pages = getattr(composition, "pages", None)
        kind, made = ("composition", None) if pages is None else ("pages", load_pages(pages))
        return ConformityReport(f"attention {change}", _laws(change, made, kind, examples, backends))
    name = part if isinstance(part, str) else getattr(part, "__qualname__", None) or repr(part)
    found = resolve_path(part) if isinstance(part, str) else part
    kind, made = _kind(found, arguments or {}, name)
    if kind is None:
        message = "takes neither (query, key[, head]) nor (score, head, query, key), has no summaries, and is no module"
        return ConformityReport(name, (Law("is a mask, a score function or an attention module", False, message),))
    with nullcontext(part) if isinstance(part, str) else temporarily_registered(found) as path:
        change = {kind: {"path": path, "arguments": dict(arguments or {})}}
        return ConformityReport(f"{kind} {name}", _laws(change, made, kind, examples, backends))


def _kind(found: Any, arguments: Mapping[str, Any], name: str) -> tuple[str | None, Any]:
    """Return the kind of `found`, by the arguments that it accepts, and the callable."""
    if inspect.isclass(found) and issubclass(found, nn.Module):
        return "module", None
    made = build_custom(found, arguments, name)
    if callable(made) and hasattr(made, "summaries"):
        return "pages", made
    for kind, count in (("mask", 2), ("mask", 3), ("score", 4)):
        if callable(made) and _takes(made, count) and (count != 3 or takes_head(made)):
            return kind, made
    return None, None


def _takes(function: Callable[..., Any], count: int) -> bool:
    try:
        inspect.signature(function).bind(*range(count))
    except (TypeError, ValueError):
        return False
    return True


def _laws(change: dict[str, Any], made: Any, kind: str, examples: int, backends: Iterable[str]) -> tuple[Law, ...]:
    found = []
    for law, check in position_laws.POSITION_LAWS.get(kind, {}).items():
        found.append(check_law(law, functools.partial(check, made), 5 * examples, position_laws.positions()))
    if all(law.ok for law in found[:1]):  # further laws need results of the right shape
        problem = _build_error(change, made, kind)
        if problem:
            return (*found, Law("goes into a model", False, problem))
        page_size = page_size_of(made) if kind == "pages" else None
        scenarios = attention_scenarios(page_size=page_size)
        for law, check in attention_laws.LAWS.items():
            found.append(check_law(law, functools.partial(check, change), examples, scenarios))
        for backend in backends:
            found.append(attention_backends.backend_law(Backend(backend), change, examples, page_size))
    return tuple(found)


def _build_error(change: dict[str, Any], made: Any, kind: str) -> str | None:
    scenario = AttentionScenario(0, 1, 2, 4, (2,), 1, 1)
    try:
        scenario.model(change)
    except WorkbenchError as error:
        return str(error)
    if kind == "pages" and page_size_of(made) * (made.keep + getattr(made, "first", 0) + 2) > LONGEST:
        few = f"texts here have up to {LONGEST} tokens, which is no more than it reads"
        return f"{few}: check it with fewer, for example arguments={{'page_size': 4, 'keep': 2}}"
    return None
