"""`workbench serve`: a model behind OpenAI's and Anthropic's protocols."""

from __future__ import annotations

import resource
import signal
import sys
from contextlib import ExitStack
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workbench.cli.shared import AsJson, backend_errors, print_json, speaking_model
from workbench.errors import WorkbenchError, nearest

if TYPE_CHECKING:
    from workbench.serve.config import ServeConfig
    from workbench.serve.gate import Gate

OWN_SECTIONS = ("served_name", "models", "server", "gateway")  # of a file that is an experiment otherwise
DEFAULTS: dict[str, Any] = {"cache": {"prefix": "radix"}}  # of a server for a model by name


def serve(
    model: Annotated[
        str | None,
        typer.Argument(
            help="a model, or a file in YAML: a server's settings, or an experiment; smollm2 where it is at hand"
        ),
    ] = None,
    port: Annotated[int | None, typer.Option(help="0: any free one; 8000 unless the file says")] = None,
    host: Annotated[str | None, typer.Option(help="loopback unless given; 0.0.0.0: every address")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="change one setting; may be repeated")
    ] = None,
    replicas: Annotated[
        int, typer.Option(min=1, help="engines in processes of their own; 1 and no address: none")
    ] = 1,
    router: Annotated[str, typer.Option(help="of replicas: prefix, session, least_loaded or round_robin")] = "prefix",
    address: Annotated[str | None, typer.Option(help="of a Ray cluster; else processes of this machine")] = None,
    prefill: Annotated[int, typer.Option(help="engines that compute prompts alone, beside those of --decode")] = 0,
    decode: Annotated[int, typer.Option(help="engines that decode what those of --prefill began")] = 0,
    as_json: AsJson = False,
) -> None:
    """Serve a model over HTTP until SIGTERM or Ctrl-C: calls under way end first.

    Every setting of an engine is one of the server: `--set cache.format=int4` serves from a cache of four bits.
    """
    from workbench.cluster.cluster import Cluster
    from workbench.cluster.pools_replica import PoolsLauncher
    from workbench.engine.runner import Runner
    from workbench.progress import discard, to_stderr
    from workbench.serve.served_model import ServedModel
    from workbench.serve.server import Server, served_name_of

    overrides = [*(set_ or ())]
    overrides += [f"server.{name}={value}" for name, value in (("port", port), ("host", host)) if value is not None]
    report = discard if as_json else to_stderr
    config = read_serve_config(model or speaking_model(None, report), tuple(overrides))
    gate = gate_of(config)
    with backend_errors():
        engines: dict[str, Runner | Cluster] = {}
        for name, each in (("", config), *config.models.items()):
            if prefill or decode:
                if replicas > 1 or address is not None:
                    raise WorkbenchError(
                        "--prefill and --decode are pools on this machine; leave out --replicas, --address"
                    )
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
        print(f"{', '.join(models)} at {server.url}; Ctrl-C ends it", flush=True)
    clusters = [engine for engine in engines.values() if isinstance(engine, Cluster)]
    if clusters:  # the server ends by the signal that it was given, and the clusters' processes after it
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with ExitStack() as closing:  # in reverse order, and each whatever becomes of the others
        for cluster in clusters:
            closing.callback(cluster.close)
        server.run()


def read_serve_config(model: str, overrides: tuple[str, ...]) -> ServeConfig:
    """Return the settings of a model by name, or of a file: a server's, or an experiment's engine (WorkbenchError)."""
    from pydantic import ValidationError

    from workbench.errors import explain
    from workbench.experiment.experiment import Experiment, apply_override
    from workbench.files import read_bytes, read_yaml
    from workbench.serve.config import ServeConfig

    values: Any = {"model": model, **deepcopy(DEFAULTS)}  # overrides are written into it
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
    """Refuse a setting of a further model that is not there; its `model` is what adds one (WorkbenchError)."""
    section, _, rest = override.partition("=")[0].partition(".")
    name, _, setting = rest.partition(".")
    known = [*(values.get("models") or ())]
    if section == "models" and name not in known and setting not in ("", "model", "model.name"):
        hint = nearest(name, known) or (f"; known: {', '.join(known)}" if known else "")
        raise WorkbenchError(
            f"--set {override}: no model is called {name!r}{hint}; --set models.{name}.model=MODEL adds one"
        )


def gate_of(config: ServeConfig) -> Gate | None:
    """Return the gateway that the settings ask for; None for no gateway."""
    if config.gateway is None:
        return None
    from workbench.gateway.gate import Gateway

    return Gateway(config.gateway)


def _allow_many_connections() -> None:
    """Raise the limit of open files to what the system allows: each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
