"""The ledger's own laws, on claims made for them: what is written, from what, and what a fault leaves."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.claims import made
from workbench.claims import tables
from workbench.claims import update as running
from workbench.claims.break_even import (
    RooflineMachine,
    decode_break_even_points,
    prefill_break_even_points,
    smallest_where,
)
from workbench.claims.claim import (
    OUTCOMES,
    CalculationEvidence,
    Claim,
    ClaimSource,
    ClaimTrial,
    MissingEvidence,
    Rule,
    Ruling,
    UnbuiltEvidence,
    apply_rule,
)
from workbench.claims.ledger import (
    LEDGER_FILE,
    NO_TEST,
    LedgerEntry,
    RecordFolder,
    read_ledger,
    rebuild_ledger,
    write_ledger,
)
from workbench.claims.registry import claim_errors, load_claims, select_claims
from workbench.claims.stored_record import stored_records
from workbench.claims.update import update_ledger
from workbench.errors import WorkbenchError
from workbench.experiment.verdict import RuleChange, Verdict


def outcomes(folder: Path) -> dict[str, str]:
    return {id: entries[0].outcome_label for id, entries in read_ledger(folder / LEDGER_FILE).items()}


def from_records(folder: Path) -> dict[str, str]:
    update_ledger(folder, (), folder.parent / "records", folder.parent / "runs", measure=False)
    return outcomes(folder)


def test_calculations_and_records_make_the_ledger(tmp_path: Path) -> None:
    folder = made.folder(tmp_path)
    wanted = {"size": "holds-with-limits", "look": "not run yet", "speed": "not run yet", "far": "not-testable-here"}
    assert from_records(folder) == wanted
    made.record(tmp_path, 0.5)
    assert from_records(folder) == wanted | {"speed": "holds"}
    made.record(tmp_path, 2.0, "20261121-130000")
    assert from_records(folder) == wanted | {"speed": "refuted"}, "the newest record counts"
    (speed,) = read_ledger(folder / LEDGER_FILE)["speed"]
    assert (speed.machine, speed.record) == ("A CPU, 2 cores, 1 GiB", "speedy-20261121-130000.json")
    (far,) = read_ledger(folder / LEDGER_FILE)["far"]
    assert far.reason == "needs a telescope" and not far.machine


def test_what_a_reader_should_know_of_a_record(tmp_path: Path) -> None:
    folder = made.folder(tmp_path)
    made.record(tmp_path, 0.5, busy=0.4, sampling={"temperature": 0.5})
    from_records(folder)
    (speed,) = read_ledger(folder / LEDGER_FILE)["speed"]
    assert speed.remark == "other processes took 40% of the processor; the experiment has been changed since"
    assert speed.contention == 0.4


@pytest.mark.parametrize("simulated", [False, True])
def test_other_processes_spoil_no_simulated_time(tmp_path: Path, simulated: bool) -> None:
    made.folder(tmp_path)
    settings: dict[str, Any] = {"executor": {"kind": "simulated", "hardware": "a GPU"}} if simulated else {}
    made.record(tmp_path, 0.5, **settings)
    made.record(tmp_path, 2.0, "20261121-130000", busy=0.9, **settings)
    newest, first = (stored_records("speedy", tmp_path / "records", timed)[0] for timed in (False, True))
    assert newest.name == "speedy-20261121-130000.json" and (first.name == newest.name) == simulated
    assert ("of the processor" in newest.remark(tmp_path / "speedy.yaml")) != simulated


def test_names_that_begin_alike_are_other_records(tmp_path: Path) -> None:
    """So are files beside records, which a person or an editor left."""
    folder = made.folder(tmp_path)
    made.record(tmp_path, 0.5)
    record = (tmp_path / "records" / "speedy-20261121-120000.json").read_text()
    for name in ("speedy-twice-20261121-130000", "speedy-20261121-130000-old", "speedy-20261121-130000.json.old"):
        (tmp_path / "records" / f"{name}.json").write_text(record.replace('"seconds": 0.5', '"seconds": 2.0'))
    assert from_records(folder)["speed"] == "holds"


def test_a_question_asked_in_other_words_is_the_same_experiment(tmp_path: Path) -> None:
    folder = made.folder(tmp_path)
    made.record(tmp_path, 0.5)
    (tmp_path / "speedy.yaml").write_text(made.SPEEDY.replace("How quick?", "Is it quick?"))
    from_records(folder)
    assert read_ledger(folder / LEDGER_FILE)["speed"][0].remark == ""


def test_limits_are_those_of_a_claim_that_holds_with_limits() -> None:
    for outcome in OUTCOMES:
        entry = LedgerEntry("run x").with_verdict(Verdict("mine", "So it is", "rule", outcome, "so", "up to 5"))
        assert entry.limits == ("up to 5" if outcome == "holds-with-limits" else "")


def test_a_record_that_a_rule_cannot_read_keeps_no_other_from_a_verdict(tmp_path: Path) -> None:
    folder = made.folder(tmp_path)
    made.record(tmp_path, 0.5)
    file = tmp_path / "records" / "speedy-20261121-120000.json"
    file.write_text(file.read_text().replace('"seconds"', '"time"'))
    assert from_records(folder) | {"speed": "not run yet"} == from_records(folder)
    assert (
        "no verdict on this record: its rule must return a Ruling: KeyError: 'ttft_s_p50' ("
        in read_ledger(folder / LEDGER_FILE)["speed"][0].remark
    )


def test_what_came_out_as_before_stays_as_it_was_written(tmp_path: Path) -> None:
    folder = made.folder(tmp_path)
    from_records(folder)
    ledger = read_ledger(folder / LEDGER_FILE)
    write_ledger(ledger | {"size": (replace(ledger["size"][0], date="2020-01-01"),)}, folder / LEDGER_FILE)
    text = (folder / LEDGER_FILE).read_text()
    from_records(folder)
    assert (folder / LEDGER_FILE).read_text() == text, "a calculation keeps the day on which it came out so"
    write_ledger(
        ledger | {"size": (replace(ledger["size"][0], date="2020-01-01", outcome="refuted"),)}, folder / LEDGER_FILE
    )
    assert from_records(folder)["size"] == "holds-with-limits"
    assert read_ledger(folder / LEDGER_FILE)["size"][0].date != "2020-01-01"


def test_measuring_writes_records_and_only_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, asked = made.folder(tmp_path), []

    def run(file: Path, out: Path, settings: tuple[str, ...]) -> None:
        asked.append(file.name)
        raise WorkbenchError("no room")

    monkeypatch.setattr(running, "_run", run)
    found = update_ledger(folder, (), tmp_path / "records", tmp_path / "runs", missing=True)
    assert found.failures == {"speedy": "no room"} and asked == ["speedy.yaml"]
    assert outcomes(folder)["look"] == "holds" and outcomes(folder)["speed"] == "not run yet"
    assert len(list((tmp_path / "records").glob("claims_looking-*.json"))) == 1
    made.record(tmp_path, 0.5)
    update_ledger(folder, (), tmp_path / "records", tmp_path / "runs", missing=True)
    assert asked == ["speedy.yaml"], "both have a record by now"
    made.record(tmp_path, 0.5, "20261121-140000", sampling={"temperature": 0.5})
    update_ledger(folder, (), tmp_path / "records", tmp_path / "runs", missing=True)
    assert len(asked) == 2, "a record of an experiment that is another by now is none"


def test_an_interruption_keeps_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made.folder(tmp_path)

    def interrupted(file: Path, out: Path, settings: tuple[str, ...]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(running, "_run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        update_ledger(folder, (), tmp_path / "records", tmp_path / "runs")
    assert outcomes(folder)["look"] == "holds" and outcomes(folder)["speed"] == "not run yet"


def test_a_quick_look_leaves_nothing(tmp_path: Path) -> None:
    folder = made.folder(tmp_path)
    found = update_ledger(folder, ["look"], tmp_path / "records", tmp_path / "runs", quick=True)
    assert found.ledger["look"][0].figures == {"n": 1}
    assert not (folder / LEDGER_FILE).exists() and not list((tmp_path / "records").iterdir())


def test_the_claim_of_the_guide_is_measured_and_could_fail(tmp_path: Path) -> None:
    guide = (Path(__file__).parents[2] / "docs/guide/claims.md").read_text()
    (tmp_path / "prompts.py").write_text(guide.partition("```python\n")[2].partition("```")[0])
    found = update_ledger(tmp_path, ["prompt-found"], tmp_path / "records", tmp_path / "runs", quick=True)
    assert claim_errors(found.claims["prompt-found"]) == [] and found.ledger["prompt-found"][0].outcome == "holds"


def test_a_real_run_is_kept_and_judged(tmp_path: Path) -> None:
    folder = made.folder(tmp_path)
    (tmp_path / "speedy.yaml").write_text(
        "question: How quick?\nmodel: {name: 'shape:tiny'}\nbackend: eager\nvariants: {one: {}}\n"
        "workload: {kind: random, requests: 1, prompt_tokens: 4, output_tokens: 2}\nmeasure: {warmup: 0}\n"
    )
    found = update_ledger(folder, ["speed"], tmp_path / "records", tmp_path / "runs")
    assert found.failures == {} and found.ledger["speed"][0].outcome in ("holds", "refuted")
    (file,) = (tmp_path / "records").glob("speedy-*.json")
    assert found.ledger["speed"][0].record == file.name and str(tmp_path) not in file.read_text()


def test_a_mistake_is_reported_in_one_line(tmp_path: Path) -> None:
    folder = made.folder(tmp_path)
    claims = load_claims(folder)
    with pytest.raises(WorkbenchError, match="no claim 'sise'; did you mean 'size'"):
        select_claims(claims, ["sise"])
    (folder / "twice.py").write_text(made.CLAIM)
    with pytest.raises(WorkbenchError, match="claim 'size' is in mine.py and in twice.py"):
        load_claims(folder)
    (folder / "twice.py").write_text("CLAIMS = 3")
    with pytest.raises(WorkbenchError, match="must be a sequence of Claim values"):
        load_claims(folder)
    with pytest.raises(WorkbenchError, match="no claims there"):
        load_claims(tmp_path / "records")
    (folder / LEDGER_FILE).write_text("{}")
    with pytest.raises(WorkbenchError, match="is no ledger"):
        read_ledger(folder / LEDGER_FILE)
    (tmp_path / "records" / "speedy-20261121-120000.json").write_text("{}")
    (folder / "twice.py").unlink()
    (folder / LEDGER_FILE).unlink()
    with pytest.raises(WorkbenchError, match="is no record of rows or numbers"):
        from_records(folder)


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (
            "rows[0]",
            "row[0]",
            r"claim speed: trial 1: the example of 'holds': .* 'row' is not .* \(.*mine.py, line 17\)",
        ),
        ("def small", "def smal", r"NameError: name 'small' is not defined \(.*mine.py, line \d+\)"),
        ('"holds" if n <= 3', '"hold" if n <= 3', "ValueError: outcome 'hold' is unknown; did you mean 'holds'"),
        ('{"n": n})', '{"n": n}).outcome', "its rule must return a Ruling: TypeError: it returned str"),
        ('{"holds": {"n": 1}', '{"holds": {"n": 4}', "holds-with-limits by numbers that should give 'holds'"),
        (
            '(ClaimSource("C", "9"),)',
            'ClaimSource("C", "9")',
            "claim 'far': sources must be a tuple of ClaimSource values",
        ),
    ],
)
def test_a_mistake_in_a_claim_is_one_line_before_anything_is_measured(
    before: str, after: str, words: str, tmp_path: Path
) -> None:
    folder = made.folder(tmp_path)
    (folder / "mine.py").write_text(made.CLAIM.replace(before, after))
    with pytest.raises(WorkbenchError, match=words):
        update_ledger(folder, (), tmp_path / "records", tmp_path / "runs")
    assert not list((tmp_path / "records").iterdir())


@pytest.mark.parametrize(("value", "words"), [("1 / 0", "ZeroDivisionError"), ("{1}", "not JSON serializable")])
def test_a_measurement_that_fails_keeps_no_other_from_a_verdict(value: str, words: str, tmp_path: Path) -> None:
    folder = made.folder(tmp_path)
    (folder / "mine.py").write_text(made.CLAIM.replace('{"n": 1 if quick else 2}', value))
    found = update_ledger(folder, ["look", "size"], tmp_path / "records", tmp_path / "runs", quick=True)
    assert words in found.failures["claims_looking"] and found.ledger["size"][0].outcome == "holds-with-limits"


def trial_of(rule: Rule, **given: object) -> ClaimTrial:
    return ClaimTrial(MissingEvidence("nothing"), rule, **({"examples": {}, "impossible": {}} | given))  # type: ignore[arg-type]


def test_a_rule_shows_evidence_for_every_outcome_or_says_why_there_is_none() -> None:
    def yes(found: object) -> Ruling:
        """Always."""
        return Ruling("holds-with-limits", "so")

    claim = Claim("mine", "So it is", (ClaimSource("A", "1"),), ())
    assert claim_errors(claim) == ["has no trial"]
    wrong = claim_errors(replace(claim, trials=(trial_of(yes),)))
    assert len(wrong) == 3 and all("must be in `examples`, with evidence, or in `impossible`" in each for each in wrong)
    wrong = claim_errors(replace(claim, trials=(trial_of(yes, examples=dict.fromkeys(OUTCOMES, 1)),)))
    assert all(any(f"should give '{outcome}'" in each for each in wrong) for outcome in ("refuted", "holds"))
    assert any("states no limits" in each for each in wrong)
    silent = trial_of(yes, impossible={"holds": "", "refuted": "so"}, examples={"holds-with-limits": 1, "maybe": 1})
    wrong = claim_errors(replace(claim, trials=(silent,)))
    assert any("is impossible without a reason" in each for each in wrong) and any(
        "may name holds" in each for each in wrong
    )
    both = trial_of(yes, examples=dict.fromkeys(OUTCOMES, 1), impossible={"holds": "so"})
    assert any("must be in" in each for each in claim_errors(replace(claim, trials=(both,))))
    bare = trial_of(yes, changed=(RuleChange("the bar", "2026-11-22", "", "it was high"),))
    assert any("a change without after" in each for each in claim_errors(replace(claim, trials=(bare,))))
    assert apply_rule(claim, both, {}).rule == "Always."


def test_a_rule_that_cannot_fail_decides_nothing(tmp_path: Path) -> None:
    claims = load_claims(made.folder(tmp_path))
    size = claims["size"]
    (test,) = size.trials
    impossible = {"holds-with-limits": "so", "refuted": "counted"}
    only = replace(test, evidence=CalculationEvidence(lambda: {"n": 1}), impossible=impossible)
    both = replace(size, trials=(only, test))
    records = RecordFolder(tmp_path / "records", tmp_path)
    ledger = rebuild_ledger({"size": both}, records, {})
    assert [entry.outcome_label for entry in ledger["size"]] == [NO_TEST, "holds-with-limits"]
    (row,) = tables.claim_rows({"size": both}, ledger)
    assert row["verdict"] == "holds-with-limits" and [each["verdict"] for each in row["elsewhere"]] == [NO_TEST]
    (row,) = tables.claim_rows({"size": replace(size, trials=(only,))},
                               rebuild_ledger({"size": replace(size, trials=(only,))}, records, {}))  # fmt: skip
    assert row["verdict"] == NO_TEST
    first, _ = tables.claim_detail(both, ledger, records)["trials"]
    assert ("no test", "the rule cannot fail: counted") in tables.trial_lines(first)


def test_what_is_not_built_is_no_missing_machine(tmp_path: Path) -> None:
    claims = load_claims(made.folder(tmp_path))
    far = replace(
        claims["far"], trials=(replace(claims["far"].trials[0], evidence=UnbuiltEvidence("a telescope mount")),)
    )
    (entry,) = rebuild_ledger({"far": far}, RecordFolder(tmp_path / "records", tmp_path), {})["far"]
    assert (entry.outcome_label, entry.reason, entry.outcome) == ("not run yet", "not built: a telescope mount", None)


def test_records_of_several_machines_stand_side_by_side(tmp_path: Path) -> None:
    """The newest undisturbed record decides; the level of an old record follows from its flags."""
    folder = made.folder(tmp_path)
    zen3 = {"model": "Zen 3", "flags": ["avx", "avx2", "fma"]}
    made.record(tmp_path, 0.5, "20261121-120000", cpu=zen3)
    made.record(tmp_path, 2.0, "20261121-130000", cpu={"model": "Zen 5", "flags": [], "level": "v4+bf16"})
    made.record(tmp_path, 3.0, "20261121-140000", busy=0.5, cpu=zen3)
    from_records(folder)
    (speed,) = read_ledger(folder / LEDGER_FILE)["speed"]
    assert (speed.outcome, speed.level, speed.record) == ("refuted", "v4+bf16", "speedy-20261121-130000.json")
    claim, records = load_claims(folder)["speed"], RecordFolder(tmp_path / "records", tmp_path)
    found = tables.claim_detail(claim, read_ledger(folder / LEDGER_FILE), records)
    (table,) = found["where"]
    assert [row[:3] for row in table["rows"]] == [
        ["Zen 5, 2 cores, 1 GiB", "v4+bf16", "refuted"], ["Zen 3, 2 cores, 1 GiB", "v3", "holds"],
        ["Zen 3, 2 cores, 1 GiB", "v3", "refuted"],
    ]  # fmt: skip
    assert [row[-2] for row in table["rows"]] == ["0%", "0%", "50%"]


def test_an_entry_survives_the_file(tmp_path: Path) -> None:
    entries = (
        LedgerEntry("run x", "holds", "so", "", "rule", {"a": 1.5, "b": "c"}, "m", "d", "r", 0.1, "busy"),
        LedgerEntry("quiet", "holds", contention=0.0, figures={"a": 0.0}),
        LedgerEntry("missing"),
    )
    write_ledger({"mine": entries}, tmp_path / LEDGER_FILE)
    assert read_ledger(tmp_path / LEDGER_FILE) == {"mine": entries}
    assert json.loads((tmp_path / LEDGER_FILE).read_text())["written by"] == "workbench claims run"


def test_times_are_equal_where_they_cross() -> None:
    assert (
        smallest_where(lambda n: n >= 37) == 37
        and smallest_where(lambda n: False) is None
        and smallest_where(lambda n: True, 5) == 5
    )
    machine = RooflineMachine.build("llama-3.1-8b", "h100")
    found = prefill_break_even_points(machine)
    flat, more = found["flat up to"], found["more than linear from"]
    assert flat and machine.prefill(flat) <= 1.1 * machine.prefill(1) < machine.prefill(flat + 1)
    assert more and machine.prefill(2 * more) >= 2.2 * machine.prefill(more)
    assert machine.prefill(2 * more - 2) < 2.2 * machine.prefill(more - 1)
    for batch in (1, 8):
        twice = decode_break_even_points(machine, batch)["twice as long from"]
        assert twice and machine.decode(twice, batch) >= 2 * machine.decode(100, batch) > machine.decode(
            twice - 1, batch
        )
    # 989.5 TFLOP/s over 3.35 TB/s is 295 FLOPs a byte: with 2 bytes and 2 FLOPs a weight, 295 tokens balance them.
    assert 295 < flat < 1.2 * 295
