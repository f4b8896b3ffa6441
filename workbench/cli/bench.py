"""`workbench bench`: measure a model on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from workbench.cli.shared import (
    OutputFormat,
    asked_experiment,
    backend_errors,
    changed_settings,
    console,
    print_json,
    refuse_unused,
    settings_option,
)
from workbench.progress import progress_stages

# Settings that the command accepts in addition to those of the engine and the model.
USED = ("workload.prompt_tokens", "workload.output_tokens", "measure.rounds", "measure.threads")


def bench(
    model: Annotated[str, typer.Argument(help="a folder, FILE.gguf, demo, smollm2 or shape:NAME")],
    batch: Annotated[list[int] | None, typer.Option(min=1, help="sequences at once; 1 and 16 unless given")] = None,
    depth: Annotated[
        list[int] | None, typer.Option(min=0, help="tokens already in the cache; 0 and 4096 unless given")
    ] = None,
    mixed: Annotated[bool, typer.Option("--mixed", help="measure 16 requests of mixed lengths too")] = False,
    no_memory: Annotated[
        bool, typer.Option("--no-memory", help="do not measure the memory of decode (in separate processes)")
    ] = False,
    cold_start: Annotated[
        bool, typer.Option("--cold-start", help="also time the first token after a cold and a warm start")
    ] = False,
    set_: Annotated[
        list[str] | None,
        settings_option("backend, model.weights, workload.prompt_tokens, measure.rounds, measure.threads"),
    ] = None,
    format: Annotated[OutputFormat, typer.Option(metavar="FORMAT", help="table, md, csv or json")] = OutputFormat.TABLE,
    out: Annotated[Path | None, typer.Option(help="folder for the record, e.g. experiments/records")] = None,
) -> None:
    """Measure prefill and decode rates of a model here.

    Each rate is also given as a share of this machine's ceiling."""
    from workbench.bench import model_table as bench_text
    from workbench.bench.model import BATCHES, DEPTHS, mixed_case, mixed_lengths, standard_cases
    from workbench.bench.model import bench as run_bench
    from workbench.engine.config import EngineConfig
    from workbench.runs.folder import write_dated_record
    from workbench.settings import non_default_settings

    lengths = {"prompt_tokens": 512, "output_tokens": 128}
    values = {
        "model": {"name": model},
        "workload": {"kind": "random", **lengths},
        "measure": {"rounds": 3},
    }
    refuse_unused("bench", set_, (*EngineConfig.model_fields, "model", *USED))
    experiment = asked_experiment("bench", changed_settings(values, set_))
    name, measure = experiment.model.name, experiment.measure
    lengths |= experiment.workload.model_dump()
    cases = standard_cases(batch or BATCHES, depth or DEPTHS, lengths["prompt_tokens"], lengths["output_tokens"])
    cases += (mixed_case(mixed_lengths()),) * mixed
    sections = {section for section in values if section in EngineConfig.model_fields} - {"model"}
    settings = {section: values[section] for section in sections} | dict(non_default_settings(experiment.model))
    settings.pop("name", None)
    with backend_errors(), progress_stages(format is not OutputFormat.JSON) as tell:
        record = run_bench(
            name, cases, settings=settings, threads=None if measure.threads == "auto" else measure.threads,
            repetitions=measure.rounds, memory=not no_memory, cold=cold_start, on_progress=tell,
        )  # fmt: skip
    if out is not None:
        file = write_dated_record(record, out, f"bench-{Path(name.removeprefix('shape:')).name}")
        typer.echo(f"record  {file}", err=True)
    match format:
        case OutputFormat.JSON:
            print_json(record)
        case OutputFormat.MD:
            print(bench_text.to_markdown(record), end="")
        case OutputFormat.CSV:
            print(bench_text.to_csv(record), end="")
        case OutputFormat.TABLE:
            bench_text.show(record, console())
