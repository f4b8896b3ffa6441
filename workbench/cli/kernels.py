"""`workbench kernels list | check | bench | show | ahead`: operators and their kernels on each backend."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workbench.cli.shared import AsJson, backend_errors, changed_settings, console, print_json, settings_option
from workbench.errors import WorkbenchError
from workbench.progress import Progress

if TYPE_CHECKING:
    from compiled_kernels.backends import Backend
    from compiled_kernels.stage import CompilerStages

DECODE_STEP = "decode_step"
app = typer.Typer(
    help="List, check, time and show kernels of backends.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
BackendOption = Annotated[
    list[str] | None, typer.Option("--backend", help="eager, inductor, triton or mlir; may be repeated")
]
Operator = Annotated[str | None, typer.Option(help="name of one operator; all unless given")]


@app.command("list", epilog="Example: `workbench kernels list`")
def list_(as_json: AsJson = False) -> None:
    """List the operators: computation, source files, backends, cases, and unsupported combinations."""
    from compiled_kernels.listing import list_operators
    from workbench.bench import kernel_tables

    found = list_operators()
    print_json(found) if as_json else kernel_tables.show_list(found, console())


@app.command(epilog="Example: `workbench kernels check --backend mlir --operator rms_norm`")
def check(operator: Operator = None, backend: BackendOption = None, as_json: AsJson = False) -> None:
    """Check every backend against the specification in every case. Compiling them takes minutes the first time."""
    from compiled_kernels.check import check as rows_of
    from workbench.bench import kernel_tables

    with backend_errors():
        backends = _parse_backends(backend)
        rows = []
        with Progress(total=_rows(operator, backends), desc="checking", unit="case", disable=as_json) as bar:
            for row in rows_of(backends, operator, compiled=True, interpret=True):
                bar.set_description(f"{row.operator} {row.backend}")
                bar.update()
                rows.append(asdict(row))
    print_json(rows) if as_json else kernel_tables.show_check(rows, console())
    raise typer.Exit(1 if any(row["status"] == "failed" for row in rows) else 0)


@app.command(epilog="Example: `workbench kernels bench --operator linear_quantized --threads 2`")
def bench(
    operator: Operator = None,
    backend: BackendOption = None,
    case: Annotated[str | None, typer.Option(help="name of one case; all unless given")] = None,
    threads: Annotated[int | None, typer.Option(help="number of threads; torch's own number unless given")] = None,
    seconds: Annotated[float, typer.Option(help="seconds to spend on each backend of a case")] = 0.4,
    out: Annotated[Path | None, typer.Option(help="folder for the record, e.g. experiments/records")] = None,
    as_json: AsJson = False,
) -> None:
    """Time the backends, also as fractions of this machine's ceilings. Incorrect cases are not timed."""
    from compiled_kernels.cases import require_known
    from workbench.bench import kernel_tables
    from workbench.bench.kernels import kernel_bench, timed_cases
    from workbench.runs.folder import write_dated_record

    with backend_errors():
        cases, backends = timed_cases(operator), _parse_backends(backend)
        if case is not None:
            names = dict.fromkeys(each.name for _, each in cases)
            require_known("timed case", case, names)
            cases = [(suite, each) for suite, each in cases if each.name == case]
        with Progress(total=len(cases), desc="timing", unit="case", disable=as_json) as bar:

            def tell(line: str) -> None:
                bar.set_description(line)
                bar.update()

            record = kernel_bench(cases, backends, threads, seconds, tell)
    if out is not None:
        typer.echo(f"record  {write_dated_record(record, out, 'kernels')}", err=True)
    print_json(record) if as_json else kernel_tables.show_bench(record, console())


@app.command(epilog="Example: `workbench kernels show add_rms_norm --backend inductor --stage fusion`")
def show(
    operator: Annotated[str, typer.Argument(help="an operator of `kernels list`, or decode_step")],
    backend: Annotated[str | None, typer.Option(help="eager, inductor, triton or mlir; inductor unless given")] = None,
    stage: Annotated[str | None, typer.Option(help="stage to print; lists the stages unless given")] = None,
    case: Annotated[str | None, typer.Option(help="name of the case; the first timed one unless given")] = None,
    model: Annotated[str | None, typer.Option(help="decode_step only: model; demo unless given")] = None,
    rows: Annotated[
        int | None, typer.Option(min=1, help="decode_step only: number of decoding sequences; 1 unless given")
    ] = None,
    set_: Annotated[
        list[str] | None, settings_option("model.dtype, model.weights, cache.page_size (decode_step only)")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the stages of compiling an operator, or a model's whole decode step, down to machine code."""
    from workbench.bench import kernel_tables

    with backend_errors():
        if operator == DECODE_STEP:
            if case is not None:
                raise WorkbenchError(f"--case: has no effect: {DECODE_STEP} has a --model and no cases")
            name, summary, found = _step(backend, model or "demo", rows or 1, set_)
        else:
            if model or rows or set_:
                raise WorkbenchError(f"--model, --rows, --set: have no effect: only {DECODE_STEP} has them")
            name, summary, found = _operator(operator, backend or "inductor", case, overview=stage is None)
    if stage is None:
        print_json(summary) if as_json else kernel_tables.show_stages(summary, console())
        return
    from compiled_kernels.cases import require_known

    with backend_errors():
        chosen = require_known(f"stage of {operator} on {summary['backend']}", stage, found.stages)
    if as_json:
        print_json({**summary, "stage": chosen, "text": found.stages[chosen].text, "data": found.stages[chosen].data})
    else:
        note = f"{operator} {name} on {summary['backend']}, {chosen}; artifact {found.artifact} ({found.note})"
        typer.echo(note, err=True)
        print(found.stages[chosen].text)


@app.command(epilog="Example: `workbench kernels ahead --target aarch64 --operator linear`")
def ahead(
    target: Annotated[str, typer.Option(help="processor to compile for: aarch64")] = "aarch64",
    operator: Operator = None,
    as_json: AsJson = False,
) -> None:
    """Compile the mlir backend's kernels for another processor; list the portable kernels, and why others are not
    portable.
    """
    from compiled_kernels.cases import require_known, suites
    from compiled_kernels.mlir import ahead as ahead_of_time
    from workbench.bench import kernel_tables

    with backend_errors():
        require_known("target", target, ahead_of_time.TARGETS)
        rows = []
        names = [suite.operator for suite in suites()] if operator is None else [operator]
        with Progress(total=len(names), desc="compiling", unit="operator", disable=as_json) as bar:
            for name in names:
                bar.set_description(name)
                rows += [asdict(row) for row in ahead_of_time.portable_kernels(name, target)]
                bar.update()
    print_json(rows) if as_json else kernel_tables.show_ahead(rows, target, console())
    raise typer.Exit(1 if any(row["status"] == "failed" for row in rows) else 0)


def _operator(
    operator: str, backend: str, case: str | None, overview: bool
) -> tuple[str, dict[str, Any], CompilerStages]:
    """Return the case's name, a summary, and the stages of one operator."""
    from compiled_kernels.cases import case_of, suite_of
    from compiled_kernels.stages import stages_of
    from workbench.bench import kernels as kernel_show

    suite = suite_of(operator)
    which, (chosen,) = case_of(suite, case), _parse_backends([backend])
    found = stages_of(suite, None if case is None else which, chosen)
    summary: dict[str, Any] = {"operator": operator, "backend": backend, "case": which.name}
    summary |= {"artifact": found.artifact, "note": found.note}
    return (
        which.name,
        {**summary, **(kernel_show.stages_overview(suite, which, chosen, found) if overview else {})},
        found,
    )


def _step(
    backend: str | None, model: str, rows: int, changes: list[str] | None
) -> tuple[str, dict[str, Any], CompilerStages]:
    from compiled_kernels.backends import Backend
    from workbench.bench.kernels import decode_step_stages, stage_sizes
    from workbench.engine.config import EngineConfig

    if backend not in (None, str(Backend.MLIR)):
        _parse_backends([backend])
        raise WorkbenchError(f"{DECODE_STEP} --backend {backend}: only backend mlir compiles a step as one function")
    engine = EngineConfig.build(**changed_settings({"model": {"name": model}}, changes))
    config, page_size = engine.model, engine.cache.page_size
    found = decode_step_stages(config, rows, page_size)
    activations = "" if config.activations == "float" else f", activations {config.activations}"
    name = f"{config.name}, rows {rows}, weights {config.weights}{activations}, pages of {page_size}"
    summary = {
        "operator": DECODE_STEP,
        "backend": str(Backend.MLIR),
        "case": name,
        "artifact": found.artifact,
        "note": found.note,
    }
    return name, {**summary, "stages": stage_sizes(found)}, found


def _parse_backends(names: list[str] | None) -> tuple[Backend, ...]:
    from compiled_kernels.backends import Backend
    from compiled_kernels.cases import require_known

    return tuple(
        Backend(require_known("backend", name, list(Backend))) for name in dict.fromkeys(names or list(Backend))
    )


def _count(operator: str | None) -> int:
    from compiled_kernels.cases import suite_of, suites

    return sum(len(suite.cases) for suite in (suites() if operator is None else (suite_of(operator),)))


def _rows(operator: str | None, backends: tuple[Backend, ...]) -> int:
    """Count the rows of a check; the backend mlir is checked at every level of the instruction set."""
    from compiled_kernels.backends import Backend, backend_problems
    from compiled_kernels.level import available_levels

    levels = 0 if backend_problems()[Backend.MLIR] else len(available_levels()) - 1
    return _count(operator) * (len(backends) + levels * (Backend.MLIR in backends))
