"""The claims and the committed ledger: every row is there, every rule can go either way, every verdict is what its rule
makes of the calculation or of the committed record."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from workbench.ledger.claim import Calculation, Claim, Missing, Run, judged
from workbench.ledger.entry import NAME, Entry, read_ledger
from workbench.ledger.kept import kept
from workbench.ledger.rebuild import Records, entry_of
from workbench.ledger.registry import CLAIMS, check, claims_in
from workbench.ledger.tables import rule_source
from workbench.study.experiment import Experiment
from workbench.study.verdict import verdicts

RECORDS = CLAIMS.parent / "records"
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
KNOWN = claims_in()
LEDGER = read_ledger(CLAIMS / NAME)
TRIALS = [(claim, number) for claim in KNOWN.values() for number in range(len(claim.trials))]
EXPERIMENTS = sorted({t.evidence.name for c in KNOWN.values() for t in c.trials if isinstance(t.evidence, Run)})


@cache
def records() -> Records:
    return Records(RECORDS, CLAIMS.parent)


def test_every_row_is_a_claim() -> None:
    assert len(ROWS) == len(set(ROWS)) == 64
    assert set(ROWS) <= KNOWN.keys()


@pytest.mark.parametrize("claim", KNOWN.values(), ids=KNOWN)
def test_a_verdict_can_go_either_way(claim: Claim) -> None:
    assert check(claim) == []
    assert claim.sources and all(source.figures for source in claim.sources)


@pytest.mark.parametrize(("claim", "number"), TRIALS, ids=[f"{claim.id}-{number}" for claim, number in TRIALS])
def test_the_ledger_says_what_the_rule_makes_of_the_evidence(claim: Claim, number: int) -> None:
    trial, found = claim.trials[number], LEDGER[claim.id][number]
    again = entry_of(claim, trial, records())
    assert (found.evidence, found.outcome, found.machine, found.record) == (
        again.evidence, again.outcome, again.machine, again.record,
    )  # fmt: skip
    assert found.rule == again.rule
    assert found.figures.keys() == again.figures.keys()
    for name, value in again.figures.items():  # a sum's last bits are each machine's own
        assert found.figures[name] == (value if isinstance(value, str) else pytest.approx(value, rel=1e-3, abs=1e-6))
    if not isinstance(trial.evidence, Calculation):
        assert (found.because, found.limits, found.date) == (again.because, again.limits, again.date)


def test_each_verdict_is_of_a_claim_and_names_its_machine() -> None:
    assert LEDGER.keys() == KNOWN.keys()
    for id, entries in LEDGER.items():
        assert len(entries) == len(KNOWN[id].trials)
        for entry in entries:
            missing = isinstance(KNOWN[id].trials[entries.index(entry)].evidence, Missing)
            assert bool(entry.machine and entry.date) == (entry.outcome is not None and not missing)
            assert bool(entry.limits) == (entry.outcome == "holds-with-limits")


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_judges_by_the_claims_rules(name: str) -> None:
    """What the run itself said, its judge now, and the ledger are one; and the ledger leaves none of them out."""
    experiment = Experiment.read(CLAIMS.parent / f"{name}.yaml")
    record = kept(name, RECORDS)
    mine = {c.id: t for c in KNOWN.values() for t in c.trials if t.told == f"run {name}"}
    assert experiment.judge is not None
    if record is None:
        return
    for verdict in verdicts(experiment.judge, record.numbers):
        claim = KNOWN[verdict.claim]
        if claim.id in mine:
            assert mine[claim.id].rule(record.numbers) == verdict
        else:  # what does not depend on a run is a calculation, and judged by the same rule
            assert isinstance(evidence := claim.trials[0].evidence, Calculation)
            assert judged(claim, claim.trials[0], evidence.numbers()) == verdict


def test_every_rule_can_be_read() -> None:
    for claim in KNOWN.values():
        for trial in claim.trials:
            source = rule_source(trial)
            assert source.startswith("def ") and ("Verdict(" in source or "Ruling(" in source or "_better(" in source)


def test_settled_by_calculation_where_sources_contradict() -> None:
    for id in ("prefill-flat", "prefill-linear", "prefill-quadratic", "decode-flat-in-context", "kv-llama70b",
               "kv-two-sessions", "cache-daily"):  # fmt: skip
        where = KNOWN[id].where
        assert where is not None
        tables = where(records())
        assert all(len(row) == len(table.headings) for table in tables for row in table.rows) and tables


def test_a_record_adds_this_machine_to_the_tables(tmp_path: Path) -> None:
    """Its ceilings become a roofline of here, first among the machines, and its curve a table of its own."""
    from experiments.claims.prefill import rows_of
    from workbench.ledger.crossings import Machine

    (row,) = rows_of(Machine.of("llama-3.1-8b", "a100"))
    row["predicted"] = {"flops_per_s": 8e11, "bytes_per_s": 4e10}
    experiment = Experiment.read(CLAIMS.parent / "prefill_decode_length.yaml").model_dump(mode="json")
    value = {
        "summary": {"rows": [row], "others_cpu_share": 0.0}, "experiment": experiment,
        "environment": {"date": "2026-11-21", "cpu": {"model": "A CPU", "usable_cores": 2}, "gpu": []},
    }  # fmt: skip
    (tmp_path / "prefill_decode_length-20261121-120000.json").write_text(json.dumps(value))
    mine = Records(tmp_path, CLAIMS.parent)
    for id in ("prefill-linear", "decode-flat-in-context"):
        claim = KNOWN[id]
        assert claim.where is not None and "A CPU" in claim.where(mine)[0].rows[0][0]
        assert any(table.title.startswith("Measured here") for table in claim.where(mine))
        assert entry_of(claim, claim.trials[0], mine).outcome == "holds-with-limits"


def test_a_ledger_that_was_touched_is_seen(tmp_path: Path) -> None:
    """The comparison above can fail: an entry with another verdict is not what the rule makes of the evidence."""
    claim = KNOWN["kv-memory-quadratic"]
    typed = Entry("calculation", "holds", "it is so")
    assert entry_of(claim, claim.trials[0], records()).outcome == "refuted" != typed.outcome
