"""`workbench bench`: measure a model on this machine, or beside other tools."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workbench.cli.shared import (
    AsJson,
    Custom,
    OutputFormat,
    backend_errors,
    console,
    find_in_checkout,
    given_options,
    print_json,
)
from workbench.errors import WorkbenchError
from workbench.progress import progress_stages

if TYPE_CHECKING:
    from workbench.bench.model import BenchCase


WITH_PEERS = {"peer", "peer_python", "work", "rounds"}
WITHOUT_PEERS = {"activations", "custom", "batch", "depth", "prompt", "generate", "mixed", "memory", "cold_start"}


def bench(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="a folder, FILE.gguf, demo, smollm2 or shape:NAME")] = "shape:smollm2-135m",
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16")] = "auto",
    weights: Annotated[
        str,
        typer.Option(
            help="auto, dense, int8, int4; beside peers int4-head too, as under int4 a tool keeps its own head"
        ),
    ] = "auto",
    activations: Annotated[str, typer.Option(help="float; with weights in integer codes also int8")] = "float",
    backend: Annotated[str, typer.Option(help="auto, eager, inductor, triton or mlir")] = "auto",
    custom: Custom = None,
    threads: Annotated[int | None, typer.Option(help="torch's present ones unless given")] = None,
    batch: Annotated[list[int] | None, typer.Option(help="sequences at once; 1 and 16 unless given")] = None,
    depth: Annotated[list[int] | None, typer.Option(help="tokens before; 0 and 4096 unless given")] = None,
    prompt: Annotated[int, typer.Option(help="tokens that are prefilled")] = 512,
    generate: Annotated[int, typer.Option(help="tokens that are generated")] = 128,
    repetitions: Annotated[int, typer.Option(help="of everything (of each round, beside peers), after a warm-up")] = 3,
    mixed: Annotated[bool, typer.Option(help="also 16 requests of mixed lengths at once")] = False,
    memory: Annotated[bool, typer.Option(help="also memory in decode, in processes of their own")] = True,
    cold_start: Annotated[bool, typer.Option(help="also the first token after a cold and a warm start")] = False,
    peers: Annotated[bool, typer.Option(help="other tools instead, beside the workbench, on the same weights")] = False,
    peer: Annotated[list[str] | None, typer.Option(help="with --peers: this one only; may be repeated")] = None,
    peer_python: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=PATH", help="with --peers: the Python a tool lives in; also WORKBENCH_PEER_PYTHONS"),
    ] = None,
    work: Annotated[
        list[str] | None, typer.Option(help="with --peers: decode@DEPTH, prefill@TOKENS, mixed, all; may be repeated")
    ] = None,
    rounds: Annotated[int, typer.Option(help="with --peers: how often each tool has its turn")] = 3,
    format: Annotated[
        OutputFormat, typer.Option(help="how to print it; beside peers there is no csv")
    ] = OutputFormat.TABLE,
    as_json: AsJson = False,
    out: Annotated[Path | None, typer.Option(help="folder for the record, e.g. experiments/records")] = None,
) -> None:
    """Measure prefill and decode rates of a model, as shares of this machine's ceilings."""
    _refuse_options(given_options(context) & (WITHOUT_PEERS if peers else WITH_PEERS), peers)
    if as_json:
        if "format" in given_options(context) and format is not OutputFormat.JSON:
            raise WorkbenchError(f"--json and --format {format}: give one of them")
        format = OutputFormat.JSON
    quiet = format is OutputFormat.JSON
    if peers:
        if format is OutputFormat.CSV:
            raise WorkbenchError("--format csv: peers have table, md and json")
        _peers(model, dtype, weights, backend, threads, rounds, repetitions, peer, peer_python, work, format, out)
        return
    from workbench.bench import model_table as bench_text
    from workbench.bench.model import bench as run_bench
    from workbench.runs.folder import write_dated_record

    settings: dict[str, Any] = {"dtype": dtype, "weights": weights, "activations": activations, "backend": backend}
    settings |= {} if custom is None else {"custom": custom}
    with backend_errors(), progress_stages(not quiet) as tell:
        record = run_bench(
            model, _works(batch, depth, prompt, generate, mixed), settings=settings, threads=threads,
            repetitions=repetitions, memory=memory, cold=cold_start, on_progress=tell,
        )  # fmt: skip
    if out is not None:
        name = f"bench-{Path(model.removeprefix('shape:')).name}"
        typer.echo(f"record  {write_dated_record(record, out, name)}", err=True)
    match format:
        case OutputFormat.JSON:
            print_json(record)
        case OutputFormat.MD:
            print(bench_text.to_markdown(record), end="")
        case OutputFormat.CSV:
            print(bench_text.to_csv(record), end="")
        case OutputFormat.TABLE:
            bench_text.show(record, console())


def _works(
    batch: list[int] | None, depth: list[int] | None, prompt: int, generate: int, mixed: bool
) -> tuple[BenchCase, ...]:
    from workbench.bench.model import BATCHES, DEPTHS, mixed_case, mixed_lengths, standard_cases

    for name, values, least in (
        ("batch", batch or (), 1), ("depth", depth or (), 0), ("prompt", (prompt,), 1), ("generate", (generate,), 1)
    ):  # fmt: skip
        if wrong := [value for value in values if value < least]:
            raise WorkbenchError(f"--{name} {wrong[0]}: must be at least {least}")
    works = standard_cases(batch or BATCHES, depth or DEPTHS, prompt, generate)
    return (*works, mixed_case(mixed_lengths())) if mixed else works


def _refuse_options(options: set[str], peers: bool) -> None:
    """Refuse options without effect."""
    if options:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(options))
        raise WorkbenchError(f"{names}: of no effect {'with' if peers else 'without'} --peers")


def _peers(
    model: str, dtype: str, weights: str, backend: str, threads: int | None, rounds: int, repetitions: int,
    peer: list[str] | None, peer_python: list[str] | None, work: list[str] | None, format: OutputFormat,
    out: Path | None,
) -> None:  # fmt: skip
    import torch

    find_in_checkout("benchmarks/peers", "bench: --peers")
    from benchmarks.peers.catalog import interpreters
    from benchmarks.peers.run import asked_format, run_peers
    from benchmarks.peers.table import peers_markdown, peers_tables, write_record
    from benchmarks.peers.works import parse_workloads
    from workbench.files import cache_directory

    written: list[Path] = []

    def keep(record: dict[str, Any]) -> None:
        if out is not None:
            fewer_rounds = [*written]
            written[:] = [write_record(record, out)]
            for each in fewer_rounds:
                each.unlink(missing_ok=True)

    with backend_errors(), progress_stages(format is not OutputFormat.JSON) as tell:
        record = run_peers(
            model, parse_workloads(work or ["all"]), (asked_format(model, dtype, weights),),
            folder=cache_directory() / "peers", rounds=rounds, repetitions=repetitions,
            threads=threads or torch.get_num_threads(), backends=(backend,), peers=peer,
            pythons=interpreters(peer_python or ()), on_progress=tell, on_round=keep,
        )  # fmt: skip
    for path in written:
        typer.echo(f"record  {path}", err=True)
    match format:
        case OutputFormat.JSON:
            print_json(record)
        case OutputFormat.MD:
            print(peers_markdown(record), end="")
        case _:
            for table in peers_tables(record):
                console().print(table)
