"""`workbench sweep`: run an experiment at many points, each a run folder; finished points stay done."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from workbench.cli.shared import AsJson, console, given, lanes_told, print_json
from workbench.errors import WorkbenchError

if TYPE_CHECKING:
    from workbench.sweep.folder import SweepFolder
    from workbench.sweep.plan import Plan
    from workbench.sweep.run import Row

OF_POINTS = {"set_", "zip_", "repeat"}
STATES = {"done": "green", "failed": "red"}


def sweep(
    context: typer.Context,
    file: Annotated[Path | None, typer.Argument(help="an experiment in YAML; with --resume, further points")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE[,VALUE]", help="several values are an axis; may be repeated"),
    ] = None,
    zip_: Annotated[
        list[str] | None,
        typer.Option("--zip", metavar="PATH=VALUE,VALUE", help="all of these advance together; may be repeated"),
    ] = None,
    repeat: Annotated[int | None, typer.Option(min=1, help="run everything so often, with other seeds")] = None,
    out: Annotated[Path, typer.Option(help="folder in which the sweep's folder is made")] = Path("runs"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the plan, and what it will take")] = False,
    resume: Annotated[Path | None, typer.Option(help="a sweep's folder: run what is missing there")] = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="with --resume: also what failed")] = False,
    executor: Annotated[
        str, typer.Option(help='local, ray, slurm, or with settings: "{kind: ray, workers: 4}"')
    ] = "local",
    jobs: Annotated[int | None, typer.Option(min=1, help="local: points at once")] = None,
    as_json: AsJson = False,
) -> None:
    """Run an experiment at every combination of some settings, each point in a process of its own, as a run folder.

    A point that fails is a row with its error. Interrupted, or killed, a sweep goes on with --resume.
    """
    with lanes_told():
        from workbench.sweep.places import place_from
        from workbench.sweep.plan import plan as plan_of
        from workbench.sweep.run import rows_of, run_sweep
        from workbench.sweep.settings import place_setting

        started = time.process_time()  # nearly all of it imports, as in every worker
        place = place_from(place_setting(executor, jobs=jobs))
        asked = _asked(file, tuple(set_ or ()), tuple(zip_ or ()), repeat, out, resume, given(context))
        plan = plan_of(asked, asked.path.parent, started, retry_failed)
        if dry_run:
            print_json(plan.as_json()) if as_json else show_plan(plan)
            return
        if not as_json:
            _tell(plan)
        try:
            rows = run_sweep(asked, place, retry_failed, progress=not as_json, expected=plan.expected)
        except KeyboardInterrupt:
            _interrupted(asked, rows_of(asked))
            raise typer.Exit(130) from None
    if as_json:
        from workbench.sweep.plan import row_json

        print_json({"sweep": str(asked.path), "points": [row_json(row) for row in rows]})
    else:
        show_rows(asked, rows)
    raise typer.Exit(1 if any(row.state == "failed" for row in rows) else 0)


def _asked(
    file: Path | None, sets: tuple[str, ...], zips: tuple[str, ...], repeat: int | None,
    out: Path, resume: Path | None, words: set[str],
) -> SweepFolder:  # fmt: skip
    from workbench.sweep.folder import SweepFolder
    from workbench.sweep.words import experiment_from

    if file is None and words & OF_POINTS:
        raise WorkbenchError("--set, --zip and --repeat are of an experiment: name its file")
    if resume is None:
        if file is None:
            raise WorkbenchError("name an experiment's file, or with --resume a sweep's folder")
        if "retry_failed" in words:
            raise WorkbenchError("--retry-failed: is of a sweep that has run; name its folder with --resume")
        return SweepFolder.planned(experiment_from(file, sets, zips, repeat), out, file.stem)
    if "out" in words:
        raise WorkbenchError("--out and --resume: a sweep goes on in the folder it has")
    found = SweepFolder.read(resume)
    return found if file is None else found.extended(experiment_from(file, sets, zips, repeat))


def _interrupted(asked: SweepFolder, rows: Sequence[Row]) -> None:
    done = sum(row.outcome is not None for row in rows)
    told = f"interrupted: {done} of {len(rows)} points have an outcome; workbench sweep --resume {asked.path} goes on"
    print(told, file=sys.stderr)


def _tell(plan: Plan) -> None:
    """Print remarks for the reader while the sweep runs."""
    for line in plan.remarks:
        print(f"note: {line}", file=sys.stderr)
    print(f"sweep  {plan.sweep.path}", file=sys.stderr)


def show_plan(plan: Plan) -> None:
    from rich.table import Table
    from rich.text import Text

    out, least = console(), ", at least" if plan.bound else ""
    out.print(Text(f"{plan.sweep.name}: {plan.sweep.experiment.question}", style="bold"), soft_wrap=True)
    for line in plan.remarks:
        out.print(Text(f"note: {line}"), soft_wrap=True)
    table = Table("point", f"time{least}", f"memory{least}", "from", "state", pad_edge=False)
    table.columns[1].justify = table.columns[2].justify = "right"
    for each in plan.points:
        found = each.estimate
        table.add_row(each.row.point.label, _time(found.seconds), _bytes(found.bytes), found.source, _state(each.row))
    out.print(table)
    count, done = len(plan.points), len(plan.points) - len(plan.to_run)
    told = f"{count} points: {done} done, {len(plan.to_run)} to run" if done else f"{count} points to run"
    if plan.to_run:
        told += f"; one after another {_time(plan.seconds)}{least}, with {_bytes(plan.most_bytes)} of memory at once"
    out.print(Text(told), soft_wrap=True)


def show_rows(asked: SweepFolder, rows: Sequence[Row]) -> None:
    from rich.table import Table
    from rich.text import Text

    out = console()
    table = Table("point", "state", "time", "memory", "run folder, or why not", pad_edge=False)
    table.columns[2].justify = table.columns[3].justify = "right"
    for row in rows:
        outcome = row.outcome
        if outcome is None:
            table.add_row(row.point.label, _state(row), "", "", "")
            continue
        run = "" if outcome.folder is None else str(outcome.folder.relative_to(asked.path))
        told = "; ".join(filter(None, [outcome.error, run]))
        size = _bytes(outcome.peak_bytes)
        table.add_row(row.point.label, _state(row), _time(outcome.seconds), size, Text(told))
    out.print(table)
    states = [row.state for row in rows]
    told = [f"{states.count(state)} {state}" for state in ("done", "failed", "to run") if state in states]
    out.print(Text(f"{len(rows)} points: {', '.join(told)}; in {asked.path}"), soft_wrap=True)


def _state(row: Row) -> str:
    style = STATES.get(row.state)
    return f"[{style}]{row.state}[/]" if style else row.state


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 100:
        return f"{seconds:.1f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def _bytes(size: int | None) -> str:
    from workbench.study.byte_sizes import told_bytes

    return "-" if size is None else told_bytes(size)
