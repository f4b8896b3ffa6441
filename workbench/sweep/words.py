"""Parse a sweep's options: `--set path=value,value` is an axis, `--zip` links axes, `--repeat` repeats."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from workbench.errors import WorkbenchError, explain
from workbench.files import UnreadableText, read_yaml
from workbench.study.experiment import Experiment
from workbench.study.sweep_part import Sweep, paths_overlap
from workbench.sweep.folder import SweepFolder


def experiment_with_axes(
    file: Path | Experiment, sets: Sequence[str] = (), zips: Sequence[str] = (), repeat: int | None = None
) -> Experiment:
    """Return the experiment (or the one in a file) with its sweep and the options together.

    The options win where both set a path: a single value changes the experiment and removes the axis, several are the
    axis. All of `zips` are one group.
    """
    words = [(word, *_parse_values(word, "--set")) for word in sets]
    plain = tuple(word for word, _, values in words if len(values) == 1)
    fixed = {path for _, path, values in words if len(values) == 1}
    axes = {path: values for _, path, values in words if len(values) > 1}
    linked = dict(_parse_values(word, "--zip") for word in zips)
    experiment = file.with_(*plain) if isinstance(file, Experiment) else Experiment.from_file(file, plain)
    own = experiment.sweep or Sweep()
    kept = {path: values for path, values in own.axes.items() if path not in fixed}
    for path in fixed:
        for swept in [*kept, *axes, *(path for group in (*own.linked, *own.overrides) for path in group), *linked]:
            if paths_overlap(path, swept):
                raise WorkbenchError(f"--set {path}: the sweep sets {swept}, so this would have no effect")
    try:
        groups = [*own.linked, *([linked] if linked else [])]
        changes = {"axes": {**kept, **axes}, "linked": groups, "repeat": own.repeat if repeat is None else repeat}
        sweep = Sweep.model_validate({**own.model_dump(), **changes})
    except ValidationError as error:
        raise explain(error, "sweep", Sweep) from None
    return experiment.model_copy(update={"sweep": sweep})


def open_sweep(source: Experiment | Path | str, sets: Sequence[str], out: Path) -> SweepFolder:
    """Open a sweep: a new one below `out` for an experiment or its file, or an existing one by its folder.

    An existing sweep gets the points of `sets` besides.
    """
    if isinstance(source, Experiment):
        return SweepFolder.create(experiment_with_axes(source, sets), out, "sweep")
    path = Path(source)
    if not path.is_dir():
        return SweepFolder.create(experiment_with_axes(path, sets), out, path.stem)
    found = SweepFolder.read(path)
    return found.extend(experiment_with_axes(found.experiment, sets)) if sets else found


def _parse_values(word: str, option: str) -> tuple[str, list[Any]]:
    """Split `PATH=VALUE,VALUE` into the path and its values; commas within brackets and quotes do not separate."""
    path, equals, text = word.partition("=")
    if not equals or not path:
        raise WorkbenchError(
            f"{option} {word}: write it as path=value,value, for example {option} cache.format=int8,int4"
        )
    try:
        values = read_yaml(f"[{text}\n]")
    except UnreadableText:
        values = [text]
    if not values:
        raise WorkbenchError(f"{option} {word}: names no value")
    return path, values
