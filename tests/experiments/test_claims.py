"""The claims and the committed ledger: every row is there, every rule can go either way, every verdict is what its rule
makes of the calculation or of the committed record."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

import pytest

from workbench.claims.claim import CalculationEvidence, Claim, MissingEvidence, RunEvidence, UnbuiltEvidence, apply_rule
from workbench.claims.ledger import LEDGER_FILE, NO_TEST, RecordFolder, judge_trial, read_ledger
from workbench.claims.registry import CLAIMS_FOLDER, claim_errors, load_claims
from workbench.claims.stored_record import stored_records
from workbench.claims.tables import claim_detail, claim_rows, rule_source, trial_lines
from workbench.experiment.experiment import Experiment
from workbench.experiment.verdict import verdicts
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
LEDGER = read_ledger(CLAIMS_FOLDER / LEDGER_FILE)
TRIALS = [(claim, number) for claim in KNOWN.values() for number in range(len(claim.trials))]
EXPERIMENTS = sorted({t.evidence.name for c in KNOWN.values() for t in c.trials if isinstance(t.evidence, RunEvidence)})


@cache
def records() -> RecordFolder:
    return RecordFolder(RECORDS, CLAIMS_FOLDER.parent)


@cache
def evidence_of(id: str, number: int) -> Any:
    """Return what a trial's rule reads: the deciding record's numbers or a calculation's; None without either."""
    evidence = KNOWN[id].trials[number].evidence
    if isinstance(evidence, CalculationEvidence):
        return evidence.numbers()
    if isinstance(evidence, MissingEvidence | UnbuiltEvidence):
        return None
    record = records().latest(evidence)
    assert record is not None, f"{id}: no record"
    return record.numbers


def strange(example: Any, own: Any) -> list[str]:
    """Return the parts of `example` of a kind that `own` has not at that place. Rows are compared within a variant;
    of a mapping whose names are data (models, batches) each value against any of `own`'s."""
    if isinstance(own, Mapping) and isinstance(example, Mapping):
        faults = []
        for name, value in example.items():
            if name not in own and not _alike(own.values()):
                faults.append(f"{name}: is not there")
                continue
            faults += [f"{name}: {fault}" for fault in strange(value, own.get(name, next(iter(own.values()))))]
        return faults
    if isinstance(own, Sequence) and isinstance(example, Sequence) and not isinstance(own, str | bytes):
        return [fault for each in example for fault in _strange_row(each, own)]
    if example is None or own is None or _number(example) and _number(own) or type(example) is type(own):
        return []
    return [f"{type(example).__name__} for {type(own).__name__}"]


def _strange_row(row: Any, own: Sequence[Any]) -> list[str]:
    if not own:
        return []
    same = [each for each in own if isinstance(row, Mapping) and "variant" in row and each["variant"] == row["variant"]]
    faults = [strange(row, each) for each in same or own]
    least = min(faults, key=len)
    return [f"{row['variant']}: {fault}" for fault in least] if same else least


def _alike(values: Iterable[Any]) -> bool:
    """Return True if all are mappings of the same names: the keys above them are data then."""
    return len({frozenset(value) if isinstance(value, Mapping) else None for value in values} - {None}) == 1


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def test_every_row_is_a_claim() -> None:
    assert len(ROWS) == len(set(ROWS)) == 64
    assert set(ROWS) <= KNOWN.keys()


@pytest.mark.parametrize("claim", KNOWN.values(), ids=KNOWN)
def test_every_rule_shows_evidence_for_each_outcome_or_why_there_is_none(claim: Claim) -> None:
    """By `check`: for holds, holds with limits and refuted there is evidence under which the rule says so, or words why
    none leads there."""
    assert claim_errors(claim) == []
    assert claim.sources and all(source.figures for source in claim.sources)


@pytest.mark.parametrize(("claim", "number"), TRIALS, ids=[f"{claim.id}-{number}" for claim, number in TRIALS])
def test_the_evidence_a_rule_is_tried_with_is_of_its_own_experiments_kind(claim: Claim, number: int) -> None:
    """Names, and what kind of value stands under each, are those of the record or of the calculation itself."""
    trial = claim.trials[number]
    own = evidence_of(claim.id, number)
    if own is None:
        assert isinstance(trial.evidence, MissingEvidence | UnbuiltEvidence)
        return
    for outcome in trial.examples:
        assert strange(trial.example(outcome), own) == []


@pytest.mark.parametrize("claim", KNOWN.values(), ids=KNOWN)
def test_a_rule_that_cannot_fail_is_not_shown_as_a_test(claim: Claim) -> None:
    """It says so, decides nothing, and each claim has a rule that can fail or is shown as untested."""
    (row,) = claim_rows({claim.id: claim}, LEDGER)
    deciding = claim.trials[claim.deciding_trial]
    assert row["verdict"] == LEDGER[claim.id][claim.deciding_trial].outcome_label
    assert not deciding.no_test_reason or row["verdict"] == NO_TEST
    for trial, entry in zip(claim.trials, LEDGER[claim.id], strict=True):
        assert (entry.outcome_label == NO_TEST) == bool(trial.no_test_reason) == bool(entry.no_test)
        assert not trial.no_test_reason or "refuted" not in trial.examples


@pytest.mark.parametrize(("example", "own", "wrong"), [
    ({"a": 1}, {"a": 2.0, "b": 3}, []), ({"a": 1, "c": 2}, {"a": 2.0}, ["c: is not there"]),
    ({"a": "x"}, {"a": 2.0}, ["a: str for float"]), ({"a": True}, {"a": 2}, ["a: bool for int"]),
    ([{"variant": "x", "t": 1}], [{"variant": "x", "t": 2}, {"variant": "y", "u": 2}], []),
    ([{"variant": "x", "u": 1}], [{"variant": "x", "t": 2}, {"variant": "y", "u": 2}], ["x: u: is not there"]),
    ([{"variant": "made", "u": 1}], [{"variant": "x", "t": 2}, {"variant": "y", "u": 2}], []),
    ({"some model": {"seconds": 1}}, {"a": {"seconds": 2}, "b": {"seconds": 3}}, []),
    ({"some model": {"minutes": 1}}, {"a": {"seconds": 2}, "b": {"seconds": 3}}, ["some model: minutes: is not there"]),
])  # fmt: skip
def test_what_is_of_another_kind_is_seen(example: Any, own: Any, wrong: list[str]) -> None:
    assert strange(example, own) == wrong


@pytest.mark.parametrize(("claim", "number"), TRIALS, ids=[f"{claim.id}-{number}" for claim, number in TRIALS])
def test_the_ledger_says_what_the_rule_makes_of_the_evidence(claim: Claim, number: int) -> None:
    trial, found = claim.trials[number], LEDGER[claim.id][number]
    if isinstance(trial.evidence, CalculationEvidence):  # made once for all tests
        trial = replace(trial, evidence=replace(trial.evidence, numbers=lambda: evidence_of(claim.id, number)))
    again = judge_trial(claim, trial, records())
    assert (found.evidence, found.outcome, found.machine, found.record, found.level, found.no_test) == (
        again.evidence, again.outcome, again.machine, again.record, again.level, again.no_test,
    )  # fmt: skip
    assert (found.rule, found.changed) == (again.rule, again.changed)
    assert found.figures.keys() == again.figures.keys()
    for name, value in again.figures.items():  # a sum's last bits are each machine's own
        assert found.figures[name] == (value if isinstance(value, str) else pytest.approx(value, rel=1e-3, abs=1e-6))
    if not isinstance(trial.evidence, CalculationEvidence):
        assert (found.reason, found.limits, found.date) == (again.reason, again.limits, again.date)


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
    """In the ledger, in `claims show` and the widget (which both print what `reported` gives), with its reason."""
    found = claim_detail(KNOWN[id], LEDGER, records())
    said = [words for trial in found["trials"] for name, words in trial_lines(trial) if name == "changed"]
    entries = [change for entry in LEDGER[id] for change in entry.changed]
    assert said and said == [str(change) for change in entries]
    assert all(all(vars(change).values()) for change in entries)
    page = claims_picture.draw_ledger([], "", found, "")
    assert all(escape(words) in page for words in said)


def test_no_other_rule_was_changed() -> None:
    """So that the list above is whole: who changes a rule after a look adds it here."""
    assert {id for id, entries in LEDGER.items() if any(entry.changed for entry in entries)} == set(CHANGED)


def test_verdicts_of_a_processor_carry_its_level() -> None:
    for entries in LEDGER.values():
        for entry in entries:
            timed = entry.record is not None and not entry.machine.startswith("simulated")
            assert (entry.level is not None) == timed


def test_each_verdict_is_of_a_claim_and_names_its_machine() -> None:
    assert LEDGER.keys() == KNOWN.keys()
    for id, entries in LEDGER.items():
        assert len(entries) == len(KNOWN[id].trials)
        for entry in entries:
            missing = isinstance(KNOWN[id].trials[entries.index(entry)].evidence, MissingEvidence | UnbuiltEvidence)
            assert bool(entry.machine and entry.date) == (entry.outcome is not None and not missing)
            assert bool(entry.limits) == (entry.outcome == "holds-with-limits")


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_judges_by_the_claims_rules(name: str) -> None:
    """The verdict in the record, the rule's verdict now, and the ledger's agree; the ledger leaves none out."""
    experiment = Experiment.from_file(CLAIMS_FOLDER.parent / f"{name}.yaml")
    record = next(iter(stored_records(name, RECORDS)), None)
    mine = {c.id: t for c in KNOWN.values() for t in c.trials if t.evidence_label == f"run {name}"}
    assert experiment.judge is not None and record is not None
    for verdict in verdicts(experiment.judge, record.numbers):
        claim = KNOWN[verdict.claim]
        if claim.id in mine:
            assert mine[claim.id].rule(record.numbers) == verdict
        else:  # what does not depend on a run is a calculation, and judged by the same rule
            assert isinstance(evidence := claim.trials[0].evidence, CalculationEvidence)
            assert apply_rule(claim, claim.trials[0], evidence.numbers()) == verdict


def test_every_rule_can_be_read() -> None:
    for claim in KNOWN.values():
        for trial in claim.trials:
            source = rule_source(trial)
            assert source.startswith("def ") and ("Verdict(" in source or "Ruling(" in source or "_better(" in source)


def test_settled_by_calculation_where_sources_contradict() -> None:
    for id in ("prefill-flat", "prefill-linear", "prefill-quadratic", "decode-flat-in-context", "kv-llama70b",
               "kv-two-sessions", "cache-daily"):  # fmt: skip
        where = KNOWN[id].condition_tables
        assert where is not None
        tables = where(records())
        assert all(len(row) == len(table.headings) for table in tables for row in table.rows) and tables


def test_a_record_adds_this_machine_to_the_tables(tmp_path: Path) -> None:
    """Its ceilings become a roofline of here, first among the machines, and its curve a table of its own."""
    from experiments.claims.prefill import rows_of
    from workbench.claims.break_even import RooflineMachine

    (row,) = rows_of(RooflineMachine.build("llama-3.1-8b", "a100"))
    row["predicted"] = {"flops_per_s": 8e11, "bytes_per_s": 4e10}
    experiment = Experiment.from_file(CLAIMS_FOLDER.parent / "prefill_decode_length.yaml").model_dump(mode="json")
    value = {
        "summary": {"rows": [row], "others_cpu_share": 0.0}, "experiment": experiment,
        "environment": {"date": "2026-11-21", "cpu": {"model": "A CPU", "usable_cores": 2}, "gpu": []},
    }  # fmt: skip
    (tmp_path / "prefill_decode_length-20261121-120000.json").write_text(json.dumps(value))
    mine = RecordFolder(tmp_path, CLAIMS_FOLDER.parent)
    for id in ("prefill-linear", "decode-flat-in-context"):
        claim = KNOWN[id]
        assert claim.condition_tables is not None and "A CPU" in str(claim.condition_tables(mine)[0].rows[0][0])
        assert any(table.title.startswith("Measured here") for table in claim.condition_tables(mine))
        assert judge_trial(claim, claim.trials[0], mine).outcome == "holds-with-limits"
