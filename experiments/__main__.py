"""Run `experiments/NAME.yaml` by `python -m experiments NAME`; list the experiments without a name."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from workbench.errors import WorkbenchError, nearest
from workbench.experiment.experiment import Experiment
from workbench.measure.run import run
from workbench.reports import terminal as report

HERE = Path(__file__).resolve().parent
WIDE = 140  # columns where stdout is no terminal


def names() -> list[str]:
    return sorted(path.stem for path in HERE.glob("*.yaml"))


def main(
    name: Annotated[str | None, typer.Argument(help="an experiment; none: list them")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="change one setting")] = None,
    out: Annotated[Path, typer.Option(help="folder in which the run folder is made")] = Path("runs"),
) -> None:
    """Run one of the project's experiments and show its results."""
    if name is None:
        for each in names():
            print(f"{each:24}{Experiment.from_file(HERE / f'{each}.yaml').question}")
        return
    if name not in names():
        raise WorkbenchError(f"no experiment {name!r}{nearest(name, names())}; without a name they are listed")
    console = Console()
    record = run(Experiment.from_file(HERE / f"{name}.yaml", tuple(set_ or ())), out, name)
    report.show(record, console if console.is_terminal else Console(width=WIDE))


if __name__ == "__main__":
    try:
        typer.run(main)
    except WorkbenchError as error:
        sys.exit(f"error: {error}")
