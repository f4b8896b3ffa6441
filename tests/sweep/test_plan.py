"""The plan of a sweep: sums, bounds, points measured before, and points that cannot run."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.command_line import answer, cli, refused
from tests.sweep.points import planned, write
from workbench.errors import WorkbenchError
from workbench.experiment.experiment import Experiment, ServedRequests
from workbench.machine.ceilings import Ceiling, MachineCeilings
from workbench.runs.folder import RunFolder
from workbench.sweep import point_cost as work
from workbench.sweep.estimate import COST_MODEL, MEASURED, SCALED_COST_MODEL, UNKNOWN, Estimate
from workbench.sweep.folder import SweepFolder, experiment_with_axes
from workbench.sweep.plan import PlannedPoint, SweepPlan, plan_sweep
from workbench.sweep.point import PointResult, SweepPoint
from workbench.sweep.point_cost import CachedCeilings, decode_steps, point_cost
from workbench.sweep.run import SweepRow
from workbench.sweep.worker import RUN_NAME

KV = Path(__file__).parents[2] / "experiments" / "kv_precision.yaml"
SIZES = "workload.output_tokens=2,40,400"


EXPERIMENT = Experiment.from_file(KV)


def done(point: SweepPoint, seconds: float, size: int = 10**9, error: str | None = None) -> None:
    point.write()
    run = RunFolder.create(point.folder, RUN_NAME)
    PointResult(point.key, run.finish(), error, seconds, size).write(point.folder)


def sources(made: SweepPlan) -> list[str]:
    return [each.estimate.source for each in made.points]


seconds = st.one_of(st.none(), st.floats(0, 1e4))


@given(st.lists(st.tuples(seconds, st.sampled_from(["done", "failed", "to run"])), max_size=8), st.booleans())
def test_the_total_is_the_sum_of_what_is_to_run(rows: list, retry: bool) -> None:
    made = []
    for number, (each, state) in enumerate(rows):
        point = SweepPoint(str(number), "", {}, "", Path("nowhere"))
        outcome = None if state == "to run" else PointResult(point.key, None, "no" if state == "failed" else None, 1.0)
        made.append(PlannedPoint(SweepRow(point, outcome), Estimate(each, 1, COST_MODEL)))
    sweep = SweepFolder(Path("nowhere"), "x", EXPERIMENT, ())
    found = SweepPlan(sweep, tuple(made), (), retry)
    states = ("to run", "failed") if retry else ("to run",)
    assert found.seconds == sum(each or 0.0 for each, state in rows if state in states)
    assert found.num_without_estimate == sum(each is None for each, state in rows if state in states)
    assert len(found.to_run) + sum(state not in states for _, state in rows) == len(rows)


def test_more_to_do_takes_longer_and_more_memory(tmp_path: Path) -> None:
    made = plan_sweep(planned(tmp_path, SIZES), tmp_path / "runs", start_seconds=1.0)
    times = [each.estimate.seconds or 0.0 for each in made.points]
    sizes = [each.estimate.bytes or 0 for each in made.points]
    assert times == sorted(times) and times[0] > 1.0 and sizes == sorted(sizes) and sizes[0]
    assert set(sources(made)) == {COST_MODEL} and made.is_lower_bound and "cost model: " in made.remarks[0]
    assert made.seconds == sum(times)


def test_points_that_ran_scale_the_others(tmp_path: Path) -> None:
    sweep = planned(tmp_path, SIZES)
    bounds = [each.estimate.seconds or 0.0 for each in plan_sweep(sweep, tmp_path / "runs").points]
    done(sweep.points[1], 7 * bounds[1])
    made = plan_sweep(sweep, tmp_path / "runs")
    assert (
        sources(made) == [SCALED_COST_MODEL.format(1), MEASURED, SCALED_COST_MODEL.format(1)]
        and not made.is_lower_bound
    )
    assert made.points[0].estimate.seconds == pytest.approx(7 * bounds[0])
    assert made.points[1].estimate.seconds == 7 * bounds[1] and made.points[1].row.state == "done"
    assert made.seconds == pytest.approx(7 * (bounds[0] + bounds[2]))


def test_another_sweep_of_the_same_points_is_known(tmp_path: Path) -> None:
    first = planned(tmp_path, SIZES)
    first.write()
    done(first.points[0], 5.0)
    made = plan_sweep(planned(tmp_path, "workload.output_tokens=2,7"), tmp_path / "runs")
    assert made.points[0].estimate == Estimate(5.0, 10**9, MEASURED) and made.points[0].row.state == "to run"
    assert "measured: the same points have run in another sweep" in made.remarks


@pytest.mark.parametrize("error", [None, "of 2 requests: 2 refused"])
def test_the_time_of_a_point_that_failed_is_none_of_its_own(tmp_path: Path, error: str | None) -> None:
    """Neither here nor in another sweep, nor for the others' scale."""
    here, there = planned(tmp_path, SIZES), planned(tmp_path, SIZES, "cache.page_size=64")
    there.write()
    done(there.points[0], 500.0, error=error)
    done(here.points[1], 500.0, error=error)
    assert sources(plan_sweep(here, tmp_path / "runs"))[:2] == [COST_MODEL if error else MEASURED] * 2


@pytest.mark.parametrize("order", [*itertools.permutations(("own", "ran", "failed", "planned"))][::3])
def test_a_point_that_ran_is_known_whatever_other_sweeps_have_of_it(tmp_path: Path, order: tuple[str, ...]) -> None:
    experiment, sweeps = experiment_with_axes(write(tmp_path), [SIZES]), dict[str, SweepFolder]()
    for name, kind in zip("abcd", order, strict=True):
        sweeps[kind] = SweepFolder.create(experiment, tmp_path / "runs", name)
        sweeps[kind].write()
    done(sweeps["ran"].points[0], 5.0)
    done(sweeps["failed"].points[0], 500.0, error="no")
    made = plan_sweep(sweeps["own"], tmp_path / "runs")
    assert made.points[0].estimate == Estimate(5.0, 10**9, MEASURED)


def test_an_outcome_in_another_points_folder_is_none(tmp_path: Path) -> None:
    first, second, _ = planned(tmp_path, SIZES).points
    done(first, 1.0)
    shutil.copytree(first.folder, second.folder)
    assert PointResult.read(first.folder) is not None and PointResult.read(second.folder) is None


def test_requests_over_time_last_at_least_as_long_as_they_come(tmp_path: Path) -> None:
    traffic = "workload={kind: traffic, lengths: {kind: fixed}, arrivals: {kind: poisson, rate: 0.1}, requests: 9}"
    experiment = experiment_with_axes(write(tmp_path), [traffic]).single({}, "test")
    found = point_cost(experiment)
    assert found is not None and found.min_seconds > 9 and sum(found.served[0].lengths.values()) == 9
    assert point_cost(experiment.with_("executor={kind: simulated}")) is None


def test_a_machine_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def ceilings_for(size: int, dtypes: tuple[str, ...]) -> MachineCeilings:
        asked.append((size, *dtypes))
        ceiling = Ceiling("read", 5.0, "", "", 1, 1, 1.0, size, others_cpu_share=0.3)
        return MachineCeilings((ceiling,), (dataclasses.replace(ceiling, value=7.0, dtype=dtypes[0]),))

    monkeypatch.undo()
    monkeypatch.setattr(work, "ceilings_for", ceilings_for)
    machine = CachedCeilings()
    assert {machine.rates(100, "bfloat16") for _ in range(3)} == {(7.0, 5.0)} and machine.contention == 0.3
    machine.rates(100, "float16")
    assert asked == [(100, "bfloat16", "float32"), (100, "float32")]


def test_a_decode_has_as_many_tokens_as_are_asked_for() -> None:
    experiment = EXPERIMENT.with_("schedule.max_num_seqs=4")
    steps, rows, context = decode_steps(ServedRequests(experiment, {(10, 5): 3, (20, 9): 2}))
    assert steps * rows >= 3 * 4 + 2 * 8 and steps >= 8 and 10 < context < 29


def test_what_is_unknown_is_said_to_be(tmp_path: Path) -> None:
    made = plan_sweep(planned(tmp_path, "executor.memory=0.5,0.9", "executor.kind=simulated"), tmp_path / "runs")
    assert sources(made) == [UNKNOWN] * 2 and made.num_without_estimate == 2 and made.seconds == 0
    done(made.points[0].row.point, 3.0)
    again = plan_sweep(made.sweep, tmp_path / "runs")
    assert again.points[1].estimate.seconds == 3.0 and sources(again)[1] == SCALED_COST_MODEL.format(1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.name=nowhere,shape:tiny"], "no model 'nowhere'.* \\(in model.name=nowhere\\)"),
        (["cache.page_size=8,64", "cache.format=int4", "cache.quant_group=48"], "sweep: "),
    ],
)
def test_an_impossible_point_is_reported_before_anything_runs(tmp_path: Path, words: list[str], message: str) -> None:
    with pytest.raises(WorkbenchError, match=message):
        plan_sweep(planned(tmp_path, *words), tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_the_command_of_the_issue_plans_nine_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = "sweep --set cache.format=dense,int8,int4 --set workload.context=256,512,1024 --dry-run"
    found = answer(words, KV)
    assert len(found["points"]) == found["to_run"] == 9
    assert found["seconds"] == pytest.approx(sum(each["estimate"]["seconds"] for each in found["points"]))
    assert any("6 variants are set aside" in line for line in found["remarks"])
    printed = cli(words, KV).out
    assert "cache.format=int4 workload.context=1024" in printed and "9 points to run; one after another" in printed
    assert not list(tmp_path.iterdir())
    message = refused("sweep --set workload.context=256,4096 --dry-run", KV)
    assert "workload.context 4096: above the model's own, 1024" in message


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--repeat 2 --resume x", "need an experiment's file"),
        ("", "give an experiment's file, or --resume"),
        ("--resume nowhere", "nowhere: is no sweep folder"),
        (f"{KV} --retry-failed", "needs --resume FOLDER"),
        (f"{KV} --out x --resume x", "stays in its folder"),
        (f"{KV} --executor slum", "did you mean 'slurm'"),
    ],
)
def test_wrong_words(words: str, message: str) -> None:
    assert message in refused(f"sweep {words}")
