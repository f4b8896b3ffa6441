"""Read claims: `ID.yaml` has what is said and by whom, the trials that measure it, and the rule that judges them.

    says: 8 KV heads for 64 query heads shrink the cache 8 times
    sources: {A: 8 times}
    trials: [{run: kv_groups, figures: "experiments.kv_groups:saving"}]
    rule: bytes_deviation <= 0.02 and 8 <= query_heads_per_kv_head <= 8 else refuted

A trial's figures are numbers by name; `records/ID.json` beside the claim has them, measured by measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, field_validator, model_validator

from workbench.claims.summary import Figures, Summary, read_summaries
from workbench.display import Displayable, Table
from workbench.errors import WorkbenchError, explain, nearest
from workbench.experiment.rule import FigureRule
from workbench.experiment.verdict import Outcome, RuleChange, Verdict
from workbench.files import read_bytes, read_yaml
from workbench.own_folder import OWN_EXPERIMENTS
from workbench.settings import Settings

CLAIMS_FOLDER = OWN_EXPERIMENTS / "claims"
SOURCES = ("run", "calculation", "measurement", "missing", "unbuilt")  # of a trial's figures
Line = Annotated[str, Field(min_length=1)]


class Rule(Settings):
    """A rule with what has to be known of it. A trial has those of its claim unless it has its own."""

    rule: str = ""  # condition on the figures under which the claim holds, written before the run
    limits: str = ""  # where the claim is true, if it holds with limits; {NAME:.2f} is a figure
    never: dict[Outcome, Line] = {}  # outcomes that no evidence of this kind can give, each with the reason
    changed: tuple[RuleChange, ...] = ()  # changes of the rule after a look at results


class Trial(Rule):
    """A test of a claim. One of `SOURCES` says where its figures come from."""

    run: str = ""  # experiment NAME.yaml in the folder above the claims
    calculation: str = ""  # function that computes figures, equal on every machine
    measurement: str = ""  # function of `quick` (and of `model`, if the claim has models) that measures figures here
    missing: str = ""  # hardware or software that the test needs and this machine lacks
    unbuilt: str = ""  # part that the test needs and this project has not built
    figures: str = ""  # function from a run's rows to figures; VARIANT.MEASURE of the rows unless given
    arguments: dict[str, Any] = {}  # arguments of the function
    quick: tuple[str, ...] = ()  # changed settings of a run for a first look
    machine: str = "any (calculated)"  # origin of calculated figures
    timed: bool = True  # other processes can change the figures

    @model_validator(mode="after")
    def _one_source(self) -> Trial:
        if sum(bool(getattr(self, name)) for name in SOURCES) != 1:
            raise ValueError(f"needs exactly one of {', '.join(SOURCES)}")
        return self

    @property
    def label(self) -> str:
        """Return a short name of where the figures come from; a summary has it too."""
        if self.measurement:
            return f"measurement {self.measurement.rpartition(':')[2]}"
        return f"run {self.run}" if self.run else next(name for name in SOURCES if getattr(self, name))

    def owns(self, summary: Summary) -> bool:
        """Return whether a summary is of this trial: calculations differ in their machine."""
        return summary.trial == self.label and (not self.calculation or summary.machine == self.machine)


class Statement(Rule):
    """Hold the settings that claims and techniques have in common."""

    says: Line  # the claim, in one sentence of ours
    models: tuple[Line, ...] = ()  # models of the evidence, the deciding one first; () for those of the experiments

    @field_validator("says", "rule", "limits")
    @classmethod
    def _one_line(cls, value: str) -> str:
        if value != value.strip() or len(value.splitlines()) > 1:
            raise ValueError("must be one line without blanks around it")
        return value


class Claim(Statement):
    """The settings of a claim."""

    sources: Annotated[dict[str, Line], Field(min_length=1)]  # texts that make the claim, each with its figures
    trials: Annotated[tuple[Trial, ...], Field(min_length=1)]  # the first whose rule can refute the claim decides
    where: str = ""  # function that returns tables of where the claim is true, from the first trial's arguments


@dataclass(frozen=True)
class LoadedClaim(Displayable):
    """A claim with its file: `trials` have the rules that apply to them, `rules` are these, parsed."""

    name: str
    file: Path
    settings: Claim
    trials: tuple[Trial, ...]
    rules: tuple[FigureRule, ...]

    @classmethod
    def load(cls, file: Path) -> LoadedClaim:
        """Read one claim. Raises WorkbenchError for a mistake in the YAML or in a rule."""
        settings = read_settings(file, Claim)
        trials = tuple(_with_rule(trial, settings) for trial in settings.trials)
        rules = tuple(parse_rule(trial.rule, file) for trial in trials)
        return cls(file.stem, file, settings, trials, rules)

    @cached_property
    def summaries(self) -> list[Summary]:
        """The stored summaries of all trials."""
        return read_summaries(self.file)

    @property
    def deciding_trial(self) -> int:
        """The index of the first trial with a rule that can refute; 0 if there is none."""
        return next((i for i, trial in enumerate(self.trials) if "refuted" not in trial.never), 0)

    def of_trial(self, trial: Trial) -> list[Summary]:
        """Return the trial's summaries, the deciding one first: of the first of the claim's models, without
        contention, the newest."""
        found = sorted(filter(trial.owns, self.summaries), key=lambda each: each.date, reverse=True)
        first = self.settings.models[:1]
        return sorted(found, key=lambda each: (bool(first) and each.model not in first, each.is_noisy))

    def judge(self, trial: Trial, figures: Figures) -> Verdict:
        """Apply the trial's rule to figures."""
        rule = self.rules[self.trials.index(trial)]
        numbers = {name: value for name, value in figures.items() if not isinstance(value, str)}
        outcome = rule.outcome(numbers)
        limits = self._limits(trial, figures) if outcome == "holds-with-limits" else ""
        return Verdict(
            self.name, self.settings.says, rule.text, outcome, rule.reason(numbers), limits,
            {name: value for name, value in figures.items() if value is not None}, trial.changed,
        )  # fmt: skip

    def _limits(self, trial: Trial, figures: Figures) -> str:
        try:
            return trial.limits.format_map(figures)
        except (LookupError, ValueError, TypeError, AttributeError) as error:
            raise WorkbenchError(f"claim {self.name}: limits: cannot be written ({error})") from None

    def path_of(self, function: str) -> str:
        """Return the path of a function of the claim: FILE.py:NAME is a file beside the claim, if there is one."""
        return (
            f"{self.file.parent / function}" if (self.file.parent / function.partition(":")[0]).is_file() else function
        )

    def _display_table(self) -> Table:
        rows = [("says", self.settings.says), *self.settings.sources.items()]
        rows += [("put to the test by", trial.label) for trial in self.trials]
        return Table(self.name, rows)


def _with_rule(trial: Trial, claim: Claim) -> Trial:
    own = {name: getattr(trial, name) or getattr(claim, name) for name in Rule.model_fields}
    own["changed"] = (*claim.changed, *trial.changed)
    return trial.model_copy(update=own)


def read_settings(file: Path, kind: type[Settings]) -> Any:
    """Read a claim's YAML file as settings of `kind`. Raises WorkbenchError that names file and key."""
    where = f"{file.parent.name}/{file.name}"
    values = read_yaml(read_bytes(file), where)
    if not isinstance(values, dict):
        raise WorkbenchError(f"{where}: must be a mapping with says, rule, sources and trials")
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise explain(error, where, kind) from None


def parse_rule(text: str, file: Path, known: Sequence[str] | None = None) -> FigureRule:
    """Parse the rule of the claim in `file`. Raises WorkbenchError that names the file."""
    try:
        return FigureRule.parse(text, known)
    except WorkbenchError as error:
        raise WorkbenchError(f"{file.parent.name}/{file.name}: {error}") from None


def load_claims(folder: Path = CLAIMS_FOLDER) -> dict[str, LoadedClaim]:
    """Return every claim of a folder by its name, in alphabetical order.

    Raises:
        WorkbenchError: the first mistake in a claim, or a folder without claims.
    """
    found = {file.stem: LoadedClaim.load(file) for file in sorted(folder.glob("*.yaml"))}
    if not found:
        raise WorkbenchError(f"{folder}: no claims there; give a folder with ID.yaml files")
    return found


def select_claims(claims: Mapping[str, LoadedClaim], ids: Sequence[str]) -> dict[str, LoadedClaim]:
    """Select the claims `ids`; an empty `ids` selects all. WorkbenchError for an unknown id."""
    for wrong in (id for id in ids if id not in claims):
        raise WorkbenchError(f"no claim {wrong!r}{nearest(wrong, claims)}; `workbench claims` lists them")
    return {id: claims[id] for id in ids} if ids else dict(claims)
