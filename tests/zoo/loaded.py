"""Build the parts of the zoo's entries, and the greedy text of a runner."""

from __future__ import annotations

from typing import Any

from workbench.claims.technique import ZOO_FOLDER
from workbench.custom import resolve_path
from workbench.engine.runner import Runner


def part_of(name: str, **arguments: Any) -> Any:
    """Build the part of an entry: the class in its file that its YAML names."""
    settings = (ZOO_FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    part = settings.split(f"{name}.py:")[1].split('"')[0]
    return resolve_path(f"{ZOO_FOLDER / name}.py:{part}")(**arguments)


def text_of(runner: Runner, prompt: str, tokens: int) -> str:
    return "".join(event.text for event in runner.stream(prompt, max_tokens=tokens, temperature=0, ignore_eos=True))
