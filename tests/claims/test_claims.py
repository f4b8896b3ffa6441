"""Laws of claims, on some made for them: what is stored, which summary decides, and what a fault leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.claims import made
from tests.helpers.refusals import refuses
from workbench.claims import evidence, tables
from workbench.claims.break_even import (
    RooflineMachine,
    decode_break_even_points,
    prefill_break_even_points,
    smallest_where,
)
from workbench.claims.claim import load_claims, select_claims
from workbench.claims.evidence import judge, update, works
from workbench.claims.summary import Summary, measured_on, read_summaries, records_file, store_summaries
from workbench.errors import WorkbenchError


def verdicts(folder: Path) -> dict[str, str]:
    return {row["claim"]: row["verdict"] for row in tables.claim_rows(load_claims(folder))}


def measure(folder: Path, *ids: str, model: str = "", missing: bool = False, quick: bool = False) -> dict[str, str]:
    """Measure claims, and return the faults."""
    claims = load_claims(folder)
    planned = works(claims, ids or claims, model, missing)
    return update(claims, planned, folder.parent / "runs", quick=quick)[1]


def test_summaries_make_the_verdicts(tmp_path: Path) -> None:
    folder = made.folder(tmp_path)
    nothing = {"far": "not-testable-here", "look": "not run yet", "size": "not run yet", "speed": "not run yet"}
    assert verdicts(folder) == nothing
    assert measure(folder, "size", "look") == {}
    wanted = nothing | {"size": "holds-with-limits", "look": "holds"}
    assert verdicts(folder) == wanted
    made.measured(folder, 0.5)
    assert verdicts(folder) == wanted | {"speed": "holds"}
    made.measured(folder, 2.0, "2026-11-21T13:00:00")
    assert verdicts(folder) == wanted | {"speed": "refuted"}, "the newest counts"
    (row,) = tables.claim_rows({"size": load_claims(folder)["size"]})
    assert (row["limits"], row["reason"], row["machine"]) == ("up to 4", "n 4, not <= 3; n 4, <= 5", "any (calculated)")


def test_a_rule_is_applied_as_it_is_now(tmp_path: Path) -> None:
    folder = made.folder(tmp_path)
    made.measured(folder, 2.0)
    claim = made.claim(folder, "speed", rule="seconds < 3")
    assert verdicts(folder)["speed"] == "holds"
    assert tables.remark(claim, claim.trials[0]) == "the experiment or the rule has been changed since"


def test_what_a_reader_should_know_of_a_summary(tmp_path: Path) -> None:
    folder = made.folder(tmp_path)
    made.measured(folder, 0.5, others_cpu_share=0.4)
    speed = load_claims(folder)["speed"]
    assert tables.remark(speed, speed.trials[0]) == "other processes took 40% of the processor"
    (tmp_path / "speedy.yaml").write_text(made.SPEEDY.replace("How quick?", "Is it quick?"))
    assert "changed since" not in tables.remark(speed, speed.trials[0]), "other words are the same experiment"
    (tmp_path / "speedy.yaml").write_text(made.SPEEDY + "sampling: {temperature: 0.5}\n")
    assert "changed since" in tables.remark(speed, speed.trials[0])


def test_summaries_of_models_and_machines_stand_side_by_side(tmp_path: Path) -> None:
    """The first of the claim's models decides, there the newest summary without contention."""
    folder = made.folder(tmp_path)
    made.claim(folder, "speed", models=["small", "large"])
    made.measured(folder, 0.5, "2026-11-21", model="small")
    made.measured(folder, 2.0, "2026-11-22", model="small", machine="Another")
    made.measured(folder, 0.5, "2026-11-23", model="small", machine="A third", others_cpu_share=0.5)
    made.measured(folder, 0.5, "2026-11-24", model="large")
    (table,) = tables.claim_detail(load_claims(folder)["speed"])["where"]
    assert [(row[0], row[1], row[3]) for row in table["rows"]] == [
        ("small", "Another", "refuted"), ("small", "A CPU", "holds"), ("small", "A third", "holds"),
        ("large", "A CPU", "holds"),
    ]  # fmt: skip
    assert verdicts(folder)["speed"] == "refuted"


summaries = st.builds(
    Summary, trial=st.sampled_from(["run a", "run b"]), figures=st.dictionaries(st.text(), st.floats() | st.text()),
    model=st.sampled_from(["", "m"]), machine=st.sampled_from(["x", "y"]), level=st.sampled_from([None, "v3"]),
    date=st.text(), others_cpu_share=st.sampled_from([None, 0.0, 0.9]), inputs=st.text(),
)  # fmt: skip


@given(st.lists(summaries, max_size=6))
def test_a_quieter_summary_is_never_lost(tmp_path_factory: pytest.TempPathFactory, stored: list[Summary]) -> None:
    """After any sequence there is the newest quiet summary of each trial, model, machine and level, or a noisy one; and
    what was read is written as it was."""
    file = tmp_path_factory.mktemp("claims") / "a.yaml"
    for each in stored:
        store_summaries(file, [each])

    def key(each: Summary) -> tuple:
        return each.trial, each.model, each.machine, each.level

    kept = read_summaries(file)
    assert {key(each) for each in kept} == {key(each) for each in stored}
    for each in kept:
        alike = [other for other in stored if key(other) == key(each)]
        quiet = [other for other in alike if not other.is_noisy]
        mine = [other for other in kept if key(other) == key(each)]
        assert sum(not other.is_noisy for other in mine) == bool(quiet)
        assert (each.date, each.inputs) in [(other.date, other.inputs) for other in alike]
    text = records_file(file).read_text() if stored else ""
    store_summaries(file, kept)
    assert not stored or (records_file(file).read_text() == text and text.count("\n{") == len(kept))


def test_a_calculation_keeps_the_day_on_which_it_came_out_so(tmp_path: Path) -> None:
    folder = made.folder(tmp_path)
    size = load_claims(folder)["size"]
    ((_, now),) = evidence.measure(works({"size": size}, ["size"])[0], False, tmp_path)
    store_summaries(size.file, [Summary(**{**vars(now), "date": "2020-01-01"})])
    measure(folder, "size")
    assert [each.date for each in read_summaries(size.file)] == ["2020-01-01"]
    made.claim(folder, "size", trials=[{"calculation": "mine.py:small", "arguments": {"n": 3}}])
    measure(folder, "size")
    assert [each.date for each in read_summaries(size.file)] != ["2020-01-01"] and verdicts(folder)["size"] == "holds"


def test_only_what_is_missing_or_changed_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, asked = made.folder(tmp_path), []

    def run(file: Path, out: Path, settings: list[str]) -> None:
        asked.append((file.name, *settings))
        raise WorkbenchError("no room")

    monkeypatch.setattr(evidence, "_run", run)
    assert measure(folder, missing=True) == {"speedy": "no room"} and asked == [("speedy.yaml",)]
    assert verdicts(folder)["look"] == "holds" and verdicts(folder)["speed"] == "not run yet"
    made.measured(folder, 0.5)
    assert measure(folder, missing=True) == {} and len(asked) == 1
    (tmp_path / "speedy.yaml").write_text(made.SPEEDY + "sampling: {temperature: 0.5}\n")
    measure(folder, missing=True)
    assert len(asked) == 2, "the experiment is another by now"
    measure(folder, "speed", model="m")
    assert asked[2:] == [("speedy.yaml", "model.name=m")]


def test_an_interruption_keeps_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made.folder(tmp_path)

    def interrupted(*given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(evidence, "_run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measure(folder)
    assert verdicts(folder)["look"] == "holds" and verdicts(folder)["speed"] == "not run yet"


def test_a_quick_look_leaves_nothing(tmp_path: Path) -> None:
    folder = made.folder(tmp_path)
    claims = load_claims(folder)
    ((_, summary),), faults = update(claims, works(claims, ["look"]), tmp_path, quick=True)
    assert summary.figures == {"n": 1, "letters": 4} and not faults and not records_file(claims["look"].file).exists()


def test_a_measurement_is_of_the_model_that_is_asked_for(tmp_path: Path) -> None:
    folder = made.folder(tmp_path)
    measure(folder, "look")
    measure(folder, "look", model="another")
    found = read_summaries(folder / "look.yaml")
    assert [(each.model, each.figures["letters"]) for each in found] == [("demo", 4), ("another", 7)]
    assert all(each.machine and each.date and each.environment["packages"] for each in found)


def test_a_real_run_is_stored_and_judged(tmp_path: Path) -> None:
    folder = made.folder(tmp_path)
    (tmp_path / "speedy.yaml").write_text(
        "question: How quick?\nmodel: {name: 'shape:tiny'}\nbackend: eager\nvariants: {one: {}}\n"
        "workload: {kind: random, requests: 1, prompt_tokens: 4, output_tokens: 2}\nmeasure: {warmup: 0}\n"
        f"judge: {{path: 'workbench.claims.evidence:judge', arguments: {{run: speedy, folder: '{folder}'}}}}\n"
    )
    made.claim(folder, "far", trials=[{"run": "speedy"}], rule="one.ttft_s_p50 < 1000")
    assert measure(folder, "speed") == {}
    (summary,) = read_summaries(folder / "speed.yaml")
    assert (summary.model, summary.record.partition("-")[0]) == ("shape:tiny", "speedy")
    assert str(tmp_path) not in records_file(folder / "speed.yaml").read_text()
    assert verdicts(folder)["far"] == "holds", "one run serves both, and its figures are VARIANT.MEASURE"
    rows = [{"variant": "one", "ttft_s_p50": 2.0}]
    assert [(each.claim, each.outcome) for each in judge(rows, "speedy", str(folder))] == [
        ("far", "holds"), ("speed", "refuted"),
    ]  # fmt: skip


def test_the_claim_of_the_guide_is_measured_and_holds(tmp_path: Path) -> None:
    guide = (Path(__file__).parents[2] / "docs/guide/claims.md").read_text()
    for language, name in (("python", "prompts.py"), ("yaml", "prompt-found.yaml")):
        (tmp_path / name).write_text(guide.partition(f"```{language}\n")[2].partition("```")[0])
    assert measure(tmp_path) == {} and verdicts(tmp_path) == {"prompt-found": "holds"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rule": "n <="}, "claims/size.yaml: rule 'n <=': cannot be read"),
        ({"rule": "n <= 3 "}, "claims/size.yaml: rule: must be one line without blanks around it"),
        ({"rule": None}, "claims/size.yaml: rule: is empty"),
        ({"says": None}, "claims/size.yaml: says: Field required"),
        ({"syas": "so"}, "claims/size.yaml: syas: unknown key; did you mean 'says'?"),
        ({"trials": []}, "trials: Tuple should have at least 1 item"),
        ({"trials": [{"run": "a", "missing": "b"}]}, "trials.0: needs exactly one of run, calculation"),
        ({"sources": {}}, "sources: Dictionary should have at least 1 item"),
        ({"changed": [{"what": "so"}]}, "changed.0.when: Field required"),
    ],
)
def test_a_mistake_in_a_claim_is_one_line(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    refuses(message, lambda: made.claim(made.folder(tmp_path), "size", **changes))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 3", "claim size: calculation: must return numbers by name, not 3"),
        ('return {"n": [1]}', "must return numbers by name"),
        ('return {"m": 1}', "there is no figure 'n'"),
        ("return 1 / 0", "claim size: mine.py:small: ZeroDivisionError"),
    ],
)
def test_a_mistake_in_a_function_is_one_line(tmp_path: Path, body: str, message: str) -> None:
    folder = made.folder(tmp_path)
    (folder / "mine.py").write_text(made.FUNCTIONS.replace('return {"n": n, "words": "a few"}', body))
    (fault,) = measure(folder, "size").values()
    assert message in fault and "\n" not in fault


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    folder = made.folder(tmp_path)
    refuses("no claim 'sise'; did you mean 'size'", select_claims, load_claims(folder), ["sise"])
    (tmp_path / "none").mkdir()
    refuses("no claims there", load_claims, tmp_path / "none")
    (tmp_path / "speedy.yaml").unlink()
    assert "there is no such experiment" in measure(folder, "speed")["speedy"]
    made.measured(folder, 0.5)
    records_file(folder / "speed.yaml").write_text("{}1")
    refuses("is no list of summaries", lambda: load_claims(folder)["speed"].summaries)
    size = made.claim(folder, "size", limits="{m}")
    refuses(r"claim size: limits: cannot be written \('m'\)", size.judge, size.trials[0], {"n": 4})


def test_a_rule_that_cannot_refute_decides_nothing(tmp_path: Path) -> None:
    folder = made.folder(tmp_path)
    trial = {"calculation": "mine.py:small", "arguments": {"n": 4}}
    counted = {**trial, "machine": "paper", "never": {"refuted": "counted"}, "limits": "so"}
    made.claim(folder, "size", trials=[counted, trial])
    measure(folder, "size")
    claim = load_claims(folder)["size"]
    (row,) = tables.claim_rows({"size": claim})
    assert row["verdict"] == "holds-with-limits" and [each["verdict"] for each in row["elsewhere"]] == [tables.NO_TEST]
    first, _ = tables.claim_detail(claim)["trials"]
    assert ("no test", "the rule cannot fail: counted") in tables.trial_lines(first)
    made.claim(folder, "size", trials=[counted])
    assert verdicts(folder)["size"] == tables.NO_TEST


def test_what_is_not_built_is_no_missing_machine(tmp_path: Path) -> None:
    far = made.claim(made.folder(tmp_path), "far", trials=[{"unbuilt": "a telescope mount"}])
    (row,) = tables.claim_rows({"far": far})
    assert (row["verdict"], row["reason"]) == ("not run yet", "not built: a telescope mount")


@pytest.mark.parametrize(
    ("experiment", "machine", "level"),
    [
        ({}, "A CPU, 2 cores, 1 GiB", "v3"),
        ({"model": {"name": "m", "device": "cuda"}}, "A GPU", None),
        (
            {"executor": {"kind": "simulated", "hardware": "h100", "instances": 4, "gpus": 2}},
            "simulated: 8 x h100",
            None,
        ),
    ],
)
def test_a_machine_is_described_by_what_computes(experiment: dict, machine: str, level: str | None) -> None:
    cpu = {"model": "A CPU", "usable_cores": 2, "level": "v3"}
    found = measured_on({"cpu": cpu, "memory_bytes": 2**30, "gpu": ["A GPU"], "date": "d"}, experiment)
    assert (found["machine"], found["level"]) == (machine, level)


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
