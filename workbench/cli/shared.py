"""What several commands have in common."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.console import Console

from workbench.errors import WorkbenchError

WIDE = 140
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")]


class Format(StrEnum):
    TABLE = "table"
    MD = "md"
    CSV = "csv"
    JSON = "json"


def console() -> Console:
    """Standard output; wide where it is no terminal, so that a table in a file is whole."""
    plain = Console()
    return plain if plain.is_terminal else Console(width=WIDE)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


def settings(option: str, text: str) -> Any:
    """What an option that takes a name or settings, as an experiment has them, was given."""
    from workbench.files import read_yaml

    return read_yaml(text, f"{option} {text if len(text) <= 60 else text[:57] + '...'}")


def given(context: typer.Context) -> set[str]:
    """The parameters that stand on the command line, whatever their values."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}


@contextmanager
def lanes_told() -> Iterator[None]:
    """A lane that cannot do what was asked is the user's to know of, in one line."""
    from compiled_kernels.lanes import LaneError

    try:
        yield
    except LaneError as error:
        raise WorkbenchError(str(error)) from None
