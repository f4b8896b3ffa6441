"""`workbench quality`: compare attention variants and cache formats in quality, memory and speed."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from workbench.cli.shared import AsJson, asked_experiment, backend_errors, console, print_json, settings_option
from workbench.errors import WorkbenchError

QUESTION = "What quality do these variants cost, and what memory and time do they save?"
DEFAULT_VARIANTS = ("model.dtype=bfloat16", "cache.format=int8", "cache.format=int4")


def quality(
    variants: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME:] PATH=VALUE ...", help="one variant each, quoted: 'NAME: PATH=VALUE ...'"),
    ] = None,
    model: Annotated[str, typer.Option(help="a folder with a tokenizer, demo or demo-draft")] = "demo",
    text: Annotated[list[Path] | None, typer.Option(help="text file to score, in place of workload.texts")] = None,
    set_: Annotated[
        list[str] | None,
        settings_option("backend, model.dtype, workload.windows, workload.speed=null, workload.pool=null"),
    ] = None,
    out: Annotated[Path, typer.Option(help="folder in which the run folder is made")] = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Compare variants in quality, memory and speed.

    Each is compared with the same model in float32 with a dense cache. Quality: bits per byte of text, KL divergence,
    agreement of the top token, greedy output, copying by depth. Cost: bytes per token, decode speed, sequences that
    fit. Default variants: bfloat16, an INT8 and an INT4 cache.
    """
    from workbench.measure.compare_variants import run_comparison
    from workbench.reports import terminal as report

    values = {
        "question": QUESTION,
        "model": {"name": model, "dtype": "float32"},
        "workload": {"kind": "quality", "windows": 12, "texts": [str(path) for path in text] if text else "demo"},
        "variants": dict(parse_variant(words) for words in variants or DEFAULT_VARIANTS),
    }
    experiment = asked_experiment("quality", values, set_)
    with backend_errors():
        record = run_comparison(experiment, out, "quality", progress=not as_json)
    if as_json:
        print_json({"run": str(record.path), **record.summary})
    else:
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
