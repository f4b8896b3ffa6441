"""Load a model by name into a runner."""

from __future__ import annotations

import inspect
import textwrap
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from workbench.engine.config import FLAT_NAMES, SECTIONS, EngineConfig
from workbench.engine.runner import Runner
from workbench.progress import to_stderr
from workbench.settings import field_comments
from workbench.trace.events import Event


def load(
    model: str | Path | Mapping[str, Any] = "demo",
    *,
    listener: Callable[[Event], None] | None = None,
    report: Callable[[str], None] = to_stderr,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
    **settings: Any,
) -> Runner:
    """Load `model` and return a runner.

        runner = workbench.load("demo", cache="int8", backend="eager", page_size=32)
        for event in runner.stream("def fib(n):", max_tokens=32, temperature=0):
            print(event.text, end="")

    Args:
        model: a folder, a GGUF file, `demo`, `demo-draft`, `demo-chat` (trained for tool calls), a model downloaded by
            `workbench model get` (`smollm2`, `OWNER/NAME`), or `shape:NAME` with random weights; or a whole section
            `model` of settings.
        listener: receives every event of the runner.
        report: receives a line of text for each slow part of loading.
        clock: returns seconds.
        sleep: waits a number of seconds until the next arrival.
        settings: settings of `EngineConfig`, as sections or by flat names; see the table below.

    Raises:
        WorkbenchError: for a model that cannot be read, and for unknown or unsupported settings.
    """
    return Runner(EngineConfig.build(model, **settings), listener=listener, report=report, clock=clock, sleep=sleep)


def settings_table() -> str:
    """Return the settings of `load` as lines of a Markdown table."""
    lines = ["| setting | default | meaning |", "|---|---|---|"]
    for name in EngineConfig.model_fields:
        section = SECTIONS.get(name)
        about = (
            field_comments(EngineConfig).get(name, "") if section is None else (section.__doc__ or "").splitlines()[0]
        )
        rows = [(name, about)]
        if section is not None:
            settings = (setting for setting, group in FLAT_NAMES.items() if group == name)
            rows += [(setting, field_comments(section).get(setting, "")) for setting in settings]
        lines += [f"| `{each}` | `{_default(each)}` | {meaning} |" for each, meaning in rows]
    return "\n".join(lines)


def _default(name: str) -> Any:
    """Return the default of a setting of `load`; for a section, the default of its main setting."""
    default = _field(name).default
    return getattr(default, "kind", default)


def _field(name: str) -> Any:
    if name in FLAT_NAMES:
        return SECTIONS[FLAT_NAMES[name]].model_fields[name]
    return (
        SECTIONS[name].model_fields[SECTIONS[name].main_setting]
        if name in SECTIONS
        else EngineConfig.model_fields[name]
    )


def _signature() -> inspect.Signature:
    """Return the signature of `load` with every setting in place of `**settings`, so that a notebook can complete
    them.
    """
    parameters = [each for each in inspect.signature(load).parameters.values() if each.name != "settings"]
    names = [name for name in (*EngineConfig.model_fields, *FLAT_NAMES) if name != "model"]
    keyword = inspect.Parameter.KEYWORD_ONLY
    settings = [inspect.Parameter(each, keyword, default=_default(each), annotation=Any) for each in names]
    return inspect.Signature([*parameters, *settings], return_annotation=Runner)


load.__doc__ = f"{(load.__doc__ or '').rstrip()}\n\n{textwrap.indent(settings_table(), '    ')}\n"
load.__signature__ = _signature()  # type: ignore[attr-defined] (what inspect reads)
