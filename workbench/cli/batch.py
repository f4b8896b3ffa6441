"""`workbench batch`: answer a file of requests."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workbench.cli.shared import AsJson, backend_errors, print_json
from workbench.progress import Progress

if TYPE_CHECKING:
    from workbench.engine.runner import Runner
    from workbench.experiment.experiment import Experiment
    from workbench.offline.requests import BatchModel
    from workbench.offline.run import BatchProgress

ANSWER_SETTINGS = ("model", "attention", "speculate", "batch_invariant")  # settings that an answer depends on
PLACEMENT_SETTINGS = {
    "page_size",
    "pages",
    "prefix",
    "offload",
}  # settings of the cache that decide where data lies, not its values


def batch(
    source: Annotated[Path, typer.Argument(metavar="IN.jsonl", help="OpenAI batch lines: custom_id, method, url ...")],
    out: Annotated[Path, typer.Argument(metavar="OUT.jsonl", help="the answers, in the order of the lines")],
    model: Annotated[str, typer.Option(help="a folder, FILE.gguf, demo, shape:NAME or one of `model list`")] = "demo",
    backend: Annotated[str, typer.Option(help="auto, eager (nothing is compiled), mlir, inductor or triton")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16")] = "auto",
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="model, cache, schedule ... as in an experiment; repeatable"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Answer a batch file, without streaming.

    A line that is wrong has its error and the rest goes on. Lines that OUT already answers are not run again.
    """
    from workbench.experiment.experiment import Experiment
    from workbench.offline.run import run_batch

    values: dict[str, Any] = {"question": "What are the answers?", "workload": {"kind": "random"}, "backend": backend}
    experiment = Experiment.from_values(values | {"model": {"name": model, "dtype": dtype}}, "batch").with_(
        *(set_ or ())
    )
    began = time.perf_counter()
    with Progress(unit="line", desc="batch", disable=as_json) as bar, backend_errors():

        def tell(tally: BatchProgress) -> None:
            bar.total = tally.lines
            bar.update(tally.answered + tally.failed - bar.n)

        tally = run_batch(source, out, lambda: _loaded(experiment, quiet=as_json), _settings(experiment), tell)
    seconds = time.perf_counter() - began
    if as_json:
        print_json({"out": str(out), **asdict(tally), "seconds": seconds})
    else:
        _show(tally, out, seconds)
    raise typer.Exit(1 if tally.failed else 0)


def _loaded(experiment: Experiment, quiet: bool) -> tuple[Runner, BatchModel]:
    from workbench.engine.loaded_model import model_folder
    from workbench.experiment.build import runner_for
    from workbench.model.formats.texts import open_chat_template
    from workbench.offline.requests import BatchModel
    from workbench.progress import discard, to_stderr

    runner, folder = runner_for(experiment, discard if quiet else to_stderr), model_folder(experiment.model.name)
    template = None if folder is None else open_chat_template(folder)
    return runner, BatchModel(
        experiment.model.name, runner.tokenizer, template, runner.model.spec.max_position_embeddings,
        runner.sampling_defaults,
    )  # fmt: skip


def _settings(experiment: Experiment) -> str:
    """Return all settings that decide an answer, as one text: a file begun under others is not continued."""
    values = experiment.model_dump(mode="json")
    cache = {name: value for name, value in values["cache"].items() if name not in PLACEMENT_SETTINGS}
    deciding = {name: values[name] for name in ANSWER_SETTINGS} | {
        "cache": cache,
        "overflow": values["schedule"]["overflow"],
    }
    return json.dumps(deciding, sort_keys=True)


def _show(tally: BatchProgress, out: Path, seconds: float) -> None:
    counts = [f"{tally.answered:,} answered", f"{tally.failed:,} failed"]
    counts += [f"{tally.already_written:,} of them before"] if tally.already_written else []
    if tally.truncated_bytes:
        print(f"{out}: half a line was cut off ({tally.truncated_bytes:,} bytes)", file=sys.stderr)
    tokens = f"{tally.prompt_tokens:,} prompt and {tally.completion_tokens:,} output tokens"
    print(f"{out}: {tally.lines:,} lines: {', '.join(counts)}; {tokens} in {seconds:.1f} s")
