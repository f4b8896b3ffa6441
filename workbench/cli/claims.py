"""`workbench claims`: the ledger of claims made in publications, with verdicts derived from measurements."""

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
    rows = tables.claim_rows(*_claims_and_ledger(folder), verdict)
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
    quick: Annotated[bool, typer.Option("--quick", help="measure less, and record nothing")] = False,
    missing: Annotated[bool, typer.Option("--missing", help="measure only claims without a record")] = False,
    from_records: Annotated[
        bool, typer.Option("--from-records", help="judge existing records without measuring")
    ] = False,
    records: Annotated[
        Path | None, typer.Option(help="folder of the records; records/ beside the claims' folder unless given")
    ] = None,
    out: Annotated[Path, typer.Option(help="folder in which run folders are created")] = Path("runs"),
    folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Measure the evidence for claims, store the records, and write the ledger."""
    from workbench.claims.update import update_ledger
    from workbench.progress import progress_stages

    place = folder or _home()
    with progress_stages() as tell:
        renewed = update_ledger(
            place, ids or (), records or place.parent / "records", out, missing=missing, measure=not from_records,
            quick=quick, report_progress=tell,
        )  # fmt: skip
    from workbench.claims import tables

    rows = tables.claim_rows(renewed.claims, renewed.ledger)
    if as_json:
        print_json({"claims": rows, "faults": renewed.failures, "quick": quick})
        raise typer.Exit(1 if renewed.failures else 0)
    cells = [(row["claim"], row["verdict"], row["reason"] or row["remark"]) for row in rows]
    console().print(Table("", cells, ("claim", "verdict", "reason"), tables.count_verdicts(rows)))
    for name, fault in renewed.failures.items():
        typer.echo(f"{name}: {fault}", err=True)
    if quick:
        typer.echo("a quick look: neither recorded nor in the ledger", err=True)
    raise typer.Exit(1 if renewed.failures else 0)


@app.command(epilog="Example: `workbench claims show prefill-linear`")
def show(
    id: Annotated[str, typer.Argument(metavar="ID", help="id of a claim")],
    picture: Annotated[
        Path | None, typer.Option(help="only write the picture of its run to this .svg or .png file")
    ] = None,
    folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Show everything about one claim: evidence, rule, our numbers and the sources' numbers, conditions, command.

    The records are read from records/ beside the claims' folder.
    """
    from workbench.claims import tables
    from workbench.claims.ledger import RecordFolder
    from workbench.claims.registry import select_claims
    from workbench.claims.tables import draw_claim

    place = folder or _home()
    known, ledger = _claims_and_ledger(folder)
    (claim,) = select_claims(known, [id]).values()
    records = RecordFolder(place.parent / "records", place.parent)
    if picture is not None:
        return draw_claim(claim, records, picture)
    option = f" --folder {shlex.quote(str(folder))}" if folder else ""
    found = tables.claim_detail(claim, ledger, records, option)
    if as_json:
        return print_json(found)
    out = console()
    out.print(f"[bold]{claim.id}[/]", highlight=False)
    out.print(claim.says, markup=False)
    _print(tables.figures_table(claim, tables.claim_entries(claim, ledger)))
    for trial in found["trials"]:
        out.print(f"\n{trial['verdict']}", style="bold", markup=False)
        for name, words in tables.trial_lines(trial):
            out.print(f"  {name:9}{words}", markup=False, soft_wrap=True)
    if found["picture"]:
        out.print(f"\npicture  {found['picture']}", markup=False, soft_wrap=True)
    for source in dict.fromkeys(trial["rule_source"] for trial in found["trials"]):
        out.print("\n" + source, markup=False, soft_wrap=True)
    for table in found["where"]:
        _print(Table(**table))


def _home() -> Path:
    from workbench.claims.registry import CLAIMS_FOLDER

    return CLAIMS_FOLDER


def _claims_and_ledger(folder: Path | None) -> tuple[Any, Any]:
    from workbench.claims.ledger import LEDGER_FILE, read_ledger
    from workbench.claims.registry import load_claims

    place = folder or _home()
    return load_claims(place), read_ledger(place / LEDGER_FILE)


def _print(table: Table) -> None:
    console().print()
    console().print(table)
