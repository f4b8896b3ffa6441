"""`workbench claims`: the ledger of claims made by texts of the field, with verdicts derived from numbers."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from workbench.cli.shared import AsJson, console, print_json
from workbench.errors import WorkbenchError, nearest

app = typer.Typer(help="The ledger of claims.", invoke_without_command=True, rich_markup_mode="markdown")


class LedgerFormat(StrEnum):
    TABLE = "table"
    MD = "md"
    JSON = "json"


WIDTHS = {"claim": 24, "statement": 36, "verdict": 17, "machine": 22, "level": 7, "elsewhere": 20}  # letters

Folder = Annotated[Path | None, typer.Option(help="the claims' folder; the workbench's own unless given")]
Ids = Annotated[list[str] | None, typer.Argument(metavar="[ID]...", help="claims; all unless given")]


@app.callback(epilog="Example: `workbench claims --verdict refuted --format md`")
def claims(
    context: typer.Context,
    format: Annotated[LedgerFormat, typer.Option(help="how the ledger is printed")] = LedgerFormat.TABLE,
    verdict: Annotated[
        str | None,
        typer.Option(help="holds, holds-with-limits, refuted, not-testable-here, 'not run yet' or 'no test'"),
    ] = None,
    folder: Folder = None,
) -> None:
    """Print the ledger: each claim, its verdict, and the machine of the verdict."""
    if context.invoked_subcommand is not None:
        return
    from workbench.claims import tables

    if verdict is not None and verdict not in tables.ORDER:
        raise WorkbenchError(f"--verdict {verdict}: is none{nearest(verdict, tables.ORDER)}; {', '.join(tables.ORDER)}")
    rows = tables.claim_rows(*_claims_and_ledger(folder), verdict)
    if format is LedgerFormat.JSON:
        print_json(rows)
    elif format is LedgerFormat.MD:
        print(_markdown(tables.HEADINGS, (tables.row_cells(row) for row in rows)), end="")
        print(f"\n{tables.count_verdicts(rows)}")
    else:
        _print(tables.HEADINGS, (tables.row_cells(row) for row in rows), one_line=True)
        console().print(tables.count_verdicts(rows))


@app.command(epilog="Example: `workbench claims run kv-gqa`, `workbench claims run --missing`")
def run(
    ids: Ids = None,
    quick: Annotated[bool, typer.Option("--quick", help="a first look: less is measured, nothing is recorded")] = False,
    missing: Annotated[bool, typer.Option("--missing", help="measure only what has no record yet")] = False,
    from_records: Annotated[
        bool, typer.Option("--from-records", help="measure nothing: judge the records that are there")
    ] = False,
    records: Annotated[
        Path | None, typer.Option(help="folder of the records; experiments/records unless given")
    ] = None,
    out: Annotated[Path, typer.Option(help="folder in which run folders are made")] = Path("runs"),
    folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Measure the evidence of claims, store the records, and write the ledger."""
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
    _print(("claim", "verdict", "reason"), ((row["claim"], row["verdict"], row["reason"]) for row in rows))
    console().print(tables.count_verdicts(rows))
    for name, fault in renewed.failures.items():
        typer.echo(f"{name}: {fault}", err=True)
    if quick:
        typer.echo("a quick look: neither recorded nor in the ledger", err=True)
    raise typer.Exit(1 if renewed.failures else 0)


@app.command(epilog="Example: `workbench claims show prefill-linear`")
def show(
    id: Annotated[str, typer.Argument(metavar="ID", help="a claim")],
    picture: Annotated[
        Path | None, typer.Option(help="draw its run's picture into this file, .svg or .png, and print nothing")
    ] = None,
    folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Show everything about one claim: evidence, rule, our figures beside the sources', conditions, command."""
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
    found = tables.claim_detail(claim, ledger, records)
    if as_json:
        return print_json(found)
    out = console()
    out.print(f"[bold]{claim.id}[/]", highlight=False)
    out.print(claim.says, markup=False)
    figures = tables.figures_table(claim, tables.claim_entries(claim, ledger))
    _print(figures.headings, figures.rows, figures.title)
    for trial in found["trials"]:
        out.print(f"\n{trial['verdict']}", style="bold", markup=False)
        for name, words in tables.trial_lines(trial):
            out.print(f"  {name:9}{words}", markup=False, soft_wrap=True)
    if found["picture"]:
        out.print(f"\npicture  {found['picture']}", markup=False, soft_wrap=True)
    for source in dict.fromkeys(trial["rule_source"] for trial in found["trials"]):
        out.print("\n" + source, markup=False, soft_wrap=True)
    for table in found["where"]:
        _print(table["headings"], table["rows"], table["title"])


def _home() -> Path:
    from workbench.claims.registry import CLAIMS_FOLDER

    return CLAIMS_FOLDER


def _claims_and_ledger(folder: Path | None) -> tuple[Any, Any]:
    from workbench.claims.ledger import LEDGER_FILE, read_ledger
    from workbench.claims.registry import load_claims

    place = folder or _home()
    return load_claims(place), read_ledger(place / LEDGER_FILE)


def _print(
    headings: Iterable[str], rows: Iterable[Iterable[str]], title: str | None = None, one_line: bool = False
) -> None:
    """Print a table; with `one_line` long cells end in an ellipsis."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    out = console()
    if title:
        out.print(Text(f"\n{title}", style="bold"), soft_wrap=True)
    table = Table(*headings, box=box.SIMPLE_HEAD, pad_edge=False)
    for column in table.columns if one_line else ():
        column.no_wrap = True
        column.min_width = column.max_width = WIDTHS[str(column.header)]
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    out.print(table)


def _markdown(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    headings = list(headings)
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |\n" for line in lines)
