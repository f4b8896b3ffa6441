"""`workbench batch`: answer a file of requests."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from workbench.cli.shared import MODEL_HELP, AsJson, asked_experiment, backend_errors, print_json, settings_option
from workbench.progress import Progress

if TYPE_CHECKING:
    from workbench.experiment.experiment import Experiment
    from workbench.offline.run import BatchProgress
    from workbench.serve.served_model import ServedModel

ANSWER_SETTINGS = ("model", "attention", "speculate", "batch_invariant")  # settings that affect answers
PLACEMENT_SETTINGS = {
    "page_size",
    "pages",
    "prefix",
    "offload",
}  # cache settings that affect where data lies, not its values


def batch(
    source: Annotated[Path, typer.Argument(metavar="IN.jsonl", help="OpenAI batch lines: custom_id, method, url ...")],
    out: Annotated[Path, typer.Argument(metavar="OUT.jsonl", help="file for the answers, in the requests' order")],
    model: Annotated[str, typer.Option(help=MODEL_HELP)] = "demo",
    set_: Annotated[list[str] | None, settings_option("backend, model.dtype, cache.format, schedule.policy")] = None,
    as_json: AsJson = False,
) -> None:
    """Answer a batch file of requests, without streaming.

    A wrong line gets an error as its answer, and the others run. Lines that OUT already answers are skipped.
    """
    from workbench.offline.run import run_batch

    experiment = asked_experiment("batch", {"model": {"name": model}, "workload": {"kind": "random"}}, set_)
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


def _loaded(experiment: Experiment, quiet: bool) -> ServedModel:
    from workbench.experiment.build import runner_for
    from workbench.progress import discard, to_stderr
    from workbench.serve.served_model import ServedModel

    return ServedModel(experiment.model.name, runner_for(experiment, discard if quiet else to_stderr))


def _settings(experiment: Experiment) -> str:
    """Return all settings that affect answers as text; a file begun with other settings is not continued."""
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
        print(f"{out}: an incomplete line was removed ({tally.truncated_bytes:,} bytes)", file=sys.stderr)
    if tally.ignored:
        listed = "; ".join(f"{name}: {reason}" for name, reason in tally.ignored.items())
        print(f"{out}: fields without effect: {listed}", file=sys.stderr)
    tokens = f"{tally.prompt_tokens:,} prompt and {tally.completion_tokens:,} output tokens"
    print(f"{out}: {tally.lines:,} lines: {', '.join(counts)}; {tokens} in {seconds:.1f} s")
