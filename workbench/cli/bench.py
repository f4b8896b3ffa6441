"""`workbench bench`: a model on this machine, and beside it other tools."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import platformdirs
import typer
from tqdm.auto import tqdm

from workbench.cli.shared import console, lanes_told, print_json
from workbench.errors import WorkbenchError

if TYPE_CHECKING:
    from workbench.study.bench_works import Work


class Format(StrEnum):
    TABLE = "table"
    MD = "md"
    CSV = "csv"
    JSON = "json"


def bench(
    model: Annotated[str, typer.Option(help="a folder, demo, demo-draft, or shape:NAME")] = "shape:smollm2-135m",
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16")] = "auto",
    weights: Annotated[str, typer.Option(help="dense, int8 or int4")] = "dense",
    lane: Annotated[str, typer.Option(help="auto, eager, inductor, triton or mlir")] = "auto",
    threads: Annotated[int | None, typer.Option(help="torch's present ones unless given")] = None,
    batch: Annotated[list[int] | None, typer.Option(help="sequences at once; 1 and 16 unless given")] = None,
    depth: Annotated[list[int] | None, typer.Option(help="tokens before; 0 and 4096 unless given")] = None,
    prompt: Annotated[int, typer.Option(help="tokens that are prefilled")] = 512,
    generate: Annotated[int, typer.Option(help="tokens that are generated")] = 128,
    repetitions: Annotated[int, typer.Option(help="of everything, in turn, after a warm-up")] = 3,
    mixed: Annotated[bool, typer.Option(help="also 16 requests of mixed lengths at once")] = False,
    memory: Annotated[bool, typer.Option(help="also memory in decode, in processes of their own")] = True,
    cold_start: Annotated[bool, typer.Option(help="also the first token after a cold and a warm start")] = False,
    peers: Annotated[bool, typer.Option(help="other tools instead, beside the workbench, on the same weights")] = False,
    peer: Annotated[list[str] | None, typer.Option(help="this peer only; may be repeated")] = None,
    peer_python: Annotated[list[str] | None, typer.Option(metavar="NAME=PATH", help="a peer's interpreter")] = None,
    work: Annotated[list[str] | None, typer.Option(help="of peers: decode@DEPTH, prefill@TOKENS, mixed, all")] = None,
    format: Annotated[Format, typer.Option(help="how to print it")] = Format.TABLE,
    out: Annotated[Path | None, typer.Option(help="folder for the record, e.g. experiments/records")] = None,
) -> None:
    """Prefill and decode rates of a model, as shares of what this machine can do."""
    quiet = format is Format.JSON
    if peers:
        _peers(model, dtype, weights, lane, threads, repetitions, peer, peer_python, work, format, out)
        return
    from workbench.study import bench_text
    from workbench.study.bench import bench as run_bench
    from workbench.study.dated_record import write_dated

    settings: dict[str, Any] = {"dtype": dtype, "weights": weights, "lane": lane}
    with lanes_told(), tqdm(bar_format="{desc} [{elapsed}]", disable=quiet) as bar:
        record = run_bench(
            model, _works(batch, depth, prompt, generate, mixed), settings=settings, threads=threads,
            repetitions=repetitions, memory=memory, cold=cold_start, tell=bar.set_description,
        )  # fmt: skip
    if out is not None:
        name = f"bench-{Path(model.removeprefix('shape:')).name}"
        typer.echo(f"record  {write_dated(record, out, name)}", err=True)
    match format:
        case Format.JSON:
            print_json(record)
        case Format.MD:
            print(bench_text.markdown(record), end="")
        case Format.CSV:
            print(bench_text.comma_separated(record), end="")
        case Format.TABLE:
            bench_text.show(record, console())


def _works(
    batch: list[int] | None, depth: list[int] | None, prompt: int, generate: int, mixed: bool
) -> tuple[Work, ...]:
    from workbench.study.bench import BATCHES, DEPTHS, canonical, mixed_work

    for name, values, least in (
        ("batch", batch or (), 1), ("depth", depth or (), 0), ("prompt", (prompt,), 1), ("generate", (generate,), 1)
    ):  # fmt: skip
        if wrong := [value for value in values if value < least]:
            raise WorkbenchError(f"--{name} {wrong[0]}: must be at least {least}")
    works = canonical(batch or BATCHES, depth or DEPTHS, prompt, generate)
    if not mixed:
        return works
    from workbench.peers.works import mixed as mixed_lengths

    return *works, mixed_work(mixed_lengths().requests)


def _peers(
    model: str, dtype: str, weights: str, lane: str, threads: int | None, repetitions: int, peer: list[str] | None,
    peer_python: list[str] | None, work: list[str] | None, format: Format, out: Path | None,
) -> None:  # fmt: skip
    import torch

    from workbench.peers.catalog import interpreters
    from workbench.peers.run import run_peers
    from workbench.peers.table import markdown, tables, write_record
    from workbench.peers.works import works_named

    formats = ("bfloat16" if dtype == "auto" else dtype,) if weights == "dense" else (weights,)
    folder = Path(platformdirs.user_cache_dir("inference-workbench", appauthor=False)) / "peers"
    with lanes_told(), tqdm(bar_format="{desc} [{elapsed}]", disable=format is Format.JSON) as bar:
        record = run_peers(
            model, works_named(work or ["all"]), formats, folder=folder, repetitions=repetitions,
            threads=threads or torch.get_num_threads(), lanes=(lane,), peers=peer,
            pythons=interpreters(peer_python or ()), tell=bar.set_description,
        )  # fmt: skip
    if out is not None:
        typer.echo(f"record  {write_record(record, out)}", err=True)
    match format:
        case Format.JSON:
            print_json(record)
        case Format.CSV:
            raise WorkbenchError("--format csv: peers have table, md and json")
        case Format.MD:
            print(markdown(record), end="")
        case Format.TABLE:
            for table in tables(record):
                console().print(table)
