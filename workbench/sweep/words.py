"""Parse a sweep's options: `--set path=value,value` is an axis, `--zip` links axes, `--repeat` repeats."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from workbench.errors import WorkbenchError, explain
from workbench.files import UnreadableText, read_yaml
from workbench.study.experiment import Experiment
from workbench.study.sweep_part import Sweep, overlap
from workbench.sweep.folder import SweepFolder


def experiment_from(
    file: Path | Experiment, sets: Sequence[str] = (), zips: Sequence[str] = (), repeat: int | None = None
) -> Experiment:
    """Return the experiment (or the one in a file) with its sweep and the options together.

    The options win where both set a path: a single value changes the experiment and removes the axis, several are the
    axis. All of `zips` are one group.
    """
    words = [(word, *_several(word, "--set")) for word in sets]
    plain = tuple(word for word, _, values in words if len(values) == 1)
    fixed = {path for _, path, values in words if len(values) == 1}
    axes = {path: values for _, path, values in words if len(values) > 1}
    linked = dict(_several(word, "--zip") for word in zips)
    experiment = file.with_(*plain) if isinstance(file, Experiment) else Experiment.read(file, plain)
    own = experiment.sweep or Sweep()
    kept = {path: values for path, values in own.axes.items() if path not in fixed}
    for path in fixed:
        for swept in [*kept, *axes, *(path for group in (*own.linked, *own.overrides) for path in group), *linked]:
            if overlap(path, swept):
                raise WorkbenchError(f"--set {path}: the sweep sets {swept}, so this would have no effect")
    try:
        groups = [*own.linked, *([linked] if linked else [])]
        changes = {"axes": {**kept, **axes}, "linked": groups, "repeat": own.repeat if repeat is None else repeat}
        sweep = Sweep.model_validate({**own.model_dump(), **changes})
    except ValidationError as error:
        raise explain(error, "sweep", Sweep) from None
    return experiment.model_copy(update={"sweep": sweep})


def sweep_of(what: Experiment | Path | str, sets: Sequence[str], out: Path) -> SweepFolder:
    """Open a sweep: a new one below `out` for an experiment or its file, or an existing one by its folder.

    An existing sweep gets the points of `sets` besides.
    """
    if isinstance(what, Experiment):
        return SweepFolder.planned(experiment_from(what, sets), out, "sweep")
    path = Path(what)
    if not path.is_dir():
        return SweepFolder.planned(experiment_from(path, sets), out, path.stem)
    found = SweepFolder.read(path)
    return found.extended(experiment_from(found.experiment, sets)) if sets else found


def _several(word: str, option: str) -> tuple[str, list[Any]]:
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
