"""`workbench claims`: claims made in publications, with verdicts derived from measurements."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from workbench.cli.shared import AsJson, ListingFormat, console, print_json
from workbench.display import Table
from workbench.errors import WorkbenchError, nearest

app = typer.Typer(help="List and check claims of the field.", invoke_without_command=True, rich_markup_mode="markdown")


WIDTHS = {"claim": 24, "statement": 36, "verdict": 17, "machine": 22, "level": 7, "elsewhere": 20}  # letters

Folder = Annotated[Path | None, typer.Option(help="the claims' folder; the workbench's own unless given")]
Ids = Annotated[list[str] | None, typer.Argument(metavar="ID", help="claims; all unless given")]


@app.callback(epilog="Example: `workbench claims --verdict refuted --format md`")
def claims(
    context: typer.Context,
    format: Annotated[ListingFormat, typer.Option(help="output format")] = ListingFormat.TABLE,
    verdict: Annotated[
        str | None,
        typer.Option(help="holds, holds-with-limits, refuted, not-testable-here, 'not run yet' or 'no test'"),
    ] = None,
    folder: Folder = None,
) -> None:
    """List claims of the field with their verdicts on this machine."""
    if context.invoked_subcommand is not None:
        return
    from workbench.claims import tables

    if verdict is not None and verdict not in tables.ORDER:
        raise WorkbenchError(f"--verdict {verdict}: unknown{nearest(verdict, tables.ORDER)}; {', '.join(tables.ORDER)}")
    rows = tables.claim_rows(_load(folder), verdict)
    counts = tables.count_verdicts(rows)
    table = Table("", list(map(tables.row_cells, rows)), tables.HEADINGS, counts)
    if format is ListingFormat.JSON:
        print_json(rows)
    elif format is ListingFormat.MD:
        print(table.markdown(), end="")
    else:
        shown = table.rich(no_wrap=True)
        for column, name in zip(shown.columns, tables.HEADINGS, strict=True):
            column.min_width = column.max_width = WIDTHS[name]
        console().print(shown)
        console().print(counts)


@app.command(epilog="Example: `workbench claims run kv-gqa`, `workbench claims run --missing`")
def run(
    ids: Ids = None,
    model: Annotated[str, typer.Option(help="model to measure on; those of each claim unless given")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="measure less, and store nothing")] = False,
    missing: Annotated[bool, typer.Option("--missing", help="only what was not measured, or changed since")] = False,
    out: Annotated[Path, typer.Option(help="folder in which run folders are created")] = Path("runs"),
    folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Measure the evidence for claims, and store its figures."""
    from workbench.claims import tables
    from workbench.claims.claim import select_claims
    from workbench.claims.evidence import update, works
    from workbench.progress import progress_stages

    known = _load(folder)
    chosen = select_claims(known, ids or ())
    with progress_stages() as tell:
        measured, faults = update(known, works(known, chosen, model, missing), out, quick=quick, report_progress=tell)
    rows = [
        {"claim": claim.name, **tables.verdict_row(claim, trial, summary)}
        for claim, summary in measured if claim.name in chosen
        for trial in claim.trials if trial.owns(summary)
    ]  # fmt: skip
    if as_json:
        print_json({"claims": rows, "faults": faults, "quick": quick})
        raise typer.Exit(1 if faults else 0)
    cells = [tuple(row[name] for name in ("claim", "model", "verdict", "reason")) for row in rows]
    console().print(Table("", cells, ("claim", "model", "verdict", "reason"), tables.count_verdicts(rows)))
    for name, fault in faults.items():
        typer.echo(f"{name}: {fault}", err=True)
    if quick:
        typer.echo("a quick look: nothing is stored", err=True)
    raise typer.Exit(1 if faults else 0)


@app.command(epilog="Example: `workbench claims show prefill-linear`")
def show(
    id: Annotated[str, typer.Argument(metavar="ID", help="id of a claim")],
    folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Show everything about one claim: evidence, rule, our numbers and the sources' numbers, conditions, command."""
    from workbench.claims import tables
    from workbench.claims.claim import select_claims

    (claim,) = select_claims(_load(folder), [id]).values()
    found = tables.claim_detail(claim, f" --folder {shlex.quote(str(folder))}" if folder else "")
    if as_json:
        return print_json(found)
    out = console()
    out.print(f"[bold]{claim.name}[/]", highlight=False)
    out.print(claim.settings.says, markup=False)
    _print(tables.figures_table(found))
    for trial in found["trials"]:
        out.print(f"\n{trial['verdict']}", style="bold", markup=False)
        for name, words in tables.trial_lines(trial):
            out.print(f"  {name:9}{words}", markup=False, soft_wrap=True)
    for source in dict.fromkeys(trial["rule_source"] for trial in found["trials"]):
        out.print("\n" + source, markup=False, soft_wrap=True)
    for table in found["where"]:
        _print(Table(**table))


def _load(folder: Path | None) -> Any:
    from workbench.claims.claim import CLAIMS_FOLDER, load_claims

    return load_claims(folder or CLAIMS_FOLDER)


def _print(table: Table) -> None:
    console().print()
    console().print(table)
