"""From rows to figures, and from figures to a summary that says when it no longer fits its entry."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.refusals import refuses
from tests.zoo import made
from tests.zoo.made import summary_of
from workbench.claims import measure
from workbench.claims.comparison import BASELINE, FIGURES, TECHNIQUE
from workbench.claims.measure import measure_technique, ratio
from workbench.claims.schedules import TenantMeter, jain_index
from workbench.claims.summary import Summary, read_summaries, records_file, store_summaries
from workbench.claims.technique import LoadedTechnique, experiment_of, load_zoo
from workbench.claims.zoo import ZooItem
from workbench.experiment.experiment import VariantResults

TINY = "{prompts: 2, prompt_tokens: 16, output_tokens: 16, repeats: 2}"


def entry_in(place: Path, **changes: str) -> LoadedTechnique:
    return load_zoo(made.folder(place, **changes))["hotter"]


def numbers(summary: Summary) -> dict[str, float]:
    return {name: value for name, value in summary.figures.items() if isinstance(value, int | float)}


def test_a_technique_that_changes_nothing_has_ratios_of_one(tmp_path: Path) -> None:
    entry = entry_in(tmp_path, use="{backend: eager}", baseline="{backend: eager}", workload=TINY)
    found = measure_technique(entry)
    figures = numbers(found)
    assert figures.keys() == {*FIGURES["sampling"], "heat"} and figures.pop("heat") == 2.0
    assert figures.pop("time_ratio") > 0 and figures.pop("loops") == figures.pop("baseline_loops")
    assert set(figures.values()) == {1.0} and found.backends == {BASELINE: "eager", TECHNIQUE: "eager"}
    assert (found.trial, found.model, found.inputs) == ("technique", "demo", entry.inputs) and found.machine


def test_a_policy_that_changes_nothing_has_ratios_of_one(tmp_path: Path) -> None:
    changes = {"kind": "schedule", "use": "{schedule.policy: fcfs}", "rule": '"fairness >= 0.9"'}
    entry = entry_in(tmp_path, workload="{requests: 300}", **changes)
    figures = numbers(measure_technique(entry))
    assert figures.keys() == {*FIGURES["schedule"], "heat"}
    assert {value for name, value in figures.items() if name.endswith("_ratio")} == {1.0}
    other = entry_in(tmp_path, workload="{requests: 300}", **changes | {"use": "{schedule.policy: fair}"})
    assert numbers(measure_technique(other))["fairness"] > figures["fairness"] > 1 / 3
    assert figures["decision_us"] > 0


def rows(**changes: Any) -> dict[str, Any]:
    return {
        "bits_per_byte": 0.5, "kl_mean": 0.0, "copy_gain": 4.0, "kv_bytes": 1000,
        "copying": {"0.0": {"gain": 2.0}, "0.5": {"gain": 6.0}}, "decode_tokens_per_s": {"512": 9.0, "4096": 10.0},
        **changes,
    }  # fmt: skip


def test_figures_of_a_cache() -> None:
    better = rows(bits_per_byte=0.6, kl_mean=0.03, copy_gain=3.0, kv_bytes=250,
                  copying={"0.0": {"gain": 0.5}, "0.5": {"gain": 5.5}},
                  decode_tokens_per_s={"512": 1.0, "4096": 40.0})  # fmt: skip
    found = measure._cache_figures(rows(), better, VariantResults([], {}))
    assert found == pytest.approx({
        "bits_per_byte": 0.6, "bits_per_byte_ratio": 1.2, "kl": 0.03, "copying": 0.75, "needle": 0.25,
        "bytes_ratio": 0.25, "decode_time_ratio": 0.25,
    })  # fmt: skip
    slow = ("copying", "copy_gain", "decode_tokens_per_s")
    quick = {name: value for name, value in rows().items() if name not in slow}
    found = measure._cache_figures(quick, quick, VariantResults([], {}))
    assert [name for name, value in found.items() if value is None] == ["copying", "needle", "decode_time_ratio"]


def test_figures_of_texts() -> None:
    looped = {BASELINE: [True, True, False, True], TECHNIQUE: [False, True, False, False]}
    texts = [{"variant": name, "looped": each} for name, all_ in looped.items() for each in all_]
    row = {"repeated_4": 0.5, "bits_per_byte": 1.0, "s_per_token": 1.0}
    found = measure._text_figures(row, row, VariantResults([], {}, {"texts": texts}))
    assert (found["loops"], found["baseline_loops"], found["loop_ratio"]) == (1, 3, 0.5)


def test_figures_of_a_draft() -> None:
    runs = [{"variant": v, "load": load, "steps": s, "tokens": 100}
            for v, s in ((BASELINE, 100), (TECHNIQUE, 25)) for load in (1, 4)]  # fmt: skip
    plain = {"tokens_per_s": {"1": 10.0, "4": 30.0}}
    fast = {"tokens_per_s": {"1": 20.0, "4": 30.0}, "mean_acceptance_length": 4.0, "draft_acceptance_rate": 0.9}
    found = measure._draft_figures(plain, fast, VariantResults([], {}, {"runs": runs}))
    expected = {"acceptance_length": 4.0, "acceptance_rate": 0.9, "steps_ratio": 0.25, "time_ratio": 0.5}
    assert found == expected and found.keys() == FIGURES["draft"].keys()


@given(st.floats(0.01, 100), st.floats(0.01, 100))
def test_a_ratio_is_missing_where_it_would_mean_nothing(one: float, other: float) -> None:
    assert ratio(one, other) == one / other
    assert ratio(None, one) is ratio(one, None) is ratio(one, 0.0) is ratio(one, -other) is None


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=8), st.floats(0.1, 10), st.randoms())
def test_jain_index(values: list[float], times: float, draw: Any) -> None:
    """Jain, Chiu and Hawe, 1984: between 1/n and 1, whatever the unit and the order; 1 where all are equal."""
    found = jain_index(values)
    if not any(value * value for value in values):
        assert found is None
        return
    assert found is not None and 1 / len(values) - 1e-9 <= found <= 1 + 1e-9
    assert jain_index([values[0] + 1] * len(values)) == pytest.approx(1)
    moved = [times * value for value in values]
    draw.shuffle(moved)
    assert min(values) < 1e-3 or jain_index(moved) == pytest.approx(found)


def test_only_contended_steps_are_metered() -> None:
    def sequence(tenant: str) -> Any:
        return SimpleNamespace(request=SimpleNamespace(tenant=tenant))

    def steps(waiting: str, spans: dict[str, int], steps: int = 1) -> tuple[Any, Any]:
        plan = SimpleNamespace(spans=[SimpleNamespace(sequence=sequence(t), length=n) for t, n in spans.items()])
        queue = SimpleNamespace(waiting=[sequence(tenant) for tenant in waiting])
        return SimpleNamespace(scheduler=queue), SimpleNamespace(plan=plan, steps=steps)

    meter = TenantMeter(("a", "b"))
    assert meter.fairness is None
    meter.on_steps(*steps("aa", {"a": 100}))  # b waits for nothing: no step of it is unfair
    assert meter.fairness is None
    meter.on_steps(*steps("aab", {"a": 30, "b": 10}))
    meter.on_steps(*steps("ba", {"b": 2}, steps=10))
    assert meter.tokens == {"a": 30, "b": 30} and meter.fairness == 1


def test_a_summary_is_small_and_read_back_the_same(tmp_path: Path) -> None:
    entry = entry_in(tmp_path)
    assert read_summaries(entry.file) == []
    summary = summary_of(entry)
    file = store_summaries(entry.file, [summary])
    assert read_summaries(entry.file) == [summary] and file.stat().st_size < 2_000
    assert ZooItem(entry_in(tmp_path)).verdict == "holds" and ZooItem(entry_in(tmp_path)).remarks == []
    file.write_text("3")
    refuses("is no list of summaries .*; delete it and measure again", read_summaries, entry.file)


def test_the_first_model_decides(tmp_path: Path) -> None:
    entry = entry_in(tmp_path, models="[a, b]")
    assert experiment_of(entry).model.name == "a" and experiment_of(entry, model="c").model.name == "c"
    later = replace(summary_of(entry, loop_ratio=0.5), model="b", date="2027-01-01")
    store_summaries(entry.file, [replace(summary_of(entry), model="a"), later])
    assert [each.model for each in entry_in(tmp_path, models="[a, b]").summaries] == ["a", "b"]
    assert [each.model for each in entry_in(tmp_path, models="[b, a]").summaries] == ["b", "a"]
    assert records_file(entry.file).read_text().count("\n{") == 2, "side by side"


@pytest.mark.parametrize(
    ("change", "outdated"),
    [
        ({"rule": '"loop_ratio >= 0.5"'}, True),
        ({"workload": "{prompts: 3}"}, True),
        ({"baseline": "{sampling.top_k: 3}"}, True),
        ({"says": '"Something else."'}, False),
        ({"held": '"It held."'}, False),
        ({"technique": "Colder"}, False),
    ],
)
def test_it_is_outdated_by_what_decides(tmp_path: Path, change: dict[str, str], outdated: bool) -> None:
    before = entry_in(tmp_path).inputs
    assert (entry_in(tmp_path, **change).inputs != before) == outdated


def test_code_outdates_a_summary_and_comments_do_not(tmp_path: Path) -> None:
    zoo = made.folder(tmp_path)
    entry, source = load_zoo(zoo)["hotter"], (zoo / "hotter.py").read_text()
    store_summaries(entry.file, [summary_of(entry)])
    (zoo / "hotter.py").write_text(source.replace("multiply the logits", "in other words") + "# more\n")
    assert ZooItem(load_zoo(zoo)["hotter"]).remarks == []
    (zoo / "hotter.py").write_text(source.replace("logits * self.times", "logits / self.times"))
    (remark,) = ZooItem(load_zoo(zoo)["hotter"]).remarks
    assert "changed since: `workbench zoo run hotter`" in remark


def test_a_busy_machine_is_remarked_upon(tmp_path: Path) -> None:
    entry = entry_in(tmp_path)
    store_summaries(entry.file, [summary_of(entry, busy=0.5)])
    (remark,) = ZooItem(entry).remarks
    assert remark.startswith("other processes took 50% of the processor")
