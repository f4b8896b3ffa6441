"""Time the workbench and other inference tools on one model: `python -m benchmarks.peers MODEL --work decode@512`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.peers.catalog import FILE, interpreters
from benchmarks.peers.run import file_of, run_peers
from benchmarks.peers.table import peers_markdown, write_record
from benchmarks.peers.works import parse_workloads
from compiled_kernels.backends import BackendError
from workbench.errors import WorkbenchError
from workbench.files import cache_directory
from workbench.progress import progress_stages


def main(
    model: Annotated[str, typer.Argument(help="shape:NAME (random weights), FILE.gguf, or smollm2")],
    format: Annotated[
        list[str] | None, typer.Option(help="float32, bfloat16, int8, int4, int4-head; repeatable")
    ] = None,
    backend: Annotated[str, typer.Option(help="backend of the workbench")] = "auto",
    peer: Annotated[list[str] | None, typer.Option(help="one tool to compare with; repeatable")] = None,
    work: Annotated[list[str] | None, typer.Option(help="decode@DEPTH, prefill@TOKENS, mixed; repeatable")] = None,
    rounds: Annotated[int, typer.Option(help="number of rounds, in which tools take turns")] = 3,
    repetitions: Annotated[int, typer.Option(help="repetitions of each measurement in a round")] = 3,
    out: Annotated[Path | None, typer.Option(help="folder for the record, e.g. experiments/records")] = None,
) -> None:
    """Time the workbench and other inference tools on one model, and print the tables as Markdown.

    WORKBENCH_PEER_PYTHONS gives the Python interpreter of each tool, as NAME=PATH separated by colons."""
    written: list[Path] = []

    def keep(record: dict[str, Any]) -> None:
        if out is not None:
            fewer_rounds, written[:] = [*written], [write_record(record, out)]
            for file in fewer_rounds:
                file.unlink(missing_ok=True)

    with progress_stages() as tell:
        record = run_peers(
            model, parse_workloads(work or ["all"]), format or ([FILE] if file_of(model) else ["bfloat16"]),
            folder=cache_directory() / "peers", rounds=rounds, repetitions=repetitions,
            threads=torch.get_num_threads(), backends=(backend,), peers=peer, pythons=interpreters(),
            on_progress=tell, on_round=keep,
        )  # fmt: skip
    for file in written:
        typer.echo(f"record  {file}", err=True)
    print(peers_markdown(record), end="")


if __name__ == "__main__":
    try:
        typer.run(main)
    except (WorkbenchError, BackendError) as error:
        raise SystemExit(f"error: {error}") from None
