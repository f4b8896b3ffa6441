"""The command line. Each command has a file in this folder, except `run`, `generate`, `inspect` and `doctor`.

Exit codes: 0 done, 1 ran and something differs or failed, 2 the input or the environment is wrong,
70 a fault of the workbench itself, 130 interrupted.
"""

from __future__ import annotations

import functools
import gc
import io
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from workbench import __version__
from workbench.cli import (
    agent,
    batch,
    bench,
    capacity,
    chat,
    check,
    claims,
    convert,
    cost,
    init,
    kernels,
    keys,
    lab,
    memory,
    model,
    new_family,
    quality,
    replay,
    serve,
    simulate,
    sweep,
    top,
    usage,
    zoo,
)
from workbench.cli import reports as export
from workbench.cli import reports as report
from workbench.cli import reports as reproduce
from workbench.cli import runs as records
from workbench.cli.shared import AsJson, Custom, console, parse_settings, print_json
from workbench.errors import DISK_FULL_ERRNOS, WorkbenchError, cannot_write

app = typer.Typer(
    help="A research workbench for LLM inference.",
    epilog="Example: `workbench run experiments/first_light.yaml`. With `--debug` errors show their traceback.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
Sets = Annotated[
    list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="change one setting; may be repeated")
]
Out = Annotated[Path, typer.Option(help="folder in which the run folder is made")]
app.command("init", epilog="Example: `workbench init lab`, then `cd lab` and `workbench run first.yaml`")(init.init)
app.command("bench", epilog="Example: `workbench bench --model shape:smollm2-135m --format md`")(bench.bench)
app.command("quality", epilog='Example: `workbench quality "four bits: cache.format=int4"`')(quality.quality)
app.command("check", epilog="Example: `workbench check MY_FOLDER`, or `workbench check shape:smollm2-135m --json`")(
    check.check
)
app.command("convert", epilog="Example: `workbench convert MY_FOLDER MY_FOLDER-int4 --weights int4 --group 32`")(
    convert.convert
)
app.command("new-family", epilog="Example: `workbench new-family my_model MY_FOLDER`")(new_family.new_family)
app.command("memory", epilog="Example: `workbench memory shape:llama-3-70b --context 128000 --json`")(memory.memory)
app.command("simulate", epilog="Example: `workbench simulate azure --instances 8 --hardware h100`")(simulate.simulate)
app.command("capacity", epilog="Example: `workbench capacity azure --hardware h100 --users 1000000 --per-hour 2.50`")(
    capacity.capacity
)
app.command("sweep", epilog="Example: `workbench sweep experiments/kv_precision.yaml --set cache.format=dense,int8`")(
    sweep.sweep
)
app.command("runs", epilog="Example: `workbench runs --where \"cache.format = 'int8'\"`")(records.runs)
app.command("compare", epilog="Example: `workbench compare runs/a --baseline runs/a:dense --measure ttft_s_p50`")(
    records.compare
)
app.command("batch", epilog="Example: `workbench batch questions.jsonl answers.jsonl`")(batch.batch)
app.command("chat", epilog='Example: `workbench chat "What is 2 + 3?" --system "Be brief."`')(chat.chat)
app.command("agent", epilog='Example: `workbench agent "How many seconds are 3 weeks and 2 days?" --json`')(agent.agent)
app.command("cost", epilog="Example: `workbench cost --prompt 2000 --requests 1000 --arrivals poisson`")(cost.cost)
app.command("reproduce", epilog="Example: `workbench reproduce runs/first_light-20261121-120000-1a2b --replay`")(
    reproduce.reproduce
)
app.command("replay", epilog="Example: `workbench replay chatcmpl-1a2b3c --from replays`")(replay.replay)
app.command("report", epilog="Example: `workbench report runs/first_light-20261121-120000-1a2b --out first.html`")(
    report.report
)
app.command("export", epilog="Example: `workbench export runs/first_light-20261121-120000-1a2b --uri file:mlruns`")(
    export.export
)
app.command("lab", epilog="Example: `workbench lab`, or `workbench lab --check --pictures notebooks/pictures`")(lab.lab)
app.command("serve", epilog="Example: `workbench serve smollm2 --port 8000 --set cache.format=int8`")(serve.serve)
app.command("top", epilog="Example: `workbench top http://127.0.0.1:8000 --once`")(top.top)
app.command("usage", epilog="Example: `workbench usage --by key,day --since 2026-11-01`")(usage.usage)
app.add_typer(keys.app, name="keys")
app.add_typer(model.app, name="model")
app.add_typer(kernels.app, name="kernels")
app.add_typer(claims.app, name="claims")
app.add_typer(zoo.app, name="zoo")


def _print_version(requested: bool) -> None:
    if requested:
        print(f"workbench {__version__}")
        raise typer.Exit


@app.callback()
def workbench(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="which version this is")
    ] = False,
) -> None:
    """A research workbench for LLM inference."""


@app.command(epilog="Example: `workbench run experiments/first_light.yaml --set sampling.seed=7`")
def run(
    file: Annotated[Path, typer.Argument(help="an experiment in YAML")],
    set_: Sets = None,
    out: Out = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Run an experiment and leave a run folder."""
    from workbench.experiment.experiment import Experiment
    from workbench.measure.run import run as run_experiment
    from workbench.reports import terminal as report

    experiment = Experiment.from_file(file, tuple(set_ or ()))
    record = run_experiment(experiment, out, file.stem, progress=not as_json)
    if as_json:
        requests = {} if experiment.is_comparison else {"requests": record.requests.to_pylist()}
        print_json({"run": str(record.path), "summary": record.summary, **requests})
    else:
        report.show(record, console(wide=experiment.is_comparison), file)
    if experiment.is_comparison:
        return
    failed = record.summary["requests"]["by_finish_reason"]
    raise typer.Exit(1 if failed.get("refused") or failed.get("error") else 0)


@app.command(epilog='Example: `workbench generate "def fibonacci(n):" --max-tokens 48`')
def generate(
    prompt: Annotated[str, typer.Argument(help="the text to continue")],
    model: Annotated[str, typer.Option(help="a folder, FILE.gguf, demo, shape:NAME or one of `model list`")] = "demo",
    max_tokens: Annotated[int, typer.Option(help="how many tokens at most")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.7,
    top_p: Annotated[float, typer.Option(help="keep the likeliest tokens up to this mass")] = 0.9,
    top_k: Annotated[int, typer.Option(help="keep this many of the likeliest tokens; 0 keeps all")] = 0,
    seed: Annotated[int, typer.Option(help="of the draws")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="end before this text; may be repeated")] = None,
    backend: Annotated[str, typer.Option(help="auto, eager (nothing is compiled), mlir, inductor or triton")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16")] = "auto",
    speculate: Annotated[
        str, typer.Option(help="none, prompt_lookup, draft, or settings: '{kind: draft, model: FOLDER}'")
    ] = "none",
    custom: Custom = None,
    as_json: AsJson = False,
) -> None:
    """Continue a text, as it is generated."""
    gc.disable()  # objects of modules stay: collections among them take half a second of the time to the first token
    from workbench.measure.generate import generate_text
    from workbench.progress import discard, to_stderr

    gc.enable()
    sampling = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
        "stop": tuple(stop or ()),
    }
    show = (lambda text: None) if as_json else lambda text: print(text, end="", flush=True)
    result = generate_text(
        prompt,
        model,
        backend,
        dtype,
        sampling,
        show,
        discard if as_json else to_stderr,
        parse_settings("--speculate", speculate),
        custom,
    )
    if as_json:
        print_json(result)
    else:
        show("\n")
    if result["finish_reason"] == "error":
        raise typer.Exit(_fail(result["error"], code=1))


@app.command(epilog="Example: `workbench inspect runs/first_light-20261121-120000-1a2b`")
def inspect(
    folder: Annotated[Path, typer.Argument(help="a run folder")],
    as_json: AsJson = False,
) -> None:
    """Show the contents of a run folder, and check that it is complete."""
    from workbench.reports import terminal as report
    from workbench.runs.record import Record

    record = Record.open(folder)
    record.verify()
    if as_json:
        print_json({"run": str(record.path), "environment": record.environment, "summary": record.summary})
    else:
        report.show(record, console(wide=False))


@app.command(epilog="Example: `workbench doctor --json`")
def doctor(as_json: AsJson = False) -> None:
    """Show installed components, the backends that work here, and why the others do not."""
    from workbench.machine.doctor import diagnose, show

    found = diagnose()
    if as_json:
        print_json(found)
    else:
        show(found, console(wide=False))


@functools.cache
def _command() -> Callable[..., Any]:
    """Return the commands with their options, which take a twentieth of a second to build."""
    return typer.main.get_command(app)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. User errors are one line, with `--debug` the whole traceback."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = words[: words.index("--")] if "--" in words else words  # words after `--` are no options
    debug = "--debug" in options
    words = [word for word in options if word != "--debug"] + words[len(options) :]
    try:
        return int(_command()(words, prog_name="workbench", standalone_mode=False) or 0)
    except WorkbenchError as error:
        return _fail(str(error), debug)
    except typer.Exit as leave:
        return leave.exit_code
    except (typer.Abort, KeyboardInterrupt):
        return _fail("interrupted", code=130)
    except BrokenPipeError:
        return 1
    except OSError as error:
        if error.errno not in DISK_FULL_ERRNOS:
            return _fail(f"{type(error).__name__}: {error} (--debug shows where)", debug, code=70)
        return _fail(str(cannot_write(str(error.filename or "an output"), error)), debug)
    except Exception as error:
        tell = getattr(error, "format_message", None)  # the CLI library's own, for wrong options
        if tell is not None:
            return _fail(tell(), debug)
        level = sys.modules.get("compiled_kernels.level")  # not imported here: its import may have raised
        if level is not None and isinstance(error, level.LevelError):
            return _fail(str(error), debug)
        return _fail(f"{type(error).__name__}: {error} (--debug shows where)", debug, code=70)


def _quiet_others() -> None:
    """Silence warnings of libraries that a newcomer cannot mend.

    Our own are shown; with PYTHONWARNINGS or TORCH_LOGS set, those settings hold.
    """
    if not sys.warnoptions:
        for name in ("torch", "triton", "torch_mlir", "jupyter", "ipywidgets"):
            warnings.filterwarnings("ignore", module=rf"{name}(\.|$)")
    if "TORCH_LOGS" not in os.environ:
        logging.getLogger("torch").setLevel(logging.ERROR)


def _fail(message: str, debug: bool = False, code: int = 2) -> int:
    if debug:
        traceback.print_exc()
    elif message:  # without any words, the CLI library has shown the help instead
        print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return code


def entry() -> None:
    _quiet_others()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that lacks a character still gets the text
            stream.reconfigure(errors="backslashreplace")
    code = main()
    try:
        sys.stdout.flush()
    except OSError as error:  # the rest cannot be written at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not code:  # else `main` has said why, of a full disk too, if more was written than is buffered
            code = 1 if isinstance(error, BrokenPipeError) else _fail(str(cannot_write("standard output", error)))
    sys.exit(code)
