"""Define options, formats and helpers that several commands share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workbench.errors import WorkbenchError

if TYPE_CHECKING:
    from rich.console import Console

    from workbench.display import Displayable, Table
    from workbench.experiment.experiment import Experiment

FILE_WIDTH = 140
MODEL_HELP = "a folder, FILE.gguf, demo, shape:NAME or one of `model list`"
MaxTokens = Annotated[int, typer.Option(help="maximum number of output tokens")]
Temperature = Annotated[float, typer.Option(help="sampling temperature; 0 is greedy")]
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON object")]

Custom = Annotated[
    str | None, typer.Option(metavar="FILE", help="Python file that registers the model's family (see new-family)")
]

SpokenBy = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL", help="a folder, FILE.gguf, demo-chat, or a name of `model list`; default: smollm2 if fetched"
    ),
]


def settings_option(keys: str, where: str = "the docs' page of experiments") -> Any:
    """Return the option `--set`; its help has the most used settings, and the place where all are listed."""
    words = f"change a setting, repeatable: {keys}" + (f"; all are on {where}" if where else "")
    return typer.Option("--set", metavar="PATH=VALUE", help=words)


class OutputFormat(StrEnum):
    TABLE = "table"
    MD = "md"
    CSV = "csv"
    JSON = "json"


class ListingFormat(StrEnum):
    TABLE = "table"
    MD = "md"
    JSON = "json"


def console(wide: bool = True) -> Console:
    """Return a console on standard output. With `wide`, tables written to a file are not cut to the width of a
    terminal."""
    from rich.console import Console  # the import takes 40 ms, so only commands that print tables pay for it

    plain = Console()
    return plain if plain.is_terminal or not wide else Console(width=FILE_WIDTH)


def say(*parts: str | Table | Displayable, style: str = "") -> None:
    """Print tables and lines of text; lines are printed unchanged, without line breaks or markup."""
    from rich.text import Text

    out = console()
    for part in parts:
        out.print(Text(part, style) if isinstance(part, str) else part, soft_wrap=isinstance(part, str))


def to_json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def print_json(value: Any) -> None:
    print(to_json(value), end="")


def changed_settings(values: dict[str, Any], changes: list[str] | None) -> dict[str, Any]:
    """Return `values`, settings by section as in an experiment, after applying the changes of `--set PATH=VALUE`.

    Raises:
        WorkbenchError: a path leads through a plain value, or a plain value replaces a group of settings.
    """
    if changes:  # importing the experiment takes 100 ms, which would delay a first token
        from workbench.engine.config import SECTIONS
        from workbench.experiment.experiment import apply_override

        groups = [name for name, value in values.items() if isinstance(value, dict) and name not in SECTIONS]
        for change in changes:
            apply_override(values, change)
        for name in groups:
            if not isinstance(values[name], dict):
                raise WorkbenchError(f"--set {name}={values[name]}: is a group of settings; write {name}.KEY=VALUE")
    return values


def asked_experiment(command: str, values: dict[str, Any], changes: list[str] | None = None) -> Experiment:
    """Return the experiment described by a command's arguments and `--set` (WorkbenchError with the path)."""
    from workbench.experiment.experiment import Experiment

    return Experiment.from_values(changed_settings({"question": f"workbench {command}", **values}, changes), command)


def refuse_unused(command: str, changes: list[str] | None, used: Sequence[str]) -> None:
    """Refuse a `--set` of a setting that the command does not use (WorkbenchError)."""
    for change in changes or ():
        path = change.partition("=")[0]
        if not any(f"{path}.".startswith(f"{each}.") or each.startswith(f"{path}.") for each in used):
            raise WorkbenchError(f"--set {path}: has no effect on `workbench {command}`, which uses {', '.join(used)}")


def speaking_model(given: str | None, report: Callable[[str], None]) -> str:
    """Return the model given by the user, else the default model; report which one is used."""
    from workbench.models.known import KNOWN
    from workbench.models.store import BUNDLED_CHAT_MODEL, PEOPLES_MODEL, default_model, is_at_hand

    name = given or default_model()
    better = ""
    if given is None and name == BUNDLED_CHAT_MODEL and not is_at_hand(PEOPLES_MODEL):
        better = f", a tiny model; `{KNOWN[PEOPLES_MODEL].command}` fetches one that speaks English"
    report(f"answering with {name}{better}")
    return name


@contextmanager
def backend_errors() -> Iterator[None]:
    """Turn a backend's error into a one-line error for the user."""
    from compiled_kernels.backends import BackendError

    try:
        yield
    except BackendError as error:
        raise WorkbenchError(str(error)) from None
