"""`workbench keys`: create, list, rotate and revoke the keys of a server."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from workbench.cli.shared import AsJson, print_json, say
from workbench.display import Table

if TYPE_CHECKING:
    from workbench.gateway.keys import ApiKey

app = typer.Typer(help="Create, list, rotate and revoke the keys of a server.", no_args_is_help=True)
KeyFileOption = Annotated[Path, typer.Option("--file", metavar="FILE", help="file of keys, created if missing")]
Id = Annotated[str, typer.Argument(help="the key's id, as `list` shows it")]
DEFAULT_FILE = Path("keys.json")


@app.command(epilog="Example: `workbench keys create alice --models demo,demo-chat --days 30`")
def create(
    owner: Annotated[str, typer.Argument(help="the tenant: keys of one owner share cached prefixes, budget and usage")],
    name: Annotated[str, typer.Option(help="name of the key, for people to read")] = "",
    models: Annotated[str, typer.Option(help="models that the key may use, separated by commas; * for all")] = "*",
    admin: Annotated[bool, typer.Option("--admin", help="let the key see the keys and usage of all owners")] = False,
    days: Annotated[float | None, typer.Option(min=0, help="days until the key expires; never unless given")] = None,
    file: KeyFileOption = DEFAULT_FILE,
    as_json: AsJson = False,
) -> None:
    """Make a key and print it. The key is shown once: the file keeps its hash."""
    from workbench.gateway.keys import KeyStore

    names = [each for each in models.split(",") if each]
    key, text = KeyStore(file).create(owner, name, names, admin, days)
    _show(key, text, file, as_json)


def _show(key: ApiKey, text: str, file: Path, as_json: bool) -> None:
    """Print a key's text alone on standard output, for scripts, and its description on standard error."""
    if as_json:
        print_json({"id": key.id, "key": text, "owner": key.owner})
        return
    print(text)
    models = ", ".join(key.models) if key.models != ("*",) else "all models"
    said = f"key {key.id} of {key.owner}, for {models}; its hash is in {file}. Keep the text: it is not shown again."
    typer.echo(said, err=True)


@app.command("list", epilog="Example: `workbench keys list`")
def list_keys(file: KeyFileOption = DEFAULT_FILE, as_json: AsJson = False) -> None:
    """List the keys without their secret texts."""
    from workbench.gateway.keys import KeyStore

    keys, now = KeyStore(file).list(), time.time()
    if as_json:
        listed = (each.model_dump(mode="json", exclude={"credentials"}) | {"state": each.state(now)} for each in keys)
        print_json(list(listed))
        return
    rows = [
        (each.id, each.owner, each.name, ",".join(each.models), "yes" if each.admin else "", each.state(now),
         datetime.fromtimestamp(each.created, UTC).date().isoformat())
        for each in keys
    ]  # fmt: skip
    headings = ("id", "owner", "name", "models", "admin", "state", "created")
    say(Table(str(file), rows, headings, note="" if rows else "no keys: `workbench keys create OWNER`"))


@app.command(epilog="Example: `workbench keys rotate 1a2b3c4d --hours 48`")
def rotate(
    id: Id,
    hours: Annotated[float, typer.Option(min=0, help="hours for which the key's old text stays valid")] = 24.0,
    days: Annotated[float | None, typer.Option(min=0, help="days until the key's new text expires")] = None,
    file: KeyFileOption = DEFAULT_FILE,
    as_json: AsJson = False,
) -> None:
    """Replace the text of a key and print the new text. Limits, usage and owner stay the same."""
    from workbench.gateway.keys import KeyStore

    key, text = KeyStore(file).rotate(id, hours, days)
    _show(key, text, file, as_json)


@app.command(epilog="Example: `workbench keys revoke 1a2b3c4d`")
def revoke(id: Id, file: KeyFileOption = DEFAULT_FILE, as_json: AsJson = False) -> None:
    """Revoke a key at once, also in running servers."""
    from workbench.gateway.keys import KeyStore

    key = KeyStore(file).revoke(id)
    print_json({"id": key.id, "state": "revoked"}) if as_json else print(f"{key.id} of {key.owner}: revoked")
