"""Read a technique, which is a claim with a part: `NAME.yaml` has the settings that enable it, `NAME.py` its equation.

technique: Sliding window
kind: attention
paper: "Beltagy et al., 2020: Longformer: The Long-Document Transformer (arXiv:2004.05150)"
use: {attention.sliding_window: 256}
says: "A window is nearly as good as full attention."
rule: "bits_per_byte_ratio <= 1.02 and bytes_ratio <= 0.6"
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator

from workbench.claims.claim import Line, Statement, parse_rule, read_settings
from workbench.claims.comparison import BASELINE, FIGURES, QUICK, SETTINGS, TECHNIQUE, Kind
from workbench.claims.summary import Summary, digest, read_summaries
from workbench.errors import WorkbenchError, nearest
from workbench.experiment.experiment import Experiment
from workbench.experiment.rule import FigureRule
from workbench.own_folder import OWN_EXPERIMENTS
from workbench.settings import non_default_settings

ZOO_FOLDER = OWN_EXPERIMENTS / "zoo"
FIGURES_FUNCTION = "figures"  # function of a technique's file: no arguments, returns a dict literal of numbers


class Technique(Statement):
    """The settings of a technique. `use` and `baseline` are changes of an experiment, in the form of variants."""

    technique: Line  # name in tables
    kind: Kind
    paper: Line  # authors, year: title (where it is)
    use: Annotated[dict[str, Any], Field(min_length=1)]  # the line of YAML that enables it
    baseline: dict[str, Any] = {}  # settings to compare with; {} is the unchanged model
    held: str = ""  # the finding here, in one sentence, after the run
    workload: dict[str, Any] = {}  # settings of the workload that differ from those of its kind
    model: dict[str, Any] = {}  # settings of the model, for baseline and reference too

    @field_validator("technique", "paper", "held")
    @classmethod
    def _plain_line(cls, value: str) -> str:
        return cls._one_line(value)


@dataclass(frozen=True)
class LoadedTechnique:
    """A technique with its files. `name` is the stem of both; `rule` its parsed rule."""

    name: str
    file: Path
    source_file: Path
    settings: Technique
    rule: FigureRule

    @classmethod
    def load(cls, file: Path) -> LoadedTechnique:
        """Read one technique.

        Raises:
            WorkbenchError: a mistake in the YAML, a missing or wrong `NAME.py`, or a figure that the rule cannot use.
        """
        settings = read_settings(file, Technique)
        source = file.with_suffix(".py")
        if not source.is_file():
            raise WorkbenchError(
                f"{file.parent.name}/{file.name}: there is no {source.name} beside it; write one with the equation in "
                "its docstring"
            )
        known = [*FIGURES[settings.kind], *own_figures(source)]
        return cls(file.stem, file, source, settings, parse_rule(settings.rule, file, known))

    @cached_property
    def summaries(self) -> list[Summary]:
        """The stored summaries; the first decides: of the first of its models, the newest."""
        newest = sorted(read_summaries(self.file), key=lambda each: each.date, reverse=True)
        first = self.settings.models[:1]
        return sorted(newest, key=lambda each: bool(first) and each.model not in first)

    @cached_property
    def docstring(self) -> str:
        """Return the docstring of the technique's file: a description and the paper's equation."""
        return ast.get_docstring(_parsed(self.source_file)) or ""

    @property
    def summary(self) -> str:
        """Return the docstring's first paragraph on one line."""
        return " ".join(self.docstring.split("\n\n")[0].split())

    @cached_property
    def lines(self) -> int:
        """Return the number of lines of the technique's file; see `count_lines`."""
        return count_lines(self.source_file)

    @property
    def inputs(self) -> str:
        """The digest of what decides a measurement, and of the rule; docstring, comments and `held` are left out."""
        tree = _parsed(self.source_file)
        body = tree.body[1:] if ast.get_docstring(tree) is not None else tree.body
        decides = self.settings.model_dump(mode="json", include={"use", "baseline", "rule", "workload", "model"})
        settings = [each for each in non_default_settings(experiment_of(self)) if not each[0].startswith("question")]
        return digest([decides, [ast.dump(node) for node in body], settings])


def count_lines(file: Path) -> int:
    """Count the lines of a Python file without its module docstring and the blank lines at its beginning and end."""
    lines = file.read_text(encoding="utf-8").splitlines()
    tree = _parsed(file)
    if ast.get_docstring(tree) is not None:
        del lines[tree.body[0].lineno - 1 : tree.body[0].end_lineno]
    while lines and not lines[0].strip():
        del lines[0]
    while lines and not lines[-1].strip():
        del lines[-1]
    return len(lines)


def own_figures(file: Path) -> list[str]:
    """Return the names of the figures that the file's function `figures` returns, read from its source.

    Raises WorkbenchError unless the names are literals, since a rule's names are checked before any run."""
    tree = _parsed(file)
    function = next((n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == FIGURES_FUNCTION), None)
    if function is None:
        return []
    names: list[str] = []
    for node in ast.walk(function):
        if isinstance(node, ast.Return):
            names += _names_of(node.value, file)
    if not names or function.args.args:
        raise _not_written_out(file)
    return list(dict.fromkeys(names))


def _names_of(value: ast.expr | None, file: Path) -> list[str]:
    if isinstance(value, ast.Dict):
        keys = [key.value if isinstance(key, ast.Constant) else None for key in value.keys]
    elif isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "dict":
        keys = [None] * len(value.args) + [keyword.arg for keyword in value.keywords]
    else:
        raise _not_written_out(file)
    if not all(isinstance(key, str) for key in keys):
        raise _not_written_out(file)
    return [str(key) for key in keys]


def _not_written_out(file: Path) -> WorkbenchError:
    example = 'return {"detected": share}'
    return WorkbenchError(
        f"{file.parent.name}/{file.name}: {FIGURES_FUNCTION} must take no arguments and return a dict with its names "
        f"written out, for example `{example}`"
    )


def _parsed(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError) as error:
        raise WorkbenchError(f"{file.parent.name}/{file.name}: is no Python source ({error})") from None


def load_zoo(folder: Path = ZOO_FOLDER) -> dict[str, LoadedTechnique]:
    """Return all techniques of a folder by name, in alphabetical order. Settings are checked; parts are not loaded.

    Raises:
        WorkbenchError: the first mistake in a technique, or a folder without techniques.
    """
    found = {file.stem: LoadedTechnique.load(file) for file in sorted(folder.glob("*.yaml"))}
    if not found:
        raise WorkbenchError(f"{folder}: no entries there; give a folder with NAME.yaml and NAME.py")
    for technique in found.values():
        experiment_of(technique)
    return found


def select_entries(entries: Mapping[str, LoadedTechnique], names: Sequence[str]) -> dict[str, LoadedTechnique]:
    """Select techniques by name. Raises WorkbenchError for an unknown name."""
    for wrong in (name for name in names if name not in entries):
        raise WorkbenchError(f"no entry {wrong!r}{nearest(wrong, entries)}; `workbench zoo` lists them")
    return {name: entries[name] for name in names}


def experiment_of(technique: LoadedTechnique, quick: bool = False, model: str = "") -> Experiment:
    """Return the experiment that measures `technique`, on `model` if one is given.

    Raises:
        WorkbenchError: for wrong settings of the technique, its workload or a variant, named by their path.
    """
    settings = technique.settings
    where, kind = f"{technique.file.parent.name}/{technique.file.name}", settings.kind
    values = copy.deepcopy(SETTINGS[kind]) | {
        "question": f"{settings.technique}: {settings.says}",
        "variants": {BASELINE: settings.baseline, TECHNIQUE: settings.use},
    }
    values["workload"] = _merged(values["workload"], settings.workload)
    values["model"] = _merged(values["model"], settings.model)
    if model := model or next(iter(settings.models), ""):
        values["model"] = values["model"] | {"name": model}
    experiment = Experiment.from_values(values, where)
    if quick:
        experiment = experiment.with_(*QUICK[kind])
    experiment.single(settings.baseline, f"{where}: baseline")
    experiment.single(settings.use, f"{where}: use")
    return experiment


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Return `below` with the settings of `above` on top, group by group; another kind of settings replaces a group."""
    if "kind" in above and above["kind"] != below.get("kind"):
        return above
    found = dict(below)
    for name, value in above.items():
        inner = found.get(name)
        found[name] = _merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return found
