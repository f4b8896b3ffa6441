"""`workbench sweep`: run an experiment at many points, each with its own run folder; finished points are kept."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from workbench.cli.shared import AsJson, backend_errors, print_json, say
from workbench.display import Table
from workbench.errors import WorkbenchError
from workbench.units import format_bytes, format_duration

if TYPE_CHECKING:
    from workbench.sweep.folder import SweepFolder
    from workbench.sweep.plan import SweepPlan
    from workbench.sweep.run import SweepRow


def sweep(
    file: Annotated[Path | None, typer.Argument(help="an experiment's YAML file; with --resume, more points")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE[,VALUE]", help="setting to sweep over its values; may be repeated"),
    ] = None,
    zip_: Annotated[
        list[str] | None,
        typer.Option("--zip", metavar="PATH=VALUE,VALUE", help="settings that advance together; may be repeated"),
    ] = None,
    repeat: Annotated[int | None, typer.Option(min=1, help="number of repetitions, each with another seed")] = None,
    out: Annotated[
        Path | None, typer.Option(help="folder in which the sweep folder is created; runs unless given")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print the plan with its expected time and memory")
    ] = False,
    resume: Annotated[Path | None, typer.Option(help="sweep folder to complete: runs its missing points")] = None,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="with --resume: run failed points again")
    ] = False,
    executor: Annotated[
        str, typer.Option(help='runs the points: local, ray, slurm, or "{kind: local, jobs: 2}"')
    ] = "local",
    as_json: AsJson = False,
) -> None:
    """Run an experiment at every combination of settings.

    Each point is a process and leaves a run folder; one that fails is a row with its error. `--resume`
    continues a sweep that was interrupted or killed.
    """
    with backend_errors():
        from workbench.sweep.plan import plan_sweep as plan_of
        from workbench.sweep.run import make_executor, read_rows, run_sweep
        from workbench.sweep.settings import parse_executor

        started = time.process_time()  # mostly imports, which every worker repeats
        sweep_executor = make_executor(parse_executor(executor))
        if retry_failed and resume is None:
            raise WorkbenchError("--retry-failed: needs --resume FOLDER, the sweep to continue")
        folder = _open_sweep(file, tuple(set_ or ()), tuple(zip_ or ()), repeat, out, resume)
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
        say(rows)
    raise typer.Exit(1 if any(row.state == "failed" for row in rows) else 0)


def _open_sweep(
    file: Path | None, sets: tuple[str, ...], zips: tuple[str, ...], repeat: int | None,
    out: Path | None, resume: Path | None,
) -> SweepFolder:  # fmt: skip
    from workbench.sweep.folder import SweepFolder, experiment_with_axes

    if file is None and (sets or zips or repeat):
        raise WorkbenchError("--set, --zip and --repeat need an experiment's file")
    if resume is None:
        if file is None:
            raise WorkbenchError("give an experiment's file, or --resume with a sweep's folder")
        return SweepFolder.create(experiment_with_axes(file, sets, zips, repeat), out or Path("runs"), file.stem)
    if out is not None:
        raise WorkbenchError("--out and --resume: a resumed sweep stays in its folder; remove --out")
    found = SweepFolder.read(resume)
    return found if file is None else found.extend(experiment_with_axes(file, sets, zips, repeat))


def _interrupted(folder: SweepFolder, rows: Sequence[SweepRow]) -> None:
    done = sum(row.outcome is not None for row in rows)
    message = (
        f"interrupted: {done} of {len(rows)} points have an outcome; continue: workbench sweep --resume {folder.path}"
    )
    print(message, file=sys.stderr)


def _print_remarks(plan: SweepPlan) -> None:
    """Print remarks for the user while the sweep runs."""
    for line in plan.remarks:
        print(f"note: {line}", file=sys.stderr)
    print(f"sweep  {plan.sweep.path}", file=sys.stderr)


def show_plan(plan: SweepPlan) -> None:
    least = ", at least" if plan.is_lower_bound else ""
    say(f"{plan.sweep.name}: {plan.sweep.experiment.question}", style="bold")
    say(*(f"note: {line}" for line in plan.remarks))
    cells = [
        (each.row.point.label, format_duration(each.estimate.seconds), format_bytes(each.estimate.bytes),
         each.estimate.source, each.row.state)
        for each in plan.points
    ]  # fmt: skip
    say(Table("", cells, ("point", f"time{least}", f"memory{least}", "from", "state"), left=("from", "state")))
    count, done = len(plan.points), len(plan.points) - len(plan.to_run)
    totals = f"{count} points: {done} done, {len(plan.to_run)} to run" if done else f"{count} points to run"
    if plan.to_run:
        size = format_bytes(plan.peak_bytes)
        totals += f"; one after another {format_duration(plan.seconds)}{least}, with {size} of memory at once"
    say(totals)
