"""A claim about inference as a value: its statement, its tests, and the results that would refute it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from workbench.custom import user_code
from workbench.display import Displayable, Table
from workbench.errors import WorkbenchError, require_tuple
from workbench.experiment.verdict import Outcome, RuleChange, Verdict

EvidenceNumbers = Any  # a rule's input: a run's rows, or named values of a calculation or a measurement


@dataclass(frozen=True)
class ClaimSource:
    """A text that makes the claim, summarized in our words with its figures."""

    name: str
    figures: str


@dataclass(frozen=True)
class RunEvidence:
    """The experiment `name`.yaml beside the claims; its rows are the numbers. `quick`: settings for a first look."""

    name: str
    quick: tuple[str, ...] = ()


@dataclass(frozen=True)
class CalculationEvidence:
    """Numbers that are equal on every machine. `machine` names their origin, a data sheet for example."""

    numbers: Callable[[], EvidenceNumbers]
    machine: str = "any (calculated)"


@dataclass(frozen=True)
class MeasurementEvidence:
    """A small measurement on this machine, stored as a record of its `name`; several claims may share it.

    `numbers` takes a flag for a quick look. `timed` is False if contention cannot change the numbers.
    """

    name: str
    numbers: Callable[[bool], EvidenceNumbers]
    timed: bool = True


@dataclass(frozen=True)
class MissingEvidence:
    """Hardware or software that a test needs and this machine lacks."""

    needs: str


@dataclass(frozen=True)
class UnbuiltEvidence:
    """A part that a test needs and this project has not built: the machine is not the reason, and no verdict is
    given.
    """

    what: str


Evidence = RunEvidence | CalculationEvidence | MeasurementEvidence | MissingEvidence | UnbuiltEvidence
OUTCOMES: tuple[Outcome, ...] = ("holds", "holds-with-limits", "refuted")  # a rule's possible outcomes


@dataclass(frozen=True)
class Ruling:
    """A rule's result: `reason` cites the numbers, `limits` the conditions under which the claim holds.

    `figures` are our numbers by name.
    """

    outcome: Outcome
    reason: str
    limits: str = ""
    figures: Mapping[str, float | str] = field(default_factory=dict)


# An experiment's judge is made of such functions; their verdicts name the claim. A rule that returns a Ruling states
# itself in its docstring.
Rule = Callable[[EvidenceNumbers], Verdict | Ruling]


OutcomeExamples = Mapping[Outcome, EvidenceNumbers | Callable[[], EvidenceNumbers]]
ImpossibleOutcomes = Mapping[Outcome, str]


@dataclass(frozen=True)
class ClaimTrial:
    """One test of a claim: `evidence` gives numbers, `rule` interprets them.

    A rule shows that its verdict could have been another: `examples` and `impossible` together name every outcome. A
    rule that can never refute is no test; it is shown as an illustration and decides nothing.

    Attributes:
        evidence: the source of numbers.
        rule: returns a verdict or a ruling; its docstring states it in words.
        examples: by outcome, numbers of the evidence's kind for which the rule gives that outcome, or a function that
            computes them (the same calculation with other inputs).
        impossible: outcomes without such numbers, each with the reason.
        changed: changes of the rule made after a look at results, if the rule itself does not list them.
    """

    evidence: Evidence
    rule: Rule
    examples: OutcomeExamples
    impossible: ImpossibleOutcomes = field(default_factory=dict)
    changed: tuple[RuleChange, ...] = ()

    @property
    def no_test_reason(self) -> str:
        """Return the reason why the rule cannot refute the claim; empty for a test."""
        return self.impossible.get("refuted", "")

    def example(self, outcome: Outcome) -> EvidenceNumbers:
        """Return numbers for which the rule gives `outcome`. Raises KeyError if there are none."""
        found = self.examples[outcome]
        return found() if callable(found) else found

    @property
    def evidence_label(self) -> str:
        """Return a short name of the evidence."""
        match self.evidence:
            case RunEvidence(name):
                return f"run {name}"
            case MeasurementEvidence(name):
                return f"measurement {name}"
            case CalculationEvidence():
                return "calculation"
            case MissingEvidence():
                return "missing"
            case UnbuiltEvidence():
                return "not built"


@dataclass(frozen=True)
class Claim(Displayable):
    """A claim: `says` is the statement in our words.

    The first trial that can fail decides; others report other machines, or illustrate. `condition_tables` takes the
    `RecordFolder` and returns tables of the sizes from which the claim is true.
    """

    id: str
    says: str
    sources: tuple[ClaimSource, ...]
    trials: tuple[ClaimTrial, ...]
    condition_tables: Callable[[Any], Sequence[Table]] | None = None  # made from the stored records

    def __post_init__(self) -> None:
        require_tuple(self.sources, ClaimSource, f"claim {self.id!r}: sources")
        require_tuple(self.trials, ClaimTrial, f"claim {self.id!r}: trials")

    @property
    def deciding_trial(self) -> int:
        """Return the index of the first trial with a rule that can fail; 0 if there is none."""
        return next((place for place, trial in enumerate(self.trials) if not trial.no_test_reason), 0)

    def _display_table(self) -> Table:
        rows = [("says", self.says), *((source.name, source.figures) for source in self.sources)]
        rows += [("put to the test by", trial.evidence_label) for trial in self.trials]
        return Table(self.id, rows)


def apply_rule(claim: Claim, trial: ClaimTrial, numbers: EvidenceNumbers) -> Verdict:
    """Apply the trial's rule to `numbers`. WorkbenchError if it raises, or returns neither a ruling nor a verdict."""
    with user_code("its rule must return a Ruling"):
        found = trial.rule(numbers)
        if isinstance(found, Verdict):
            return found
        if not isinstance(found, Ruling):
            raise TypeError(f"it returned {type(found).__name__}")
        words = " ".join((trial.rule.__doc__ or "").split())
        return Verdict(claim.id, claim.says, words, found.outcome, found.reason, found.limits, found.figures)


@dataclass(frozen=True)
class JudgeRule:
    """The rule of one claim, taken from an experiment's judge of several: its verdict on `claim`."""

    judge: Callable[[EvidenceNumbers], Sequence[Verdict]]
    claim: str

    def __call__(self, numbers: EvidenceNumbers) -> Verdict:
        known = {verdict.claim: verdict for verdict in self.judge(numbers)}
        if self.claim not in known:
            raise WorkbenchError(f"its judge has no verdict on {self.claim!r}; it has {', '.join(known) or 'none'}")
        return known[self.claim]
