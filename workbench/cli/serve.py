"""`workbench serve`: serve a model by OpenAI's and Anthropic's protocols."""

from __future__ import annotations

import resource
import signal
import sys
from contextlib import ExitStack
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workbench.cli.shared import AsJson, backend_errors, print_json, settings_option, speaking_model
from workbench.errors import WorkbenchError, nearest

if TYPE_CHECKING:
    from workbench.serve.config import ServeConfig
    from workbench.serve.gate import Gate

OWN_SECTIONS = ("served_name", "models", "server", "gateway")  # sections that only a server's file has
DEFAULTS: dict[str, Any] = {"cache": {"prefix": "radix"}}  # defaults of a server that is started with a model's name


def serve(
    model: Annotated[
        str | None,
        typer.Argument(help="a model, or a YAML file of server settings or an experiment; default: smollm2 if fetched"),
    ] = None,
    port: Annotated[int | None, typer.Option(help="port; 0 takes any free one, 8000 unless the file says")] = None,
    set_: Annotated[
        list[str] | None, settings_option("cache.format, server.host (127.0.0.1 by default)", where="")
    ] = None,
    replicas: Annotated[
        int,
        typer.Option(
            min=1, help="number of engines, each in a process; 1 runs in this process unless --address is given"
        ),
    ] = 1,
    router: Annotated[str, typer.Option(help="routing rule: prefix, session, least_loaded or round_robin")] = "prefix",
    address: Annotated[str | None, typer.Option(help="address of a Ray cluster; this machine unless given")] = None,
    prefill: Annotated[int, typer.Option(help="number of engines for prefill only; needs --decode")] = 0,
    decode: Annotated[int, typer.Option(help="number of engines for decode only; needs --prefill")] = 0,
    as_json: AsJson = False,
) -> None:
    """Serve a model over HTTP until SIGTERM or Ctrl-C.

    Requests in progress finish first. Every setting of an engine is one of the server: `--set cache.format=int4`
    serves from a cache of four bits.
    """
    from workbench.cluster.cluster import Cluster
    from workbench.cluster.pools_replica import PoolsLauncher
    from workbench.engine.runner import Runner
    from workbench.progress import discard, to_stderr
    from workbench.serve.served_model import ServedModel
    from workbench.serve.server import Server, served_name_of

    overrides = [*(set_ or ()), *([] if port is None else [f"server.port={port}"])]
    report = discard if as_json else to_stderr
    config = read_serve_config(model or speaking_model(None, report), tuple(overrides))
    gate = gate_of(config)
    with backend_errors():
        engines: dict[str, Runner | Cluster] = {}
        for name, each in (("", config), *config.models.items()):
            if prefill or decode:
                if replicas > 1 or address is not None:
                    raise WorkbenchError("--prefill and --decode run on this machine; remove --replicas and --address")
                engine = Cluster(each, 1, router, launcher=PoolsLauncher(prefill, decode), report=report)
            elif replicas > 1 or address is not None:
                engine = Cluster(each, replicas, router, address=address, report=report)
            else:
                engine = Runner(each, report=report)
            engines[name or config.served_name or served_name_of(engine)] = engine
    most = config.server.default_max_tokens
    models = {name: ServedModel(name, engine, most) for name, engine in engines.items()}
    _allow_many_connections()
    server = Server(models, gate, config.server)
    if as_json:
        print_json({"url": server.url, "models": list(models)})
    else:
        print(f"{', '.join(models)} at {server.url}; press Ctrl-C to stop", flush=True)
    clusters = [engine for engine in engines.values() if isinstance(engine, Cluster)]
    if clusters:  # the signal ends the server first, then the processes of the clusters
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with ExitStack() as closing:  # closes in reverse order; each is closed even if another fails
        for cluster in clusters:
            closing.callback(cluster.close)
        server.run()


def read_serve_config(model: str, overrides: tuple[str, ...]) -> ServeConfig:
    """Return the server settings that `model` describes: a model's name, a server's file, or an experiment's file,
    whose engine is served. Raises WorkbenchError for anything else."""
    from pydantic import ValidationError

    from workbench.errors import explain
    from workbench.experiment.experiment import Experiment, apply_override
    from workbench.files import read_bytes, read_yaml
    from workbench.serve.config import ServeConfig

    values: Any = {"model": model, **deepcopy(DEFAULTS)}  # overrides change these values in place
    if model.endswith((".yaml", ".yml")):
        values = read_yaml(read_bytes(Path(model)), model)
        if not isinstance(values, dict):
            raise WorkbenchError(f"{model}: must be a mapping of settings, not {type(values).__name__}")
    for override in overrides:
        _check_model(values, override)
        apply_override(values, override)
    if "question" in values:
        own = {name: values.pop(name) for name in OWN_SECTIONS if name in values}
        engine = Experiment.from_values(values, model).engine
        values = {name: getattr(engine, name) for name in type(engine).model_fields} | own
    try:
        return ServeConfig.model_validate(values)
    except ValidationError as error:
        raise explain(error, model, ServeConfig) from None


def _check_model(values: dict[str, Any], override: str) -> None:
    """Refuse a setting of an additional model that does not exist; only `models.NAME.model` adds a model
    (WorkbenchError).
    """
    section, _, rest = override.partition("=")[0].partition(".")
    name, _, setting = rest.partition(".")
    known = [*(values.get("models") or ())]
    if section == "models" and name not in known and setting not in ("", "model", "model.name"):
        hint = nearest(name, known) or (f"; known: {', '.join(known)}" if known else "")
        raise WorkbenchError(
            f"--set {override}: no model is called {name!r}{hint}; --set models.{name}.model=MODEL adds one"
        )


def gate_of(config: ServeConfig) -> Gate | None:
    """Return the gateway described by the settings; None without a gateway."""
    if config.gateway is None:
        return None
    from workbench.gateway.gate import Gateway

    return Gateway(config.gateway)


def _allow_many_connections() -> None:
    """Raise the limit of open files to the system's maximum, because each connection is an open file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
