"""`workbench model memory`: compute the memory of a model's weights, cache and activations."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from workbench.cli.shared import AsJson, asked_experiment, print_json, refuse_unused, say, settings_option
from workbench.display import Table
from workbench.units import format_bytes

USED = ("model.dtype", "model.weights", "cache", "attention", "schedule.max_num_batched_tokens")


def memory(
    spec: Annotated[str, typer.Argument(help="shape:NAME, demo, smollm2, FILE.gguf, or a folder or its config.json")],
    context: Annotated[
        int | None, typer.Option(min=1, help="tokens of each sequence; the model's own context unless given")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="sequences at once")] = 1,
    available: Annotated[
        str | None, typer.Option("--memory", help="memory of each device, such as 80GB: prints how many sequences fit")
    ] = None,
    tensor: Annotated[int, typer.Option(min=1, help="number of ranks that share each layer")] = 1,
    pipeline: Annotated[int, typer.Option(min=1, help="number of pipeline stages")] = 1,
    set_: Annotated[
        list[str] | None,
        settings_option(
            "model.dtype, model.weights, cache.format, cache.page_size, attention.sliding_window, "
            "schedule.max_num_batched_tokens"
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compute the memory of a model of any size.

    Print the bytes of weights, cache and activations, without loading the model."""
    from workbench.memory import report as memory_report

    values = {
        "model": {"dtype": "bfloat16", "weights": "dense"},
        "cache": {"page_size": 1},
        "schedule": {"max_num_batched_tokens": 512},
        "workload": {"kind": "random"},
    }
    refuse_unused("model memory", set_, USED)
    asked = asked_experiment("memory", values, set_)
    found = memory_report.report_for(
        spec, context=context, batch=batch, dtype=asked.model.dtype, weights=asked.model.weights,
        cache=str(asked.cache.format), changes=tuple(set_ or ()), memory=available, tensor=tensor, pipeline=pipeline,
        step_tokens=asked.schedule.max_num_batched_tokens, page_size=asked.cache.page_size,
    )  # fmt: skip
    print_json(found) if as_json else show(found)


def show(found: dict[str, Any]) -> None:
    from workbench.memory.report import describe_longest

    sizes = {
        "weights": found["weight_bytes"],
        "cache, a token": found["cache_bytes_per_token"],
        f"cache, a sequence of {found['context']:,}": found["cache_bytes_per_sequence"],
        f"cache, {found['batch']:,} of them": found["cache_bytes"],
        "activations": found["activation_bytes"],
        "in all": found["total_bytes"],
    }
    rows = [(name, f"{size:,}", format_bytes(size)) for name, size in sizes.items()]
    formats = f"weights {found['weights']}, cache {found['cache']}, {found['dtype']}"
    heading = f"{found['model']}: {found['parameters']:,} parameters, {formats}"
    say(heading, style="bold")
    say(Table("", rows, ("memory", "bytes", ""), left=()))
    if "ranks" in found:
        columns = ("rank", "layers", "weights", "cache", "activations", "in all")
        say(Table("", [_rank_row(each) for each in found["ranks"]], columns, left=()))
    if (saving := found["grouped_saving"]) and saving > 1:
        say(f"without grouped-query attention the cache would be {saving:g} times as large")
    if "sequences" in found:
        size = format_bytes(found["memory_bytes"])
        words = f"{found['sequences']:,} such sequences fit into {size} with weights and activations"
        say(words)
        say(f"or {describe_longest(found)}")
    say(*found["remarks"])


def _rank_row(found: dict[str, Any]) -> tuple[str, ...]:
    first, end = found["layers"]
    sizes = (found[name] for name in ("weight_bytes", "cache_bytes", "activation_bytes", "total_bytes"))
    return f"stage {found['stage']}, rank {found['rank']}", f"{first} to {end - 1}", *map(format_bytes, sizes)
