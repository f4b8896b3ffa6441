"""The claims and their stored summaries: every row is there, every rule can go either way, and the figures are those of
the calculation or of the committed record."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape

import pytest
from hypothesis import find, settings
from hypothesis import strategies as st

from workbench.claims.claim import CLAIMS_FOLDER, LoadedClaim, load_claims
from workbench.claims.evidence import Work, judge, measure, run_figures
from workbench.claims.tables import claim_detail, claim_rows, deciding_rows, trial_lines
from workbench.claims.technique import load_zoo
from workbench.custom import resolve_path
from workbench.experiment.experiment import Experiment
from workbench.experiment.rule import BEST_FIRST, FigureRule
from workbench.experiment.verdict import Outcome
from workbench.widgets.claims import picture as claims_picture

RECORDS = CLAIMS_FOLDER.parent / "records"
TEXT = """
tok-roundtrip tok-ratio tok-cheap prompt-assembly prompt-static-first ctx-truncate
prefill-parallel prefill-compute-bound prefill-flat prefill-linear prefill-quadratic decode-sequential
decode-bandwidth-bound decode-flat-in-context latency-identity decode-dominates model-size-not-linear weights-frozen
kv-linear-step kv-formula kv-llama70b kv-two-sessions kv-gqa kv-memory-quadratic kv-exceeds-weights kv-quant-size
kv-quant-concurrency kv-window kv-paged
sample-order sample-temperature sample-topk-loops sample-topp-at-zero sample-greedy-repeats greedy-not-deterministic
stop-conditions
batch-amortises continuous-vs-static queue-p99 chunked-prefill pd-disaggregation prefix-cache-latency
prefix-cache-throughput prefix-routing agent-loop thinking-tokens spec-decode spec-acceptance ttft-vs-throughput
batch-no-stream stream-perceived
weights-70b weights-quality
price-asymmetry cache-prices cache-breakeven cache-daily cache-ttl-choice router-savings exact-cache semantic-cache
rich-prompt lost-in-the-middle compare-by-meaning
"""
ROWS = TEXT.split()
KNOWN = load_claims()
TRIALS = [(claim, number) for claim in KNOWN.values() for number in range(len(claim.trials))]
IDS = [f"{claim.name}-{number}" for claim, number in TRIALS]
RUNS = sorted({trial.run for claim in KNOWN.values() for trial in claim.trials if trial.run})
RULES = {name: technique.rule for name, technique in load_zoo().items()}


def test_every_row_is_a_claim() -> None:
    assert len(ROWS) == len(set(ROWS)) == 64
    assert set(ROWS) <= KNOWN.keys()


def drawn(rule: FigureRule) -> st.SearchStrategy[dict[str, float]]:
    """Draw figures below, at and above the numbers that the rule compares them with."""
    at: dict[str, set[float]] = {}
    for bound in rule.comparisons():
        near = 1e-3 * max(abs(bound.number), 1e-9)
        at.setdefault(bound.figure, set()).update((bound.number - near, bound.number, bound.number + near))
    return st.fixed_dictionaries({name: st.sampled_from(sorted(values)) for name, values in at.items()})


def gives(rule: FigureRule, outcome: Outcome) -> Mapping[str, float]:
    """Return figures for which the rule gives `outcome`. NoSuchExample if none are drawn."""
    return find(drawn(rule), lambda figures: rule.outcome(figures) == outcome,
                settings=settings(max_examples=3000, database=None, derandomize=True))  # fmt: skip


@pytest.mark.parametrize(("claim", "number"), TRIALS, ids=IDS)
def test_every_rule_can_give_each_outcome_or_says_why_not(claim: LoadedClaim, number: int) -> None:
    trial, rule = claim.trials[number], claim.rules[number]
    assert trial.never.keys() < set(BEST_FIRST)
    for outcome in BEST_FIRST:
        assert outcome in trial.never or gives(rule, outcome)
    assert trial.limits or "holds-with-limits" in trial.never


@pytest.mark.parametrize("name", RULES)
def test_every_rule_of_a_technique_can_go_either_way(name: str) -> None:
    assert gives(RULES[name], "holds") and gives(RULES[name], "refuted")


@pytest.mark.parametrize(("claim", "number"), TRIALS, ids=IDS)
def test_the_stored_figures_are_those_of_the_evidence(claim: LoadedClaim, number: int) -> None:
    """Of a calculation made again, or of the committed record; and the rule finds all that it compares."""
    trial, stored = claim.trials[number], claim.of_trial(claim.trials[number])
    assert bool(stored) != bool(trial.missing or trial.unbuilt)
    for summary in stored:
        assert claim.judge(trial, summary.figures).outcome != "not-testable-here"
        assert summary.machine and summary.date
        processor = not trial.calculation and not summary.machine.startswith("simulated")
        assert (summary.level is not None) == processor
        record = RECORDS / f"{summary.record}.json"
        if trial.calculation:
            ((_, again),) = measure(Work("", ((claim, trial),)), False, RECORDS)
            assert again.inputs == summary.inputs
            figures = again.figures
        elif trial.run and record.is_file():
            figures = run_figures(claim, trial, json.loads(record.read_text())["summary"]["rows"])
        else:
            continue
        assert figures.keys() == summary.figures.keys()
        for name, value in figures.items():  # a sum's last bits are each machine's own
            known = pytest.approx(value, rel=1e-3, abs=1e-6) if isinstance(value, int | float) else value
            assert summary.figures[name] == known


@pytest.mark.parametrize("claim", KNOWN.values(), ids=KNOWN)
def test_a_rule_that_cannot_fail_is_not_shown_as_a_test(claim: LoadedClaim) -> None:
    """It says so, and decides nothing; limits are those of a claim that holds with limits."""
    (row,) = claim_rows({claim.name: claim})
    rows = deciding_rows(claim)
    assert row["verdict"] == rows[claim.deciding_trial]["verdict"] != "no test"
    for trial, each in zip(claim.trials, rows, strict=True):
        assert (each["verdict"] == "no test") == ("refuted" in trial.never) == bool(each["no_test"])
        assert bool(each["limits"]) == (each["verdict"] == "holds-with-limits")


# Rules, or what they are asked of, that the log, a commit or the rule's own text says were changed after a look.
CHANGES = """
stop-conditions batch-amortises ttft-vs-throughput continuous-vs-static batch-no-stream stream-perceived queue-p99
chunked-prefill pd-disaggregation prefix-routing kv-evict-bounded kv-heavy-hitters kv-sinks kv-snapkv kv-llama70b
spec-decode greedy-not-deterministic exact-cache semantic-cache thinking-tokens router-savings prefill-flat
decode-bandwidth-bound kv-linear-step lost-in-the-middle prefix-cache-latency prefix-cache-throughput pools-pay-here
simulated-fleets
"""
CHANGED = CHANGES.split()


@pytest.mark.parametrize("id", CHANGED)
def test_a_rule_changed_after_a_look_says_so_where_it_is_shown(id: str) -> None:
    """In `claims show` and the widget, which both print what `claim_detail` gives, with its reason."""
    found = claim_detail(KNOWN[id])
    said = [words for trial in found["trials"] for name, words in trial_lines(trial) if name == "changed"]
    changes = [change for trial in KNOWN[id].trials for change in trial.changed]
    assert said and said == [str(change) for change in changes]
    assert all(all(vars(change).values()) for change in changes)
    page = claims_picture.draw_claims([], "", found, "")
    assert all(escape(words) in page for words in said)


def test_no_other_rule_was_changed() -> None:
    """So that the list above is whole: who changes a rule after a look adds it here."""
    assert {id for id, claim in KNOWN.items() if any(trial.changed for trial in claim.trials)} == set(CHANGED)


@pytest.mark.parametrize("name", RUNS)
def test_an_experiment_is_judged_by_the_claims_that_run_it(name: str) -> None:
    experiment = Experiment.from_file(CLAIMS_FOLDER.parent / f"{name}.yaml")
    assert experiment.judge is not None and experiment.judge.path == "workbench.claims.evidence:judge"
    assert experiment.judge.arguments == {"run": name}
    (newest, *_) = sorted(RECORDS.glob(f"{name}-2*.json"), reverse=True)
    found = judge(json.loads(newest.read_text())["summary"]["rows"], name)
    assert [each.claim for each in found] == [c.name for c in KNOWN.values() for t in c.trials if t.run == name]
    assert all(each.says == KNOWN[each.claim].settings.says and each.reason for each in found)


def test_a_function_is_shown_as_its_source() -> None:
    for claim in KNOWN.values():
        for trial in claim_detail(claim)["trials"]:
            assert trial["command"] == "-" or trial["rule_source"].startswith("def ")


def test_settled_by_calculation_where_sources_contradict() -> None:
    for id in ("prefill-flat", "prefill-linear", "prefill-quadratic", "decode-flat-in-context", "kv-llama70b",
               "kv-two-sessions", "cache-daily", "stated-token-times", "stated-savings"):  # fmt: skip
        claim = KNOWN[id]
        tables = resolve_path(claim.settings.where)(**claim.trials[0].arguments)
        assert all(len(row) == len(table.headings) for table in tables for row in table.rows) and tables
