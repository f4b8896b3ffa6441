"""`workbench runs` and `workbench compare`: list the runs of a folder, and compare them."""

from __future__ import annotations

import sys
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from workbench.cli.shared import OutputFormat, to_json
from workbench.display import Table, plain_value
from workbench.errors import WorkbenchError, cannot_write

MAX_CELL_WIDTH = 48  # characters of a cell in a terminal


class ComparisonFormat(StrEnum):
    TABLE = "table"
    MD = "md"
    CSV = "csv"
    JSON = "json"
    SVG = "svg"
    PNG = "png"


def runs(
    folder: Annotated[Path, typer.Argument(help="folder of run folders, sweeps or records")] = Path("runs"),
    where: Annotated[str | None, typer.Option(help="SQL condition, such as `cache.format = 'int8'`")] = None,
    columns: Annotated[
        str | None, typer.Option(help="columns or SQL expressions, separated by commas; * for all")
    ] = None,
    order_by: Annotated[str | None, typer.Option(help="columns to sort by; `NAME desc` sorts downwards")] = None,
    limit: Annotated[int | None, typer.Option(min=0, help="maximum number of rows")] = None,
    table: Annotated[
        str, typer.Option(help="runs, variants, or a table of run folders: requests, steps, tokens, ...")
    ] = "runs",
    sql: Annotated[
        str | None, typer.Option("--sql", help="a whole SELECT over the tables, in place of the options above")
    ] = None,
    names: Annotated[bool, typer.Option("--names", help="list the columns of the table, and nothing else")] = False,
    format: Annotated[OutputFormat, typer.Option(help="output format")] = OutputFormat.TABLE,
) -> None:
    """List runs by SQL. A setting is a column named by its path (cache.format), a measure by its name (ttft_s_p50).

    The listing shows the files now in the folder. SQL can read only these tables.
    """
    from workbench.runs.runs import as_table, open_runs

    found = open_runs(folder)
    if names:
        print("\n".join(found.column_names(table)))
        return
    if sql is not None and (where or columns or order_by or limit is not None):
        raise WorkbenchError("--sql: is a complete query; write WHERE, ORDER BY and LIMIT in it")
    wanted = None if columns is None else [columns]
    rows = found.query(sql) if sql else found.select(wanted, where, order_by, limit, table)
    shown = as_table(rows)
    match format:
        case OutputFormat.JSON:
            content = to_json([dict(zip(shown.headings, map(plain_value, row), strict=True)) for row in shown.rows])
        case OutputFormat.CSV:
            content = shown.csv()
        case OutputFormat.MD:
            content = shown.markdown()
        case OutputFormat.TABLE:
            content = f"{shown.text(None, MAX_CELL_WIDTH)}\n"
    sys.stdout.write(content)
    for problem in found.problems:
        print(f"not read: {problem}", file=sys.stderr)


def compare(
    run: Annotated[list[str], typer.Argument(help="run folders or records; RUN:VARIANT for one variant of a run")],
    baseline: Annotated[str, typer.Option(help="run or RUN:VARIANT that all others are compared with")],
    measure: Annotated[
        list[str] | None, typer.Option(help="measure to compare, such as ttft_s_p50; may be repeated")
    ] = None,
    pareto: Annotated[
        str | None, typer.Option(metavar="X,Y", help="two measures; append :min or :max if the direction is unknown")
    ] = None,
    format: Annotated[ComparisonFormat, typer.Option(help="output format")] = ComparisonFormat.TABLE,
    out: Annotated[Path | None, typer.Option(help="output file; needed for pictures")] = None,
    force: Annotated[bool, typer.Option("--force", help="also compare times measured under contention")] = False,
    separate: Annotated[bool, typer.Option("--separate", help="do not merge runs that differ only in seeds")] = False,
) -> None:
    """Compare runs with a baseline.

    Differences and ratios have bootstrap intervals over repetitions. Repetitions are the rounds of one run, compared in
    pairs if they were measured in turn, or runs that differ only in seeds.
    """
    from workbench.runs import compare as compare_runs

    if format in (ComparisonFormat.SVG, ComparisonFormat.PNG) and out is None:
        raise WorkbenchError(f"--format {format}: is a picture; give its file with --out")
    axes = [] if pareto is None else pareto.split(",")
    if pareto is not None and len(axes) != 2:
        raise WorkbenchError(f"--pareto {pareto}: must be two measures separated by a comma")
    names = measure or [axis.partition(":")[0] for axis in axes]
    found = compare_runs(run, baseline, names, force, separate)
    content = _content(found, axes, format)
    if out is None:
        sys.stdout.write(content.decode())
        return
    try:
        out.write_bytes(content)
    except OSError as error:
        raise cannot_write(f"--out {out}", error) from None


def _content(found, axes: list[str], format: ComparisonFormat) -> bytes:
    """Return a Comparison, or its Pareto front of two measures (`axes`), as the bytes of a file in this format."""
    from workbench.reports import comparison_charts as pictures

    if format in (ComparisonFormat.SVG, ComparisonFormat.PNG):
        chart = pictures.front_figure(found, axes[0], axes[1]) if axes else pictures.ratio_figure(found)
        return chart.render(format.value)
    rows = found.pareto(axes[0], axes[1]) if axes else found.as_dicts()
    values, shown = Table.from_dicts(rows), found.table()
    if axes:
        shown = replace(shown, rows=values.rows, headings=values.headings)
    match format:
        case ComparisonFormat.JSON:
            content = to_json({"baseline": found.baseline, "noisy_runs": list(found.noisy_runs), "rows": rows})
        case ComparisonFormat.CSV:
            content = values.csv()
        case ComparisonFormat.MD:
            content = shown.markdown()
        case _:
            content = f"{shown.text(None, MAX_CELL_WIDTH)}\n"
    return content.encode()
