"""`workbench model convert`: write a model's weights in another format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from workbench.cli.shared import AsJson, print_json, say
from workbench.display import Table
from workbench.errors import WorkbenchError
from workbench.units import format_bytes

TARGETS = ("compressed-tensors", "gguf")


def convert(
    source: Annotated[str, typer.Argument(help="a folder, a .gguf file, demo or demo-draft")],
    target: Annotated[Path, typer.Argument(help="a new folder; a new file for gguf")],
    to: Annotated[str, typer.Option(help=f"the files' format: {', '.join(TARGETS)}")] = TARGETS[0],
    weights: Annotated[str, typer.Option(help="format of matrices: int8, int4, dense; gguf: f32 to q4_0 too")] = "int4",
    head_weights: Annotated[str, typer.Option(help="format of the head: dense, or the matrices' format")] = "dense",
    group: Annotated[int, typer.Option(help="number of columns that share a scale in int4")] = 64,
    as_json: AsJson = False,
) -> None:
    """Write a model's matrices in INT8, INT4 or dense format."""
    from workbench.engine.config import parse_dtype
    from workbench.engine.loaded_model import describe_model, model_folder
    from workbench.model.hf.convert import convert_model
    from workbench.model.hf.convert_gguf import convert_to_gguf
    from workbench.model.quantized import WeightFormat

    if to not in TARGETS:
        raise WorkbenchError(f"--to {to}: must be one of {', '.join(TARGETS)}")
    folder = model_folder(source)
    if folder is None:
        raise WorkbenchError(f"{source}: a shape has no weights to convert; give a model's folder")
    dtype = parse_dtype(describe_model(source)[1])
    if to == "gguf":
        found = convert_to_gguf(folder, target, weights, dtype)
    else:
        format = WeightFormat.parse(weights, head_weights, group)
        found = convert_model(folder, target, format, dtype)
    if as_json:
        print_json(found)
    else:
        rows = [("read", found["from"]), ("matrices", f"{found['matrices']} as {found['weights']}")]
        rows += [(key, found[key]) for key in ("tokenizer", "llama.cpp") if found.get(key)]
        say(Table("", [*rows, ("written", format_bytes(found["bytes"]))], ("what", str(target))))
