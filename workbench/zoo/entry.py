"""Read one technique of the zoo: `NAME.yaml` with the settings that enable it, `NAME.py` with its part and equation.

    technique: Sliding window
    kind: attention
    paper: "Beltagy et al., 2020: Longformer: The Long-Document Transformer (arXiv:2004.05150)"
    use: {attention.sliding_window: 256}
    claim: "A window is nearly as good as full attention."
    rule: "bits_per_byte_ratio <= 1.02 and bytes_ratio <= 0.6"
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, field_validator

from workbench.errors import WorkbenchError, explain
from workbench.files import read_bytes, read_yaml
from workbench.settings import Settings
from workbench.zoo.figures import FIGURES, Kind
from workbench.zoo.rule import FigureRule

Line = Annotated[str, Field(min_length=1)]
FIGURES_FUNCTION = "figures"  # function of an entry's file: no arguments, returns a dict literal of numbers


class ZooEntry(Settings):
    """The settings of an entry. `use` and `baseline` are changes of an experiment, in the form of variants."""

    technique: Line  # name in tables
    kind: Kind
    paper: Line  # authors, year: title (where it is)
    use: Annotated[dict[str, Any], Field(min_length=1)]  # the line of YAML that enables it
    baseline: dict[str, Any] = {}  # settings to compare with; {} is the unchanged model
    claim: Line  # the paper's claim, in one sentence
    rule: Line  # condition on measured figures for the claim to hold, written before any run
    held: str = ""  # the finding here, in one sentence, after the run
    workload: dict[str, Any] = {}  # settings of the workload that differ from those of its kind
    model: dict[str, Any] = {}  # settings of the model, for baseline and reference too

    @field_validator("technique", "paper", "claim", "rule", "held")
    @classmethod
    def _one_line(cls, value: str) -> str:
        if value != value.strip() or len(value.splitlines()) > 1:
            raise ValueError("must be one line without blanks around it")
        return value


@dataclass(frozen=True)
class LoadedEntry:
    """An entry with its files. `name` is the stem of both; `rule` its parsed rule."""

    name: str
    yaml_file: Path
    source_file: Path
    settings: ZooEntry
    rule: FigureRule

    @classmethod
    def load(cls, yaml_file: Path) -> LoadedEntry:
        """Read one entry.

        Raises:
            WorkbenchError: a mistake in the YAML, a missing or wrong `NAME.py`, or a figure that the rule cannot use.
        """
        where = f"zoo/{yaml_file.name}"
        values = read_yaml(read_bytes(yaml_file), where)
        if not isinstance(values, dict):
            raise WorkbenchError(f"{where}: must be a mapping with technique, kind, paper, use, claim and rule")
        try:
            settings = ZooEntry.model_validate(values)
        except ValidationError as error:
            raise explain(error, where, ZooEntry) from None
        source = yaml_file.with_suffix(".py")
        if not source.is_file():
            raise WorkbenchError(
                f"{where}: there is no {source.name} beside it; write one with the equation in its docstring"
            )
        known = [*FIGURES[settings.kind], *own_figures(source)]
        try:
            rule = FigureRule.parse(settings.rule, known)
        except WorkbenchError as error:
            raise WorkbenchError(f"{where}: {error}") from None
        return cls(yaml_file.stem, yaml_file, source, settings, rule)

    @cached_property
    def docstring(self) -> str:
        """Return the docstring of the entry's file: a description and the paper's equation."""
        return ast.get_docstring(_parsed(self.source_file)) or ""

    @property
    def summary(self) -> str:
        """Return the docstring's first paragraph on one line."""
        return " ".join(self.docstring.split("\n\n")[0].split())

    @cached_property
    def lines(self) -> int:
        """Return the number of lines of the entry's file; see `count_lines`."""
        return count_lines(self.source_file)


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
        f"zoo/{file.name}: {FIGURES_FUNCTION} must take no arguments and return a dict with its names written out, "
        f"for example `{example}`"
    )


def _parsed(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError) as error:
        raise WorkbenchError(f"zoo/{file.name}: is no Python source ({error})") from None
