"""Run read-only SQL over tables in memory, with settings named as in `--set`, and with errors of one line."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import duckdb

from workbench.errors import WorkbenchError

READ_ONLY_SETTINGS = {
    "enable_external_access": False,
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
    "allow_community_extensions": False,
    "python_enable_replacements": False,  # do not read this process's variables as tables
    "lock_configuration": True,
}
# String literals, quoted names and comments are skipped; other dotted names are columns.
SQL_TOKEN = re.compile(r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|--[^\n]*|/\*.*?\*/|[A-Za-z_]\w*(?:\.\w+)+", re.DOTALL)
UNKNOWN_COLUMN = re.compile(r'(?:Referenced column|column named) "([^"]+)"')
MAX_SUGGESTIONS = 3


def connect() -> duckdb.DuckDBPyConnection:
    """Open an in-memory database without access to files or the network and with a locked configuration."""
    return duckdb.connect(config={name: str(value).lower() for name, value in READ_ONLY_SETTINGS.items()})


def quote_columns(sql: str, names: Sequence[str]) -> str:
    """Return `sql` with quotes around every dotted name that is a column; a measure may be written with dots in place
    of underscores."""
    known = {name.lower(): name for name in names}

    def quoted(found: re.Match[str]) -> str:
        word = found[0].lower()
        name = known.get(word) or known.get(word.replace(".", "_"))
        return '"' + name.replace('"', '""') + '"' if name and word[0] not in "'\"-/" else found[0]

    return SQL_TOKEN.sub(quoted, sql)


def require_select(sql: str) -> None:
    """Raise WorkbenchError unless `sql` is one SELECT."""
    found = duckdb.extract_statements(sql)
    if len(found) != 1 or found[0].type != duckdb.StatementType.SELECT:
        raise WorkbenchError(f"{sql!r}: must be one SELECT; runs are read here, never changed")


@contextmanager
def translate_errors(source: str, sql: str, names: Sequence[str]) -> Iterator[None]:
    """Translate DuckDB's errors to WorkbenchError: an unknown column with the nearest names, other errors as DuckDB's
    first line.
    """
    try:
        yield
    except duckdb.Error as error:
        text = str(error)
        if (unknown := _unknown(text, sql, names)) is not None:
            raise WorkbenchError(f"{source}: no column {unknown!r}{suggest_columns(unknown, names)}") from None
        raise WorkbenchError(f"{source}: {_first(text)}") from None


def suggest_columns(word: str, names: Sequence[str]) -> str:
    """Return a sentence that suggests the names nearest to `word`, those that contain it first; without near names, it
    says how to list all names."""
    lower = word.lower()
    around = [name for name in names if lower in re.split(r"[._]", name.lower()) or name.lower().endswith(f".{lower}")]
    close = list(
        dict.fromkeys(
            [*sorted(around, key=len), *difflib.get_close_matches(word, names, n=MAX_SUGGESTIONS, cutoff=0.6)]
        )
    )
    if not close:
        return "; `workbench runs --names` lists all columns, with `--table variants` the columns of variants"
    return "; did you mean " + " or ".join(map(repr, close[:MAX_SUGGESTIONS])) + "?"


def _unknown(text: str, sql: str, names: Sequence[str]) -> str | None:
    known = {name.lower() for name in names}
    if found := UNKNOWN_COLUMN.search(text):
        return found[1]
    if "Referenced table" in text or "Catalog Error: Table" in text:
        dotted = [piece for piece in SQL_TOKEN.findall(sql) if piece[0] not in "'\"-/"]
        return next((piece for piece in dotted if piece.lower() not in known), None)
    return None


def _first(text: str) -> str:
    """Return the first line of an error, without DuckDB's advice and picture."""
    line: Any = text.split("\n")[0]
    hint = ""
    if "Could not convert string" in text:
        hint = "; this column holds text too: compare it with a text, in single quotes"
    return line.removesuffix("!") + hint
