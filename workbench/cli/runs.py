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
    folder: Annotated[Path, typer.Argument(help="where run folders, sweeps or records are")] = Path("runs"),
    where: Annotated[str | None, typer.Option(help="an SQL condition, as `cache.format = 'int8'`")] = None,
    columns: Annotated[str | None, typer.Option(help="names or SQL expressions, between commas; * is all")] = None,
    order_by: Annotated[str | None, typer.Option(help="names, each with `desc` where wanted")] = None,
    limit: Annotated[int | None, typer.Option(min=0, help="so many rows at most")] = None,
    table: Annotated[
        str, typer.Option(help="runs, variants, or what run folders hold: requests, steps, tokens, ...")
    ] = "runs",
    sql: Annotated[str | None, typer.Option("--sql", help="a whole SELECT over the tables, in place of these")] = None,
    names: Annotated[bool, typer.Option("--names", help="list the columns of the table, and nothing else")] = False,
    format: Annotated[OutputFormat, typer.Option(help="how to print it")] = OutputFormat.TABLE,
) -> None:
    """List runs by SQL. A setting is a column by its path (cache.format), a measure by its name (ttft_s_p50).

    The listing shows the folder's present files. SQL can read these tables and nothing else.
    """
    from workbench.runs.runs import as_table, open_runs

    found = open_runs(folder)
    if names:
        print("\n".join(found.column_names(table)))
        return
    if sql is not None and (where or columns or order_by or limit is not None):
        raise WorkbenchError("--sql: is a whole query; write WHERE, ORDER BY and LIMIT in it")
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
    baseline: Annotated[str, typer.Option(help="the run, or RUN:VARIANT, that all are held against")],
    measure: Annotated[list[str] | None, typer.Option(help="as ttft_s_p50; may be repeated")] = None,
    pareto: Annotated[
        str | None, typer.Option(metavar="X,Y", help="two measures, each with :min or :max where its name does not say")
    ] = None,
    format: Annotated[ComparisonFormat, typer.Option(help="how to show it")] = ComparisonFormat.TABLE,
    out: Annotated[Path | None, typer.Option(help="write it to this file; pictures need one")] = None,
    force: Annotated[bool, typer.Option("--force", help="also times measured under contention")] = False,
    separate: Annotated[
        bool, typer.Option("--separate", help="hold runs apart that differ in seeds at most, and so repeat each other")
    ] = False,
) -> None:
    """Compare runs with a baseline: differences and ratios, with bootstrap intervals over repetitions.

    Repetitions are the rounds of one run, pair by pair where they were measured in turn, or runs that differ in seeds.
    """
    from workbench.runs import compare as compare_runs

    if format in (ComparisonFormat.SVG, ComparisonFormat.PNG) and out is None:
        raise WorkbenchError(f"--format {format}: is a picture; name its file with --out")
    axes = [] if pareto is None else pareto.split(",")
    if pareto is not None and len(axes) != 2:
        raise WorkbenchError(f"--pareto {pareto}: must be two measures with a comma between")
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
    """Format `found`, a Comparison, or with two axes its Pareto front."""
    from workbench.measure.chart import render_chart
    from workbench.reports import comparison_charts as pictures

    if format in (ComparisonFormat.SVG, ComparisonFormat.PNG):
        chart = pictures.pareto_chart(found, axes[0], axes[1]) if axes else pictures.ratio_chart(found)
        return render_chart(chart, format.value)
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
