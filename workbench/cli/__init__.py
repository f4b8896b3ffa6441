"""The command line: groups of commands. Each command has a file in this folder, except `run`, `generate`, `inspect` and
`doctor`.

Exit codes: 0 done; 1 the command ran and something differs or failed; 2 the input or the environment is wrong; 70 a bug
of the workbench itself; 130 interrupted.
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
from typer.core import TyperGroup

from workbench import __version__
from workbench.cli import (
    agent,
    batch,
    bench,
    capacity,
    chat,
    claims,
    cost,
    init,
    kernels,
    keys,
    lab,
    model,
    quality,
    replay,
    reports,
    runs,
    serve,
    simulate,
    sweep,
    top,
    usage,
    zoo,
)
from workbench.cli.shared import (
    MODEL_HELP,
    AsJson,
    MaxTokens,
    Temperature,
    changed_settings,
    console,
    print_json,
    settings_option,
)
from workbench.errors import DISK_FULL_ERRNOS, WorkbenchError, cannot_write


class FrontPage(TyperGroup):
    """The list of commands by group, one line each; typer's own boxes would fill two screens."""

    def format_help(self, *_: Any) -> None:
        print("Usage: workbench COMMAND [ARGUMENT]... [--OPTION VALUE]...\n")
        for group, commands in GROUPS.items():
            for number, name in enumerate(commands):
                print(f"{'' if number else group:13}{name:11}{self.commands[name].get_short_help_str(60)}")
        print("\nCOMMAND --help shows its options, --debug the traceback of an error.")
        print("Example: workbench run experiments/first_light.yaml")


app = typer.Typer(
    cls=FrontPage,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
Sets = Annotated[list[str] | None, settings_option("backend, cache.format, sampling.seed")]
Out = Annotated[Path, typer.Option(help="folder in which the run folder is created")]


def _print_version(requested: bool) -> None:
    if requested:
        print(f"workbench {__version__}")
        raise typer.Exit


@app.callback()
def workbench(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    """A research workbench for LLM inference."""


def run(
    file: Annotated[Path, typer.Argument(help="an experiment's YAML file")],
    set_: Sets = None,
    out: Out = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Run an experiment and write a run folder."""
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


def generate(
    prompt: Annotated[str, typer.Argument(help="the text to continue")],
    model: Annotated[str, typer.Option(help=MODEL_HELP)] = "demo",
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.7,
    set_: Annotated[
        list[str] | None,
        settings_option("backend, model.dtype, speculate, sampling.top_p, sampling.seed, sampling.stop"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Continue a text, and print it as it is generated."""
    gc.disable()  # a garbage collection while modules load would add half a second to the time to first token
    from workbench.measure.generate import generate_text
    from workbench.progress import discard, to_stderr

    gc.enable()
    sampling = {"max_tokens": max_tokens, "temperature": temperature, "top_p": 0.9}
    settings = changed_settings({"model": {"name": model}, "sampling": sampling}, set_)
    show = (lambda text: None) if as_json else lambda text: print(text, end="", flush=True)
    result = generate_text(prompt, settings, show, discard if as_json else to_stderr)
    if as_json:
        print_json(result)
    else:
        show("\n")
    if result["finish_reason"] == "error":
        raise typer.Exit(_fail(result["error"], code=1))


def inspect(
    folder: Annotated[Path, typer.Argument(help="a run folder")],
    as_json: AsJson = False,
) -> None:
    """Show a run folder, and check that it is complete."""
    from workbench.reports import terminal as report
    from workbench.runs.record import Record

    record = Record.open(folder)
    record.verify()
    if as_json:
        print_json({"run": str(record.path), "environment": record.environment, "summary": record.summary})
    else:
        report.show(record, console(wide=False))


def doctor(as_json: AsJson = False) -> None:
    """Show installed parts and the backends that work here.

    For each backend that does not work, the reason is shown."""
    from workbench.machine.doctor import diagnose, show

    found = diagnose()
    if as_json:
        print_json(found)
    else:
        show(found, console(wide=False))


Command = tuple[Callable[..., None] | typer.Typer, str]  # the function that the command calls, and example arguments
GROUPS: dict[str, dict[str, Command]] = {
    "experiments": {
        "run": (run, "run experiments/first_light.yaml --set sampling.seed=7"),
        "sweep": (sweep.sweep, "sweep experiments/kv_precision.yaml --set cache.format=dense,int8"),
        "compare": (runs.compare, "compare runs/a --baseline runs/a:dense --measure ttft_s_p50"),
        "report": (reports.report, "report runs/first_light-20261121-120000-1a2b --out first.html"),
        "reproduce": (reports.reproduce, "reproduce runs/first_light-20261121-120000-1a2b --replay"),
        "replay": (replay.replay, "replay chatcmpl-1a2b3c --from replays"),
        "runs": (runs.runs, "runs --where \"cache.format = 'int8'\""),
        "export": (reports.export, "export runs/first_light-20261121-120000-1a2b --uri file:mlruns"),
    },
    "models": {"model": (model.app, "")},
    "texts": {
        "generate": (generate, 'generate "def fibonacci(n):" --max-tokens 48'),
        "chat": (chat.chat, 'chat "What is 2 + 3?" --system "Be brief."'),
        "agent": (agent.agent, 'agent "How many seconds are 3 weeks and 2 days?" --json'),
        "batch": (batch.batch, "batch questions.jsonl answers.jsonl"),
        "inspect": (inspect, "inspect runs/first_light-20261121-120000-1a2b"),
    },
    "servers": {
        "serve": (serve.serve, "serve smollm2 --port 8000 --set cache.format=int8"),
        "keys": (keys.app, ""),
        "usage": (usage.usage, "usage --by key,day --since 2026-11-01"),
        "top": (top.top, "top http://127.0.0.1:8000 --once"),
    },
    "speed, cost": {
        "bench": (bench.bench, "bench shape:smollm2-135m --format md"),
        "kernels": (kernels.app, ""),
        "quality": (quality.quality, 'quality "four bits: cache.format=int4"'),
        "simulate": (simulate.simulate, "simulate azure --set executor.instances=8"),
        "capacity": (capacity.capacity, "capacity azure --users 1000000 --per-hour 2.50"),
        "cost": (cost.cost, "cost --set requests=1000 --set arrivals=poisson"),
    },
    "findings": {"zoo": (zoo.app, ""), "claims": (claims.app, "")},
    "setup": {
        "lab": (lab.lab, "lab 07_many_requests.py --port 8889"),
        "init": (init.init, "init my_project"),
        "doctor": (doctor, "doctor --json"),
    },
}
for commands in GROUPS.values():
    for name, (command, example) in commands.items():
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name, epilog=f"Example: `workbench {example}`")(command)


@functools.cache
def _command() -> Callable[..., Any]:
    """Return the typer command with all options; building it takes 50 ms."""
    return typer.main.get_command(app)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. A user's error is printed in one line, with `--debug` as a traceback."""
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
        tell = getattr(error, "format_message", None)  # an error of typer itself, for wrong options
        if tell is not None:
            return _fail(tell(), debug)
        level = sys.modules.get("compiled_kernels.level")  # do not import it here: its own import may have failed
        if level is not None and isinstance(error, level.LevelError):
            return _fail(str(error), debug)
        return _fail(f"{type(error).__name__}: {error} (--debug shows where)", debug, code=70)


def _quiet_others() -> None:
    """Silence warnings of libraries that users cannot act on.

    Our own warnings are shown. If PYTHONWARNINGS or TORCH_LOGS is set, those settings apply instead.
    """
    if not sys.warnoptions:
        for name in ("torch", "triton", "torch_mlir", "jupyter", "ipywidgets"):
            warnings.filterwarnings("ignore", module=rf"{name}(\.|$)")
    if "TORCH_LOGS" not in os.environ:
        logging.getLogger("torch").setLevel(logging.ERROR)


def _fail(message: str, debug: bool = False, code: int = 2) -> int:
    if debug:
        traceback.print_exc()
    elif message:  # without a message, typer has already shown the help
        print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return code


def entry() -> None:
    _quiet_others()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # print a replacement for characters that a terminal cannot show
            stream.reconfigure(errors="backslashreplace")
    code = main()
    try:
        sys.stdout.flush()
    except OSError as error:  # avoid a second failure when Python closes the stream at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not code:  # otherwise `main` has already reported an error, a full disk included
            code = 1 if isinstance(error, BrokenPipeError) else _fail(str(cannot_write("standard output", error)))
    sys.exit(code)
