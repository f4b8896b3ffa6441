"""A roofline is drawn to scale: nothing measured stands above its roof unless it was quicker, predictions lie on it."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.tiny import model_of, runner_of, spec_of
from tests.runs.small_folders import run_folder
from tests.thorough import tries
from workbench.engine.load import load
from workbench.errors import WorkbenchError
from workbench.machine import ceilings as study_ceilings
from workbench.machine.ceilings import Ceiling, MachineCeilings, ceilings_for, stored_ceilings
from workbench.request import Request, SamplingParameters
from workbench.simulate.roofline import HARDWARE
from workbench.trace.events import Stepped
from workbench.trace.recorder import Recorder
from workbench.widgets import ModelGraph
from workbench.widgets.model_graph.roofline import Roof, RooflinePoint, Roofs, points_of_steps
from workbench.widgets.model_graph.roofline_picture import draw_points, draw_roofline

ROOF_OF_READS = Roofs((Roof("memory", 1e10, 1e6),), (Roof("float32", 1e11),))
RECORDS = Path(__file__).resolve().parents[2] / "experiments" / "records"
POSITIVE = st.floats(-3, 3).map(lambda power: 10.0**power)
POINTS = st.builds(
    RooflinePoint,
    name=st.text("ab<&\"' ", max_size=12),
    flops=POSITIVE.map(lambda x: x * 1e9),
    bytes=POSITIVE.map(lambda x: x * 1e8),
    seconds=POSITIVE.map(lambda x: x * 1e-2),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    series=st.integers(0, 3),
)
ROOFS = st.builds(
    lambda reads, gemms: Roofs(
        tuple(Roof(f"level {n}", rate * 1e10, 1e6 * 8**n) for n, rate in enumerate(reads)),
        tuple(Roof(name, rate * 1e11) for name, rate in zip(("float32", "bfloat16"), gemms, strict=False)),
    ),
    st.lists(POSITIVE, min_size=1, max_size=3),
    st.lists(POSITIVE, min_size=1, max_size=2),
)


@settings(max_examples=tries(80))
@given(POINTS, ROOFS)
def test_a_prediction_is_the_lower_of_the_roofs_that_hold_for_it(point: RooflinePoint, roofs: Roofs) -> None:
    """The algebra: min(gemm, read x intensity); slower work is below it."""
    point = point.with_ceilings(roofs)
    assert point.read in roofs.reads and point.gemm in roofs.gemms and point.gemm == roofs.gemm(point.dtype)
    assert point.predicted is not None and point.predicted_rate is not None and point.rate is not None
    assert point.predicted_rate == pytest.approx(min(point.gemm.rate, point.read.rate * point.intensity))
    seconds = {point.gemm: point.flops / point.gemm.rate, point.read: point.bytes / point.read.rate}
    assert point.bound is not None and seconds[point.bound] == pytest.approx(point.predicted)
    assert point.seconds is not None and point.predicted is not None
    assert (point.rate <= point.predicted_rate * (1 + 1e-12)) == (point.seconds >= point.predicted * (1 - 1e-12))


STEPS = st.tuples(st.sampled_from(["prefill", "decode", "mixed"]), st.integers(1, 9), POSITIVE, st.booleans())


@given(st.lists(STEPS, max_size=30))
def test_steps_alike_are_one_point(durations: list[tuple[str, int, float, bool]]) -> None:
    rows, compiles, alike = [], 0, defaultdict[tuple[str, int], list[tuple[float, bool]]](list)
    for phase, size, seconds, compiling in durations:
        compiles += compiling
        alike[phase, size].append((seconds, compiling))
        rows.append(asdict(Stepped(
            0.0, phase=phase, requests=size, prefill_tokens=size, forward_seconds=seconds, predicted_flops=10.0 * size,
            predicted_bytes=5.0, compiles=compiles,
        )))  # fmt: skip
    points = {point.name: point for point in points_of_steps(rows, "float32")}
    assert {name.split()[0] for name in points} == {phase for phase, _ in alike}
    for (phase, size), found in alike.items():
        if phase == "decode":
            point, counted = points[f"decode × {size}"], [s for s, c in found if not c] or [s for s, _ in found]
            assert point.flops == 10.0 * size and point.note.startswith(f"{len(counted)} steps")
            assert min(counted) <= (point.seconds or 0) <= max(counted)


def test_a_runner_walks_right_with_its_batch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WORKBENCH_CACHE_DIR", str(tmp_path))  # where no other test has measured
    runner = load("demo", backend="eager")
    monkeypatch.setattr(study_ceilings, "ceilings_for", lambda *sizes, **_: measured(*sizes))
    view = ModelGraph(runner, tab="roofline")
    assert not view.ceilings.reads and "not known yet" in view.picture()
    view.measure()
    few = SamplingParameters(max_tokens=4, ignore_eos=True)
    for batch in (1, 2, 8):
        list(runner.stream([Request(f"{batch}-{n}", tuple(range(5, 45)), few) for n in range(batch)]))
    works = {point.name: point for point in view.works}
    decodes = [works[f"decode × {batch}"] for batch in (1, 2, 8)]
    walk = [point.intensity for point in decodes]
    assert walk == sorted(walk) and walk[2] > 6 * walk[0] and decodes[0].bound in view.ceilings.reads
    prefill = next(point for name, point in works.items() if name.startswith("prefill"))
    assert prefill.bound == prefill.gemm == view.ceilings.gemms[1] and prefill.bound.name == "bfloat16"  # type: ignore
    view.throttle.flush()
    assert "decode × 8" in view.shown.content
    view.shown.picked = "0"
    assert view.chosen == 0 and "▸ <b>prefill" in view.picture()
    view.forget()
    assert view.works == []
    view.close()


@pytest.mark.parametrize("given", [None, ROOF_OF_READS])
def test_with_the_graph_all_roofs_are_measured_that_were_not_given(
    given: Roofs | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study_ceilings, "stored_ceilings", lambda *_, **__: measured(2**20))
    monkeypatch.setattr(study_ceilings, "ceilings_for", lambda *sizes, **_: measured(*sizes))
    view = ModelGraph(runner_of(model_of(spec_of())), tokens=3, ceilings=given)
    view.measure()
    assert len(view.ceilings.reads) == (len(view._sizes()) if given is None else 1)
    view.close()


def measured(*sizes: int) -> MachineCeilings:
    def ceiling(kind: str, value: float, dtype: str = "", size: int = 1) -> Ceiling:
        return Ceiling(kind, value, "", "way", 1, 3, 1.0, size, "cache" if size < 2**25 else "DRAM", size, dtype)

    reads = tuple(ceiling("read", 1e11 if size < 2**25 else 2e10, size=size) for size in sizes)
    return MachineCeilings(reads, (ceiling("gemm", 1e11, "float32"), ceiling("gemm", 4e11, "bfloat16")))


def test_an_error_in_measuring_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("no <clock>")

    monkeypatch.setattr(study_ceilings, "ceilings_for", broken)
    view = ModelGraph(RooflinePoint("work", 1e9, 1e8, 1.0), ceilings="h100")
    with pytest.raises(WorkbenchError, match="no <clock>"):
        view.measure()
    assert "no &lt;clock&gt;" in view.picture() and not view.measuring
    assert view.works[0].read is not None and view.works[0].read.rate == HARDWARE["h100"].bandwidth


def test_what_was_measured_before_is_known_without_measuring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"measure_read_bandwidth": lambda size, *_: measured(size).read_ceilings[0],
             "measure_gemm_rate": lambda dtype, *_: measured().gemm_ceilings[dtype == "bfloat16"]}  # fmt: skip
    for name, fake in found.items():
        monkeypatch.setattr(study_ceilings, name, fake)
    assert stored_ceilings(2**20, cache_dir=tmp_path) == MachineCeilings((), ())
    before = ceilings_for(2**20, 2**27, cache_dir=tmp_path)
    for name in found:
        monkeypatch.delattr(study_ceilings, name)
    assert stored_ceilings(2**20, 2**27, cache_dir=tmp_path) == before
    assert stored_ceilings(2**24, cache_dir=tmp_path).read_ceilings == ()


@pytest.mark.parametrize("name", ["kernels-20261121-093442", "bench-smollm2-135m-20261121-093042"])
def test_a_record_brings_its_ceilings(name: str) -> None:
    rows = [row for row in json.loads((RECORDS / f"{name}.json").read_text())["rows"] if row["status"] == "ok"]
    view = ModelGraph(RECORDS / f"{name}.json", ceilings="h100")
    assert len(view.works) == len(rows)
    for point, row in zip(view.works, rows, strict=True):
        share = row.get("share_of_ceiling") or row["share_of_roofline"]
        assert (point.predicted or 0) / (point.seconds or 1) == pytest.approx(share)
        assert "bound" not in row or (point.bound == point.read) == (row["bound"] == "read")
    assert "h100 memory" not in view.picture()  # nothing of theirs stands under it


def test_a_run_and_points_stand_side_by_side(tmp_path: Path) -> None:
    recorder = Recorder()
    for phase in ("prefill", "decode"):
        recorder.record(Stepped(1.0, phase=phase, requests=3, prefill_tokens=7, wall_seconds=0.3, forward_seconds=0.2,
                              predicted_flops=8.0, predicted_bytes=4.0))  # fmt: skip
    record = run_folder(tmp_path, recorder=recorder)
    view = ModelGraph(record, [RooflinePoint("mine <b>", 1e9, 1e8, 0.5, dtype="float32")], ceilings="h200")
    assert [point.name for point in view.works[:2]] == [f"{record.name} prefill 7", f"{record.name} decode × 3"]
    assert "mine &lt;b&gt;" in view.picture() and view.works[1].dtype == "bfloat16"
    assert ModelGraph(str(record.path)).points == ModelGraph(record).points
    moves = [RooflinePoint("moves", 0.0, 1e8, 0.5, Roof("r", 1e9), Roof("g", 1e9))]
    assert (
        "moves" not in draw_roofline(moves, Roofs()).svg()
        and "<td>1</td>" in draw_points(moves)
        and "100 ms" in draw_points(moves)
    )


def test_a_series_has_its_colour_and_shape_whatever_is_beside_it() -> None:
    kinds = [RooflinePoint("", 1.0, 1.0, 1.0, Roof("", 1.0), Roof("", 1.0), series=n) for n in range(4)]
    whole, part = (
        draw_roofline(each, Roofs()).spec["layer"][-1 - len(each)]["encoding"] for each in (kinds, kinds[2:])
    )
    for look in ("color", "shape"):
        every, some = (each[look]["scale"]["range"] for each in (whole, part))
        assert len({*every}) == 4 and every[2:] == some
