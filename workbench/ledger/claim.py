"""A claim as a value: what somebody says about inference, how it is put to the test, and what would refute it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from workbench import shown
from workbench.shown import Shown
from workbench.study.verdict import Outcome, RuleChange, Verdict

Numbers = Any  # what a rule reads: a run's rows, or the values by name of a calculation or a measurement


@dataclass(frozen=True)
class Source:
    """Who says it, and with which figures, in our words."""

    name: str
    figures: str


@dataclass(frozen=True)
class Run:
    """The experiment `name`.yaml beside the claims; its rows are the numbers. `quick` are settings for a first look."""

    name: str
    quick: tuple[str, ...] = ()


@dataclass(frozen=True)
class Calculation:
    """Numbers that come out the same everywhere. `machine` is whose numbers they are, a data sheet's say."""

    numbers: Callable[[], Numbers]
    machine: str = "any (calculated)"


@dataclass(frozen=True)
class Measurement:
    """A small measurement on this machine, kept as a record of its `name`, which several claims may share. `numbers`
    is told whether a quick look is enough. `timed` is false where other work on the processor changes nothing."""

    name: str
    numbers: Callable[[bool], Numbers]
    timed: bool = True


@dataclass(frozen=True)
class Missing:
    """What a test would need that is not here."""

    needs: str


@dataclass(frozen=True)
class Unbuilt:
    """What a test would need that this project has not built: no machine is to blame, and no verdict is given."""

    what: str


Evidence = Run | Calculation | Measurement | Missing | Unbuilt
OUTCOMES: tuple[Outcome, ...] = ("holds", "holds-with-limits", "refuted")  # what a rule may say of evidence


@dataclass(frozen=True)
class Ruling:
    """What a rule makes of numbers: `because` says them, `limits` where the claim holds, `figures` are ours by name."""

    outcome: Outcome
    because: str
    limits: str = ""
    figures: Mapping[str, float | str] = field(default_factory=dict)


# An experiment's judge is made of such functions; what they give names the claim itself. Of a rule that gives a Ruling
# the docstring is the rule in words.
Rule = Callable[[Numbers], Verdict | Ruling]


Gives = Mapping[Outcome, Numbers | Callable[[], Numbers]]
Never = Mapping[Outcome, str]


@dataclass(frozen=True)
class Trial:
    """One way to put a claim to the test: `evidence` gives numbers, `rule` says what they mean.

    `gives` has, by outcome, numbers of the evidence's own kind under which the rule says so, or a function that
    computes them (the same calculation with other inputs). `never` has the outcomes that no such numbers lead to, and
    why. Together they name every outcome: a rule shows that its verdict could have been another. A rule that can
    never refute is no test: it is shown as an illustration and decides nothing. `changed` are changes of the rule
    after a look, where the rule itself does not tell them.
    """

    evidence: Evidence
    rule: Rule
    gives: Gives
    never: Never = field(default_factory=dict)
    changed: tuple[RuleChange, ...] = ()

    @property
    def illustrates(self) -> str:
        """Why the rule cannot fail, where it cannot: it then tests nothing. Empty for a test."""
        return self.never.get("refuted", "")

    def example(self, outcome: Outcome) -> Numbers:
        """Evidence under which the rule gives `outcome`. Raises KeyError where it gives it under none."""
        found = self.gives[outcome]
        return found() if callable(found) else found

    @property
    def told(self) -> str:
        """Its evidence in a word or two."""
        match self.evidence:
            case Run(name):
                return f"run {name}"
            case Measurement(name):
                return f"measurement {name}"
            case Calculation():
                return "calculation"
            case Missing():
                return "missing"
            case Unbuilt():
                return "not built"


@dataclass(frozen=True)
class Table:
    """`title`, `headings` and cells, for a terminal or a page."""

    title: str
    headings: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


@dataclass(frozen=True)
class Claim(Shown):
    """`says` is the statement in our words. The first trial that can fail decides; others tell of other machines, or
    illustrate. `where` makes, of the `Records` that are there, tables that show from which size on it is true."""

    id: str
    says: str
    sources: tuple[Source, ...]
    trials: tuple[Trial, ...]
    where: Callable[[Any], Sequence[Table]] | None = None  # of the Records that are there

    @property
    def deciding(self) -> int:
        """The place of the first trial whose rule can fail; the first one's where none can."""
        return next((place for place, trial in enumerate(self.trials) if not trial.illustrates), 0)

    def _shown(self) -> shown.Table:
        rows = [("says", self.says), *((source.name, source.figures) for source in self.sources)]
        rows += [("put to the test by", trial.told) for trial in self.trials]
        return shown.Table(self.id, rows)


def judged(claim: Claim, trial: Trial, numbers: Numbers) -> Verdict:
    """What the trial's rule makes of `numbers`."""
    found = trial.rule(numbers)
    if isinstance(found, Verdict):
        return found
    words = " ".join((trial.rule.__doc__ or "").split())
    return Verdict(claim.id, claim.says, words, found.outcome, found.because, found.limits, found.figures)


@dataclass(frozen=True)
class OfJudge:
    """The rule of one claim where an experiment's judge speaks of several: its verdict on `claim`."""

    judge: Callable[[Numbers], Sequence[Verdict]]
    claim: str

    def __call__(self, numbers: Numbers) -> Verdict:
        return next(verdict for verdict in self.judge(numbers) if verdict.claim == self.claim)
