"""`workbench convert`: write a model's weights in another format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from workbench.cli.shared import AsJson, console, print_json
from workbench.display import Table
from workbench.errors import WorkbenchError

TARGETS = ("compressed-tensors", "gguf")


def convert(
    source: Annotated[str, typer.Argument(help="a folder, a .gguf file, demo or demo-draft")],
    target: Annotated[Path, typer.Argument(help="a new folder; for gguf a new file")],
    to: Annotated[str, typer.Option(help=f"the files' format: {', '.join(TARGETS)}")] = TARGETS[0],
    weights: Annotated[str, typer.Option(help="of matrices: int8, int4, dense; for gguf f32 to q4_0 too")] = "int4",
    head_weights: Annotated[str, typer.Option(help="of the head: dense, or as the blocks")] = "dense",
    group: Annotated[int, typer.Option(help="columns that share a scale in int4")] = 64,
    as_json: AsJson = False,
) -> None:
    """Write a model's matrices as INT8 or INT4, which load as quickly as they are small, or as dense ones again."""
    from workbench.engine.config import parse_dtype
    from workbench.engine.loaded_model import describe_model, model_folder
    from workbench.model.hf.convert import convert_model
    from workbench.model.hf.convert_gguf import convert_to_gguf
    from workbench.model.quantized import WeightFormat

    if to not in TARGETS:
        raise WorkbenchError(f"--to {to}: must be one of {', '.join(TARGETS)}")
    folder = model_folder(source)
    if folder is None:
        raise WorkbenchError(f"{source}: a shape has no weights to convert; name a folder")
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
        console().print(Table("", [*rows, ("written", f"{found['bytes'] / 1e6:,.1f} MB")], ("what", str(target))))
