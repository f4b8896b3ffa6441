"""`workbench usage`: sum the accounts of a server by key, tenant, model and day."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from workbench.cli.shared import AsJson, print_json, say
from workbench.display import Table


def usage(
    by: Annotated[
        str, typer.Option(help="columns: day, key, tenant, model, dialect, ended, id; separated by commas")
    ] = "key,day",
    since: Annotated[str, typer.Option(metavar="DAY", help="first day to count, in UTC, such as 2026-11-23")] = "",
    key: Annotated[str, typer.Option(help="count only the key with this id")] = "",
    tenant: Annotated[str, typer.Option(help="count only the tenant of this name")] = "",
    file: Annotated[
        Path, typer.Option(metavar="FILE", help="accounting file (`accounting.file` of the gateway)")
    ] = Path("usage.sqlite"),
    as_json: AsJson = False,
) -> None:
    """Sum calls, tokens by kind and costs. A call costs what its tokens cost at its time; sums are exact."""
    from workbench.economics.prices import KINDS, format_money
    from workbench.gateway.accounting import currency_of, open_accounts, sum_calls

    names = tuple(filter(None, by.split(",")))
    where = {name: value for name, value in (("key", key), ("tenant", tenant)) if value}
    with open_accounts(file) as accounts:
        rows, currency = sum_calls(accounts, names, since, where), currency_of(accounts)
    if as_json:
        print_json([row.as_dict(names) for row in rows])
        return
    headings = (*names, "calls", *KINDS, "kept", f"cost ({currency})" if currency else "cost")
    cells = [
        (*row.group, row.calls, *(count for _, count in row.usage), row.kept, format_money(row.cost, 6)) for row in rows
    ]
    note = "" if rows else "no calls yet" if not (since or where) else "no such calls"
    say(Table(str(file), cells, headings, note=note, left=names))
