"""`workbench zoo`: published techniques, each implemented on a page, with measurements on this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workbench.cli.shared import AsJson, ListingFormat, backend_errors, console, print_json, say
from workbench.display import Table
from workbench.errors import WorkbenchError

if TYPE_CHECKING:
    from workbench.claims.technique import LoadedTechnique

app = typer.Typer(
    help="List, check and run published techniques.", invoke_without_command=True, rich_markup_mode="markdown"
)
Folder = Annotated[Path | None, typer.Option(help="the entries' folder; the workbench's own unless given")]
Names = Annotated[list[str] | None, typer.Argument(metavar="NAME", help="entries, as `workbench zoo` lists them")]


@app.callback(epilog="Example: `workbench zoo --kind sampling`")
def zoo(
    context: typer.Context,
    kind: Annotated[
        str | None, typer.Option(help="attention, format, eviction, sampling, draft or schedule; all unless given")
    ] = None,
    format: Annotated[ListingFormat, typer.Option(help="output format")] = ListingFormat.TABLE,
    folder: Folder = None,
) -> None:
    """List published techniques, each with its verdict.

    Columns: lines of code, laws, bytes and speed relative to the baseline, KL divergence, verdict."""
    if context.invoked_subcommand is not None:
        return
    from workbench.claims.zoo import open_zoo

    found = open_zoo(folder or _home())
    found = found if kind is None else found.of_kind(kind)
    if format is ListingFormat.JSON:
        return print_json(found.rows)
    if format is ListingFormat.MD:
        return print(found.table().markdown(), end="")
    say(found)


@app.command(epilog="Example: `workbench zoo show typical`")
def show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="an entry")],
    folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Show one technique: its equation, the setting that enables it, claim, rule, measurements and source."""
    from workbench.claims.zoo import open_zoo

    item = open_zoo(folder or _home())[name]
    if as_json:
        return print_json(item.row())
    out = console()
    out.print(f"[bold]{item.settings.technique}[/] ({item.settings.kind})\n", highlight=False)
    out.print(item.entry.docstring, markup=False, highlight=False, soft_wrap=True)
    out.print()
    for label, text in item.lines():
        out.print(f"{label:11}{text}", markup=False, highlight=False, soft_wrap=True)
    if item.figures:
        out.print()
        out.print(Table("", item.figure_rows(), ("figure", "here", "what it says"), left=("what it says",)))


@app.command(epilog="Example: `workbench zoo check typical`")
def check(
    names: Names = None,
    all_: Annotated[bool, typer.Option("--all", help="take every entry")] = False,
    examples: Annotated[
        int | None, typer.Option(min=1, help="number of examples for each law; the kit's own number unless given")
    ] = None,
    folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Check techniques against the laws of their kind, on random inputs."""
    from workbench.claims.laws import check_technique

    reports: dict[str, Any] = {}
    for name, entry in _selected(names, all_, folder, "check").items():
        with backend_errors():
            reports[name] = check_technique(entry, examples)
        if as_json:
            continue
        for report in reports[name]:
            print(report)
        if not reports[name]:
            print(f"{name}: {entry.settings.technique} only combines settings of the engine; it has no laws to check")
    if as_json:
        print_json({name: [{"part": report.part, "laws": [law._asdict() for law in report.laws]} for report in found]
                    for name, found in reports.items()})  # fmt: skip
    raise typer.Exit(0 if all(report.passed for found in reports.values() for report in found) else 1)


@app.command(epilog="Example: `workbench zoo run typical`, `workbench zoo run --all --missing`")
def run(
    names: Names = None,
    all_: Annotated[bool, typer.Option("--all", help="take every entry")] = False,
    missing: Annotated[
        bool, typer.Option("--missing", help="only what was not measured, or changed since")
    ] = False,
    model: Annotated[str, typer.Option(help="model to measure on; each entry's own unless given")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="measure less, and store nothing")] = False,
    folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Measure techniques against their baselines, check their laws, and store the figures.

    Several techniques are measured one after another, each in a separate process."""
    from workbench.claims.tables import NOT_RUN
    from workbench.progress import ProgressStage, progress_stages

    chosen = _selected(names, all_, folder, "run")
    if missing:
        chosen = {
            name: entry
            for name, entry in chosen.items()
            if not any(each.inputs == entry.inputs and model in ("", each.model) for each in entry.summaries)
        }
    found: dict[str, Any] = {}
    faults: dict[str, str] = {}
    with progress_stages(not as_json) as tell:
        for number, (name, entry) in enumerate(chosen.items(), 1):
            try:
                if len(chosen) == 1:
                    found[name] = _measure(entry, quick, model, tell)
                else:
                    tell(ProgressStage.create(f"{number} of {len(chosen)}: {name}", number - 1, len(chosen)))
                    found[name] = _measure_apart(entry, quick, model)
            except WorkbenchError as error:
                faults[name] = str(error)
    if as_json:
        print_json({"entries": found, "faults": faults, "quick": quick})
    else:
        rows = [(name, each["outcome"], each["laws"], each["reason"]) for name, each in found.items()]
        rows += [(name, NOT_RUN, "", fault) for name, fault in faults.items()]
        if rows:
            console().print(Table("", rows, ("name", "verdict", "laws", "reason")))
        else:
            typer.echo("every entry has up-to-date figures")
        if quick:
            typer.echo("a quick look: nothing is stored", err=True)
    raise typer.Exit(1 if faults else 0)


def _measure(entry: LoadedTechnique, quick: bool, model: str, tell: Any) -> dict[str, Any]:
    """Measure in this process; store the record unless `quick`."""
    from workbench.claims.measure import measure_technique
    from workbench.claims.summary import store_summaries
    from workbench.claims.zoo import verdict_of

    with backend_errors():
        summary = measure_technique(entry, quick, model, tell)
    if not quick:
        store_summaries(entry.file, [summary])
    return verdict_of(entry, summary)


def _measure_apart(entry: LoadedTechnique, quick: bool, model: str) -> dict[str, Any]:
    """Measure in a new process, so that earlier compilation and memory use do not affect the result."""
    from workbench.machine.environment import child_environment

    command = [sys.executable, "-m", "workbench", "zoo", "run", entry.name, "--json"]
    command += ["--folder", str(entry.file.parent), *["--quick"] * quick, *(["--model", model] if model else [])]
    done = subprocess.run(command, capture_output=True, text=True, env=child_environment(), check=False)
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        last = (done.stderr.strip().splitlines() or ["no words"])[-1]
        raise WorkbenchError(f"its process ended with {done.returncode}: {last}") from None
    if entry.name in answer["faults"]:
        raise WorkbenchError(answer["faults"][entry.name])
    return answer["entries"][entry.name]


def _selected(names: list[str] | None, every: bool, folder: Path | None, verb: str) -> dict[str, LoadedTechnique]:
    from workbench.claims.zoo import named_entries

    if bool(names) == every:
        raise WorkbenchError(f"workbench zoo {verb}: give entries or --all; `workbench zoo` lists them")
    return named_entries(folder or _home(), names or ())


def _home() -> Path:
    from workbench.claims.technique import ZOO_FOLDER

    return ZOO_FOLDER
