"""Options, formats and helpers shared by several commands."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workbench.errors import WorkbenchError

if TYPE_CHECKING:
    from rich.console import Console

FILE_WIDTH = 140
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")]

Custom = Annotated[
    str | None, typer.Option(metavar="FILE", help="a file that registers the model's family (see new-family)")
]

SpokenBy = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL", help="a folder, FILE.gguf, demo-chat, or a name of `model list`; smollm2 where it is at hand"
    ),
]


class OutputFormat(StrEnum):
    TABLE = "table"
    MD = "md"
    CSV = "csv"
    JSON = "json"


def find_in_checkout(folder: str, option: str) -> None:
    """Make a developers' package importable that a checkout has and a wheel has not, or say that `option` needs one."""
    root = Path(__file__).resolve().parents[2]
    if not (root / folder).is_dir():
        raise WorkbenchError(f"{option} needs a checkout of the project, with its folder {folder}")
    if str(root) not in sys.path:
        sys.path.append(str(root))


def console(wide: bool = True) -> Console:
    """Return a console on standard output; `wide` where it is no terminal, so that a table in a file is complete."""
    from rich.console import Console  # 40 ms, before a first token too: only commands that print tables take them

    plain = Console()
    return plain if plain.is_terminal or not wide else Console(width=FILE_WIDTH)


def to_json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def print_json(value: Any) -> None:
    print(to_json(value), end="")


def parse_settings(option: str, text: str) -> Any:
    """Parse an option that takes a name or settings, as an experiment has them."""
    from workbench.files import read_yaml

    return read_yaml(text, f"{option} {text if len(text) <= 60 else text[:57] + '...'}")


def speaking_model(given: str | None, report: Callable[[str], None]) -> str:
    """Return the model that was named, else the default; report which one speaks."""
    from workbench.models.known import KNOWN
    from workbench.models.store import BUNDLED_CHAT_MODEL, PEOPLES_MODEL, default_model, is_at_hand

    name = given or default_model()
    better = ""
    if given is None and name == BUNDLED_CHAT_MODEL and not is_at_hand(PEOPLES_MODEL):
        better = f", a tiny model; `{KNOWN[PEOPLES_MODEL].command}` fetches one that speaks English"
    report(f"{name} speaks{better}")
    return name


def given_options(context: typer.Context) -> set[str]:
    """Return the parameters given on the command line, whatever their values."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}


@contextmanager
def backend_errors() -> Iterator[None]:
    """Turn a backend's refusal into a one-line error for the user."""
    from compiled_kernels.backends import BackendError

    try:
        yield
    except BackendError as error:
        raise WorkbenchError(str(error)) from None
