"""Schemas of a record's tables. Times are raw seconds on the runner's clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa

from workbench.errors import WorkbenchError


def _schema(**columns: pa.DataType) -> pa.Schema:
    return pa.schema(list(columns.items()))


TEXT, COUNT, SECONDS, NUMBER = pa.string(), pa.int64(), pa.float64(), pa.float64()

SCHEMAS = {
    "requests.parquet": _schema(
        request_id=TEXT,
        sample=COUNT,
        arrival=SECONDS,
        submitted=SECONDS,
        first_scheduled=SECONDS,
        first_token=SECONDS,
        finished=SECONDS,
        prompt_tokens=COUNT,
        cut_tokens=COUNT,
        tenant=TEXT,
        priority=COUNT,
        output_tokens=COUNT,
        cached_tokens=COUNT,
        computed_tokens=COUNT,
        restored_tokens=COUNT,
        written_tokens=COUNT,
        shared_pages=COUNT,
        finish_reason=TEXT,
        error=TEXT,
        num_preemptions=COUNT,
        output_text=TEXT,
        token_ids=pa.list_(pa.int64()),
    ),
    "steps.parquet": _schema(
        time=SECONDS,
        step=COUNT,
        phase=TEXT,
        requests=COUNT,
        prefill_tokens=COUNT,
        decode_tokens=COUNT,
        pages_used=COUNT,
        kv_bytes=COUNT,
        wall_seconds=SECONDS,
        forward_seconds=SECONDS,
        note_seconds=SECONDS,
        predicted_flops=NUMBER,
        predicted_bytes=NUMBER,
        pages_idle=COUNT,
        compiles=COUNT,
        context_tokens=COUNT,
        drafted_tokens=COUNT,
        accepted_tokens=COUNT,
        draft_seconds=SECONDS,
        kernel_seconds=SECONDS,
        padding_rows=COUNT,
    ),
    "tokens.parquet": _schema(
        request_id=TEXT, sample=COUNT, index=COUNT, token_id=COUNT, time=SECONDS, logprob=NUMBER, step=COUNT
    ),
    "checks.parquet": _schema(
        time=SECONDS, step=COUNT, request_id=TEXT, sample=COUNT, drafted=COUNT, accepted=COUNT,
        token_ids=pa.list_(pa.int64()),
    ),  # fmt: skip
    "spans.parquet": _schema(
        time=SECONDS, step=COUNT, sequence=TEXT, start=COUNT, tokens=COUNT, drafted=COUNT
    ),
    "inputs.parquet": _schema(
        event=COUNT, time=SECONDS, step=COUNT, kind=TEXT, sequence=TEXT, tokens=COUNT, reason=TEXT
    ),
    "decisions.parquet": _schema(
        time=SECONDS, step=COUNT, request_id=TEXT, sample=COUNT, kind=TEXT, action=TEXT, reason=TEXT
    ),
}


def table_of(rows: Sequence[Mapping], schema: pa.Schema | None = None) -> pa.Table:
    """Build a table from rows: the schema's columns always, then further columns in order of appearance."""
    names = list(schema.names) if schema else []
    names = list(dict.fromkeys([*names, *(key for row in rows for key in row)]))
    columns = {}
    for name in names:
        kind = schema.field(name).type if schema and name in schema.names else None
        columns[name] = _column(name, [row.get(name) for row in rows], kind)
    return pa.table(columns)


def _column(name: str, values: list, kind: pa.DataType | None) -> pa.Array:
    try:
        return pa.array(values, type=kind)
    except UnicodeEncodeError:  # a lone surrogate, which UTF-8 cannot hold
        plain = [v.encode("utf-8", "replace").decode() if isinstance(v, str) else v for v in values]
        return pa.array(plain, type=kind)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise WorkbenchError(f"column {name!r}: {error}") from error
