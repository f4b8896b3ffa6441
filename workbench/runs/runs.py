"""Query a folder of runs as a database built from its current files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from workbench.display import MAX_TABLE_ROWS, Displayable, Table
from workbench.errors import WorkbenchError
from workbench.runs import columns, sql
from workbench.runs.listing import list_runs
from workbench.runs.locations import find_runs
from workbench.runs.rows import run_rows, variant_rows

RUNS, VARIANTS = "runs", "variants"
DEFAULT_COLUMNS = (
    "run", "variant", "date", "model", "backend", "machine", "verdict", "ttft_s_p50", "tpot_s_p50",
    "output_tokens_per_s", "state",
)  # fmt: skip


class Runs(Displayable):
    """The tables of a folder of runs, for queries.

    `runs` has one row per run; `variants` has one row per variant, or the run's row if it has none. Each Parquet table
    of run folders (`requests`, `steps`, `tokens`, `decisions`, ...) also has a column `run` and the columns of `runs`.

    A setting is a column by its dotted path (`cache.format`), a measure by its joined names (`ttft_s_p50`); environment
    entries begin with `environment.`. Files are read when a table is first used.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self._places = find_runs(folder)
        self._connection = sql.connect()
        self._names: dict[str, list[str]] = {}
        self._listed = pa.table({})
        self.problems: list[str] = []  # runs' tables that could not be read, with the reasons

    @property
    def tables(self) -> list[str]:
        """Return the names of the tables."""
        found = {name.removesuffix(".parquet") for p in self._places for name in p.files if name.endswith(".parquet")}
        return [RUNS, VARIANTS, *sorted(name for name in found if name.isidentifier())]

    def column_names(self, table: str = RUNS) -> list[str]:
        """Return the columns of a table."""
        if table not in self._names:
            if table not in self.tables:
                raise WorkbenchError(f"no table {table!r} in {self.folder}; there are {', '.join(self.tables)}")
            self._names[table] = self._make_table(table)
        return self._names[table]

    def query(self, select: str) -> pa.Table:
        """Return the result of one SELECT over the tables.

        Raises WorkbenchError for any other statement and for unknown names.
        """
        tables = [table for table in self.tables if re.search(rf"\b{table}\b", select)]
        names = list(dict.fromkeys(name for table in tables for name in self.column_names(table)))
        with sql.translate_errors("query", select, names):
            quoted = sql.quote_columns(select, names)
            sql.require_select(quoted)
            return self._connection.sql(quoted).to_arrow_table()

    def select(
        self,
        columns: Sequence[str] | None = None,
        where: str | None = None,
        order_by: str | None = None,
        limit: int | None = None,
        table: str = RUNS,
    ) -> pa.Table:
        """Return columns of one table for the rows that match a condition.

        Args:
            columns: names or SQL expressions; default: the most useful columns with values.
            where: an SQL condition.
            order_by: names, optionally with `desc`; default: by the runs' names.
            limit: maximum number of rows.
            table: a name in `tables`.

        Raises:
            WorkbenchError: for an unknown column, with the nearest names, or an error in the SQL.
        """
        names = self.column_names(table)
        found = self._connection.table(table)
        if where:
            with sql.translate_errors("--where", where, names):
                found = found.filter(sql.quote_columns(where, names))
        if order_by:
            with sql.translate_errors("--order-by", order_by, names):
                found = found.order(sql.quote_columns(order_by, names))
        if limit is not None:
            found = found.limit(limit)
        wanted = list(columns or self._default_columns(table))
        with sql.translate_errors("--columns", ", ".join(wanted), names):
            found = found.project(", ".join(sql.quote_columns(name, [*names]) for name in wanted))
        with sql.translate_errors("query", where or "", names):
            read = found.to_arrow_table()
        return read if columns else _drop_empty_columns(read)

    def _default_columns(self, table: str) -> list[str]:
        if table in (RUNS, VARIANTS):
            return [
                name
                for name in DEFAULT_COLUMNS
                if name in self.column_names(table) and (name != "variant" or table == VARIANTS)
            ]
        return [columns.quote_identifier(name) for name in self._connection.table(f"own {table}").columns]

    def _make_table(self, table: str) -> list[str]:
        if table == RUNS:
            self._listed, names = list_runs(self.folder, self._places)
            self._connection.register(f"raw {table}", self._listed)
            self._connection.execute(f'CREATE VIEW {table} AS SELECT * FROM "raw {table}"').fetchall()
            return names
        if table == VARIANTS:
            return self._variants()
        own = self._read(table)
        self.column_names(RUNS)
        self._connection.register(f"own {table}", own)
        mine = {name.lower() for name in own.column_names}
        others = [name for name in self.column_names(RUNS) if name.lower() not in mine]
        joined = ", ".join(["own.*", *("runs." + columns.quote_identifier(name) for name in others)])
        self._connection.execute(
            f"CREATE VIEW {columns.quote_identifier(table)} AS SELECT {joined} "
            f'FROM "own {table}" AS own JOIN runs USING (run)'
        ).fetchall()
        return [*own.column_names, *others]

    def _variants(self) -> list[str]:
        whole, structures = columns.infer_structures(list(variant_rows(run_rows(self._places))))
        self._connection.register(f"raw {VARIANTS}", whole)
        made, names = columns.select_columns(columns.quote_identifier(f"raw {VARIANTS}"), structures)
        self._connection.execute(f"CREATE VIEW {VARIANTS} AS {made}").fetchall()
        return names

    def _read(self, table: str) -> pa.Table:
        """Concatenate the Parquet tables of this name, with a column `run`."""
        found = []
        for place in self._places:
            if f"{table}.parquet" in place.files:
                try:
                    read = pq.read_table(f"{place.path}/{table}.parquet")
                except (pa.ArrowException, OSError) as error:
                    self.problems.append(f"{place.name}: {table}.parquet is damaged ({str(error).splitlines()[0]})")
                    continue
                found.append(read.add_column(0, "run", pa.array([place.name] * read.num_rows, pa.string())))
        try:
            return pa.concat_tables(found, promote_options="permissive")
        except pa.ArrowException as error:
            raise WorkbenchError(f"{table}: runs disagree ({str(error).splitlines()[0]}); name one run") from None

    def __repr__(self) -> str:
        return f"Runs({str(self.folder)!r}: {self._count:,} runs; tables {', '.join(self.tables)})"

    @property
    def _count(self) -> int:
        self.column_names(RUNS)
        return self._listed.num_rows

    def _display_table(self) -> Table:
        return as_table(self.select(limit=MAX_TABLE_ROWS), repr(self), "; ".join(self.problems))


def open_runs(folder: Path | str = "runs") -> Runs:
    """Open the runs at or below `folder`: run folders, folders of a sweep's points, and records in single JSON files.

    workbench.open_runs("runs").select(["run", "cache.format", "tpot_s_p50"], where="model = 'demo'")
    """
    return Runs(folder)


def _drop_empty_columns(found: pa.Table) -> pa.Table:
    """Drop columns without values, and `state` if every run is complete."""
    kept = [name for name in found.column_names if found[name].null_count < max(found.num_rows, 1) or name == "run"]
    if "state" in kept and set(found["state"].to_pylist()) <= {"complete"}:
        kept.remove("state")
    return found.select(kept)


def as_table(found: pa.Table, title: str = "", note: str = "") -> Table:
    """Convert an Arrow table to a table for display."""
    return Table(
        title, list(zip(*map(pa.ChunkedArray.to_pylist, found.columns), strict=True)), found.column_names, note
    )
