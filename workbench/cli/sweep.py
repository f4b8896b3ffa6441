"""`workbench sweep`: run an experiment at many points, each a run folder; finished points stay done."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from workbench.cli.shared import AsJson, backend_errors, console, given_options, print_json
from workbench.display import Table
from workbench.errors import WorkbenchError

if TYPE_CHECKING:
    from workbench.sweep.folder import SweepFolder
    from workbench.sweep.plan import SweepPlan
    from workbench.sweep.run import SweepRow

POINT_OPTIONS = {"set_", "zip_", "repeat"}
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
    with backend_errors():
        from workbench.sweep.plan import plan_sweep as plan_of
        from workbench.sweep.run import make_executor, read_rows, run_sweep
        from workbench.sweep.settings import parse_executor

        started = time.process_time()  # nearly all of it imports, as in every worker
        sweep_executor = make_executor(parse_executor(executor, jobs=jobs))
        folder = _open_sweep(file, tuple(set_ or ()), tuple(zip_ or ()), repeat, out, resume, given_options(context))
        plan = plan_of(folder, folder.path.parent, started, retry_failed)
        if dry_run:
            print_json(plan.as_json()) if as_json else show_plan(plan)
            return
        if not as_json:
            _print_remarks(plan)
        try:
            rows = run_sweep(
                folder, sweep_executor, retry_failed, progress=not as_json, expected_seconds=plan.expected_seconds
            )
        except KeyboardInterrupt:
            _interrupted(folder, read_rows(folder))
            raise typer.Exit(130) from None
    if as_json:
        from workbench.sweep.plan import row_json

        print_json({"sweep": str(folder.path), "points": [row_json(row) for row in rows]})
    else:
        show_rows(folder, rows)
    raise typer.Exit(1 if any(row.state == "failed" for row in rows) else 0)


def _open_sweep(
    file: Path | None, sets: tuple[str, ...], zips: tuple[str, ...], repeat: int | None,
    out: Path, resume: Path | None, words: set[str],
) -> SweepFolder:  # fmt: skip
    from workbench.sweep.folder import SweepFolder, experiment_with_axes

    if file is None and words & POINT_OPTIONS:
        raise WorkbenchError("--set, --zip and --repeat are of an experiment: name its file")
    if resume is None:
        if file is None:
            raise WorkbenchError("name an experiment's file, or with --resume a sweep's folder")
        if "retry_failed" in words:
            raise WorkbenchError("--retry-failed: is of a sweep that has run; name its folder with --resume")
        return SweepFolder.create(experiment_with_axes(file, sets, zips, repeat), out, file.stem)
    if "out" in words:
        raise WorkbenchError("--out and --resume: a sweep goes on in the folder it has")
    found = SweepFolder.read(resume)
    return found if file is None else found.extend(experiment_with_axes(file, sets, zips, repeat))


def _interrupted(folder: SweepFolder, rows: Sequence[SweepRow]) -> None:
    done = sum(row.outcome is not None for row in rows)
    message = (
        f"interrupted: {done} of {len(rows)} points have an outcome; workbench sweep --resume {folder.path} goes on"
    )
    print(message, file=sys.stderr)


def _print_remarks(plan: SweepPlan) -> None:
    """Print remarks for the reader while the sweep runs."""
    for line in plan.remarks:
        print(f"note: {line}", file=sys.stderr)
    print(f"sweep  {plan.sweep.path}", file=sys.stderr)


def show_plan(plan: SweepPlan) -> None:
    from rich.text import Text

    out, least = console(), ", at least" if plan.is_lower_bound else ""
    out.print(Text(f"{plan.sweep.name}: {plan.sweep.experiment.question}", style="bold"), soft_wrap=True)
    for line in plan.remarks:
        out.print(Text(f"note: {line}"), soft_wrap=True)
    cells = [
        (each.row.point.label, _time(each.estimate.seconds), _bytes(each.estimate.bytes), each.estimate.source,
         _state(each.row))
        for each in plan.points
    ]  # fmt: skip
    out.print(Table("", cells, ("point", f"time{least}", f"memory{least}", "from", "state"), left=("from", "state")))
    count, done = len(plan.points), len(plan.points) - len(plan.to_run)
    totals = f"{count} points: {done} done, {len(plan.to_run)} to run" if done else f"{count} points to run"
    if plan.to_run:
        totals += f"; one after another {_time(plan.seconds)}{least}, with {_bytes(plan.peak_bytes)} of memory at once"
    out.print(Text(totals), soft_wrap=True)


def show_rows(folder: SweepFolder, rows: Sequence[SweepRow]) -> None:
    from rich.text import Text

    out, cells = console(), []
    for row in rows:
        outcome = row.outcome
        if outcome is None:
            cells.append((row.point.label, _state(row), "", "", ""))
            continue
        run = "" if outcome.folder is None else str(outcome.folder.relative_to(folder.path))
        where = "; ".join(filter(None, [outcome.error, run]))
        cells.append((row.point.label, _state(row), _time(outcome.seconds), _bytes(outcome.peak_bytes), where))
    headings = ("point", "state", "time", "memory", "run folder, or why not")
    out.print(Table("", cells, headings, left=("state", headings[-1])))
    states = [row.state for row in rows]
    counts = [f"{states.count(state)} {state}" for state in ("done", "failed", "to run") if state in states]
    out.print(Text(f"{len(rows)} points: {', '.join(counts)}; in {folder.path}"), soft_wrap=True)


def _state(row: SweepRow) -> object:
    from rich.text import Text

    return Text(row.state, style=STATES.get(row.state, ""))


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 100:
        return f"{seconds:.1f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def _bytes(size: int | None) -> str:
    from workbench.memory.report import format_bytes

    return "-" if size is None else format_bytes(size)
