"""`workbench replay`: repeat a request that a server answered."""

from __future__ import annotations

from dataclasses import replace as replaced
from pathlib import Path
from typing import Annotated

import typer

from workbench.cli.shared import AsJson, backend_errors, print_json
from workbench.errors import WorkbenchError


def replay(
    call_id: Annotated[str, typer.Argument(metavar="ID", help="id of an answer, as the server returned it")],
    folder: Annotated[Path, typer.Option("--from", help="the server's `replay_folder`")] = Path("replays"),
    as_json: AsJson = False,
) -> None:
    """Repeat a request that a server answered.

    It runs with the requests that shared its steps, in the recorded steps. Exit status 0: equal tokens; 1: other
    tokens; 2: it cannot run."""
    from workbench.cluster.replica import fingerprint_of
    from workbench.engine.loaded_model import LoadedModel
    from workbench.progress import discard, to_stderr
    from workbench.serve.watch.kept_requests import KeptCall, describe_software

    call = KeptCall.read(folder, call_id)
    if not call.head["loads"]:
        path = f"/v1/traces/{call_id}/replay"
        raise WorkbenchError(f"replay: {call_id} was answered by a model in memory; its server replays it: POST {path}")
    with backend_errors():
        model = LoadedModel.load(call.config, discard if as_json else to_stderr)
        try:
            work = call.work(model)
            found = work.run()
        finally:
            model.close()
    then, now = call.head["software"], describe_software()
    remarks = [f"{name} was {then[name]}, is {now[name]}" for name in now if then[name] != now[name]]
    if fingerprint_of(work.runner, call.config) != call.head["fingerprint"]:
        remarks.append("the weights differ from those that gave the answer")
    found = replaced(found, remarks=(*found.remarks, *remarks))
    if as_json:
        print_json(found.as_dict())
    else:
        print(found)
    raise typer.Exit(0 if found.identical else 1)
