"""`workbench quality`: compare attention variants and cache formats in quality, memory and speed."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from workbench.cli.shared import OutputFormat, backend_errors, console, print_json
from workbench.errors import WorkbenchError, cannot_write

QUESTION = "What do these variants cost in quality, and what do they buy in memory and speed?"
DEFAULT_VARIANTS = ("model.dtype=bfloat16", "cache.format=int8", "cache.format=int4")


def quality(
    variants: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME:] PATH=VALUE ...", help="one variant each, quoted: its settings, a name before"),
    ] = None,
    model: Annotated[str, typer.Option(help="a folder with a tokenizer, demo or demo-draft")] = "demo",
    dtype: Annotated[str, typer.Option(help="of the variants: auto, float32 or bfloat16")] = "float32",
    backend: Annotated[
        str, typer.Option(help="of the variants: auto, eager (compiles nothing), mlir, inductor")
    ] = "auto",
    text: Annotated[
        list[Path] | None, typer.Option(help="score this file; the demo's held-out modules unless given")
    ] = None,
    windows: Annotated[int, typer.Option(help="of the model's context, the second half of each scored")] = 12,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="of all variants; may be repeated")
    ] = None,
    speed: Annotated[bool, typer.Option(help="also decode speed at several contexts")] = True,
    pool: Annotated[bool, typer.Option(help="also the sequences that fit into a fixed memory")] = True,
    format: Annotated[OutputFormat, typer.Option(help="how to print it")] = OutputFormat.TABLE,
    plot: Annotated[Path | None, typer.Option(help="also write the Pareto picture here: NAME.svg or NAME.png")] = None,
    out: Annotated[Path, typer.Option(help="folder in which the run folder is made")] = Path("runs"),
) -> None:
    """Compare each variant with the same model in float32 with a dense cache.

    Quality: bits per byte on held-out text, KL divergence, agreement of the top token, greedy output, copying by depth.
    Cost: bytes a token, decode speed, sequences that fit. Without variants: bfloat16, an INT8 and an INT4 cache.
    """
    from workbench.experiment.experiment import Experiment
    from workbench.measure import chart as pareto
    from workbench.measure.compare_variants import run_comparison
    from workbench.reports import terminal as report
    from workbench.reports import variants_table as comparison_text

    if plot is not None and plot.suffix not in (".svg", ".png"):
        raise WorkbenchError(f"--plot {plot}: must end in .svg or .png")
    if plot is not None and (problem := pareto.plotting_problem()):
        raise WorkbenchError(f"--plot {plot}: {problem}")
    work: dict = {"kind": "quality", "windows": windows, "texts": [str(path) for path in text or ()]}
    work |= {} if speed else {"speed": None}
    work |= {} if pool else {"pool": None}
    experiment = Experiment.from_values(
        {
            "question": QUESTION,
            "model": {"name": model, "dtype": dtype},
            "backend": backend,
            "workload": work,
            "variants": dict(parse_variant(words) for words in variants or DEFAULT_VARIANTS),
        },
        "quality",
    ).with_(*(set_ or ()))
    with backend_errors():
        record = run_comparison(experiment, out, "quality", progress=format is not OutputFormat.JSON)
    rows = record.summary["rows"]
    if plot is not None:
        content = pareto.render_chart(pareto.chart(rows, QUESTION), plot.suffix[1:])
        try:
            plot.write_bytes(content)
        except OSError as error:
            raise cannot_write(f"--plot {plot}", error) from None
    match format:
        case OutputFormat.JSON:
            print_json({"run": str(record.path), **record.summary})
        case OutputFormat.MD:
            print("\n".join(table.markdown() for table in comparison_text.variant_tables(rows)), end="")
        case OutputFormat.CSV:
            print(comparison_text.to_csv(rows), end="")
        case OutputFormat.TABLE:
            report.show(record, console())


def parse_variant(words: str) -> tuple[str, dict]:
    """Parse `[NAME:] PATH=VALUE PATH=VALUE ...` into a name and settings; values are YAML, quoted where necessary."""
    from workbench.files import read_yaml

    name, colon, rest = words.partition(": ")
    try:
        settings = shlex.split(rest if colon else words)
    except ValueError as error:
        raise WorkbenchError(f"variant {words!r}: {error}") from None
    changes = {}
    for setting in settings:
        path, equals, value = setting.partition("=")
        if not equals or not path:
            raise WorkbenchError(f"variant {words!r}: write PATH=VALUE, for example cache.format=int8, not {setting!r}")
        changes[path] = read_yaml(value, f"variant {words!r}, {path}")
    return (name if colon else words), changes
