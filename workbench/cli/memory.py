"""`workbench memory`: compute weights, cache and activations of a model by formula."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from workbench.cli.shared import AsJson, console, print_json
from workbench.display import Table
from workbench.errors import WorkbenchError


def memory(
    spec: Annotated[str, typer.Argument(help="shape:NAME, demo, smollm2, FILE.gguf, or a folder or its config.json")],
    context: Annotated[
        int | None, typer.Option(help="tokens of each sequence; the model's own context unless given")
    ] = None,
    batch: Annotated[int, typer.Option(help="sequences at once")] = 1,
    dtype: Annotated[str, typer.Option(help="of weights and cache: float16, bfloat16 or float32")] = "bfloat16",
    weights: Annotated[str, typer.Option(help="dense, int8 or int4")] = "dense",
    cache: Annotated[str, typer.Option(help="dense, int8, int4 or fp8")] = "dense",
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="cache.… or attention.… as in an experiment; may be repeated"),
    ] = None,
    step_tokens: Annotated[int, typer.Option("--max-num-batched-tokens", help="tokens a step computes at most")] = 512,
    page_size: Annotated[int, typer.Option(help="count whole pages of so many tokens; 1 counts tokens")] = 1,
    available: Annotated[
        str | None, typer.Option("--memory", help="of each device: how many sequences fit, e.g. 80GB or 64GiB")
    ] = None,
    tensor: Annotated[int, typer.Option(help="ranks that share each layer: heads, columns, experts")] = 1,
    pipeline: Annotated[int, typer.Option(help="stages of whole layers, one after the other")] = 1,
    as_json: AsJson = False,
) -> None:
    """Compute weights, cache and activations of a model of any size: nothing is loaded."""
    from workbench.memory import report as memory_report

    for name, value in (
        ("context", context),
        ("batch", batch),
        ("max-num-batched-tokens", step_tokens),
        ("page-size", page_size),
        ("tensor", tensor),
        ("pipeline", pipeline),
    ):
        if value is not None and value < 1:
            raise WorkbenchError(f"--{name} {value}: must be at least 1")
    found = memory_report.report_for(
        spec, context=context, batch=batch, dtype=dtype, weights=weights, cache=cache, changes=tuple(set_ or ()),
        step_tokens=step_tokens, page_size=page_size, memory=available, tensor=tensor, pipeline=pipeline,
    )  # fmt: skip
    print_json(found) if as_json else show(found)


def show(found: dict[str, Any]) -> None:
    from rich.text import Text

    from workbench.memory.report import describe_longest, format_bytes

    sizes = {
        "weights": found["weight_bytes"],
        "cache, a token": found["cache_bytes_per_token"],
        f"cache, a sequence of {found['context']:,}": found["cache_bytes_per_sequence"],
        f"cache, {found['batch']:,} of them": found["cache_bytes"],
        "activations": found["activation_bytes"],
        "in all": found["total_bytes"],
    }
    rows = [(name, f"{size:,}", format_bytes(size)) for name, size in sizes.items()]
    out = console()
    formats = f"weights {found['weights']}, cache {found['cache']}, {found['dtype']}"
    heading = f"{found['model']}: {found['parameters']:,} parameters, {formats}"
    out.print(Text(heading, style="bold"), soft_wrap=True)
    out.print(Table("", rows, ("memory", "bytes", ""), left=()))
    if "ranks" in found:
        columns = ("rank", "layers", "weights", "cache", "activations", "in all")
        out.print(Table("", [_rank_row(each) for each in found["ranks"]], columns, left=()))
    if (saving := found["grouped_saving"]) and saving > 1:
        out.print(
            Text(f"with a key/value head for every query head the cache were {saving:g} times as large"), soft_wrap=True
        )
    if "sequences" in found:
        size = format_bytes(found["memory_bytes"])
        words = f"{found['sequences']:,} such sequences fit into {size} beside weights and activations"
        out.print(Text(words), soft_wrap=True)
        out.print(Text(f"or {describe_longest(found)}"), soft_wrap=True)
    for line in found["remarks"]:
        out.print(Text(line), soft_wrap=True)


def _rank_row(found: dict[str, Any]) -> tuple[str, ...]:
    from workbench.memory.report import format_bytes

    first, end = found["layers"]
    sizes = (found[name] for name in ("weight_bytes", "cache_bytes", "activation_bytes", "total_bytes"))
    return f"stage {found['stage']}, rank {found['rank']}", f"{first} to {end - 1}", *map(format_bytes, sizes)
