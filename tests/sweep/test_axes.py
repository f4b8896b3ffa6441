"""The points of a sweep: laws of products, links, repetitions and keys, over drawn axes."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.refusals import refuses
from tests.sweep.points import TINY, write
from tests.thorough import tries
from workbench.errors import WorkbenchError
from workbench.experiment.experiment import Experiment
from workbench.experiment.settings import paths_overlap
from workbench.sweep.axes import SEED_STRIDE, ExpandedSweep, expand_sweep
from workbench.sweep.folder import experiment_with_axes
from workbench.sweep.point import SweepPoint, key_of

BASE = Experiment.from_yaml(TINY)
FOLDER = Path("nowhere")
CHOICES: dict[str, st.SearchStrategy] = {
    "cache.page_size": st.integers(1, 512),
    "cache.format": st.sampled_from(["dense", "int8", "int4"]),
    "backend": st.sampled_from(["eager", "inductor", "auto"]),
    "schedule.max_num_seqs": st.integers(1, 64),
    "sampling.seed": st.integers(0, 9),
    "sampling.top_p": st.floats(0.1, 1.0),
    "sampling.stop": st.lists(st.text("ab,: {'\"", min_size=1, max_size=4), max_size=2, unique=True),
    "measure.warmup": st.integers(0, 5),
    "workload.requests": st.integers(1, 9),
}
PATHS = sorted(CHOICES)


@st.composite
def axes(draw: st.DrawFn, paths: list[str], most: int = 2) -> dict[str, list]:
    """Different values for each of some paths."""
    return {
        path: draw(st.lists(CHOICES[path], min_size=1, max_size=3, unique_by=json.dumps))
        for path in draw(st.lists(st.sampled_from(paths), max_size=most, unique=True))
    }


@st.composite
def sweeps(draw: st.DrawFn) -> dict[str, Any]:
    cut = draw(st.integers(0, len(PATHS)))
    mixed = draw(st.permutations(PATHS))
    product, others = draw(axes(mixed[:cut] or mixed)), mixed[cut:] if cut else []
    linked = draw(axes(others, 2)) if others else {}
    shortest = min(map(len, linked.values()), default=0)
    group = {path: values[:shortest] for path, values in linked.items()}
    return {"axes": product, "linked": [group] if group else [], "repeat": draw(st.integers(1, 2))}


def swept(sweep: dict[str, Any]) -> list[SweepPoint]:
    return list(expand_sweep(Experiment.from_values({**BASE.model_dump(mode="json"), "sweep": sweep}), FOLDER).points)


def expanded(folder: Path, *words: str, more: str = "") -> ExpandedSweep:
    return expand_sweep(experiment_with_axes(write(folder, more), words), FOLDER)


@given(sweeps())
@settings(max_examples=tries(30))
def test_a_sweep_has_the_product_of_its_axes_and_of_its_groups(sweep: dict[str, Any]) -> None:
    points = swept(sweep)
    lengths = [len(values) for values in sweep["axes"].values()]
    lengths += [len(next(iter(group.values()))) for group in sweep["linked"]]
    assert len(points) == math.prod(lengths) * sweep["repeat"]
    assert len({point.key for point in points}) == len({point.label for point in points}) == len(points)


def leaves(values: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(values, dict) or not values:
        return {path: values}
    return {k: v for name, inner in values.items() for k, v in leaves(inner, f"{path}.{name}".strip(".")).items()}


@given(sweeps())
@settings(max_examples=tries(20))
def test_a_point_is_the_experiment_with_its_settings_and_no_other(sweep: dict[str, Any]) -> None:
    base = leaves(BASE.single({}, "base").model_dump(mode="json"))
    for point in swept(sweep):
        assert leaves(point.experiment.model_dump(mode="json")) == {**base, **point.settings}


@given(sweeps())
@settings(max_examples=tries(20))
def test_linked_settings_advance_together(sweep: dict[str, Any]) -> None:
    for group in sweep["linked"]:
        group = {path: values for path, values in group.items() if path != "sampling.seed"}  # a repetition has its own
        rows = [json.dumps(row) for row in zip(*group.values(), strict=True)]
        for point in swept(sweep) if group else ():
            assert json.dumps([point.settings[path] for path in group]) in rows


@settings(max_examples=tries(10))
@given(st.sampled_from(PATHS).flatmap(lambda path: st.tuples(st.just(path), CHOICES[path])), st.randoms())
def test_a_key_is_the_same_in_any_order_and_after_yaml(change: tuple[str, Any], draw: random.Random) -> None:
    bias = {"sampling.logit_bias": {"5": 1.0, "3": -1.0, "9": 2.0}}  # a mapping of the user's keeps its order
    base, experiment = BASE.single(bias, "test"), BASE.single({**bias, **dict([change])}, "test")

    def shuffled(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        names = list(value)
        draw.shuffle(names)
        return {name: shuffled(value[name]) for name in names}

    key = key_of(experiment)
    assert key == key_of(Experiment.from_values(shuffled(experiment.model_dump(mode="json"))))
    assert key == key_of(Experiment.from_yaml(experiment.to_yaml()))
    assert (key == key_of(base)) == (experiment == base)


def test_repetitions_come_last_and_share_no_seed() -> None:
    points = swept({"axes": {"sampling.seed": [5, 7]}, "repeat": 3})
    assert [(point.label, point.experiment.sampling.seed) for point in points] == [
        (f"sampling.seed={seed} #{r + 1}", seed + r * SEED_STRIDE) for r in range(3) for seed in (5, 7)
    ]
    assert [point.settings.get("workload.seed") for point in points[1::2]] == [None, SEED_STRIDE, 2 * SEED_STRIDE]


def test_requests_of_two_repetitions_share_no_seed() -> None:
    """Each request of a run has a seed of its own, counted from the run's: of the longest workloads too."""
    points = swept({"axes": {"workload.requests": [50_000]}, "repeat": 2})
    first, second = (point.experiment.sampling.seed for point in points)
    assert set(range(first, first + 50_000)).isdisjoint(range(second, second + 50_000))


VARIANTS = "variants:\n  plain: {}\n  small: {cache.page_size: 16, cache.format: int8}\n"


def test_variants_are_one_more_axis(tmp_path: Path) -> None:
    found = expanded(tmp_path, "schedule.max_num_seqs=1,2", more=VARIANTS)
    assert [point.label for point in found.points] == [
        f"{name} schedule.max_num_seqs={n}" for name in ("plain", "small") for n in (1, 2)
    ]
    small = found.points[2]
    assert dict(small.settings) == {"cache.page_size": 16, "cache.format": "int8", "schedule.max_num_seqs": 1}
    assert small.experiment.cache.page_size == 16 and not small.experiment.is_comparison


def test_variants_are_set_aside_where_an_axis_sets_what_they_set(tmp_path: Path) -> None:
    found = expanded(tmp_path, "cache.format=dense,int4", more=VARIANTS)
    assert [point.label for point in found.points] == ["cache.format=dense", "cache.format=int4"]
    assert "the 2 variants are set aside: they set cache.format, as the sweep does" in found.remarks


def test_equal_experiments_run_once(tmp_path: Path) -> None:
    found = expanded(tmp_path, "cache.page_size=64,32,64.0")
    assert len(found.points) == 2
    assert found.remarks == ("cache.page_size=64.0 is the same experiment as cache.page_size=64: it runs once",)


def test_every_mistake_is_reported_at_once_with_its_points(tmp_path: Path) -> None:
    words = ["cache.format=dense,int5", "cache.page_size=0,64,128"]
    with pytest.raises(WorkbenchError, match="sweep: ") as caught:
        expanded(tmp_path, *words)
    message = str(caught.value)
    assert "cache.page_size: Input should be greater than or equal to 1" in message
    assert "cache.format" in message and "'int5'" in message and "2 of 6 points" in message and "\n" not in message


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cache.formt=dense,int8"], "cache.formt: unknown key; did you mean 'format'"),
        (["judge=a,b"], "judge is not a setting of a single run"),
        (["cache.format"], "write it as path=value,value"),
        (
            ["cache={format: int8},{format: int4}", "cache.format=dense,int8"],
            "cache.format is swept twice, within cache",
        ),
    ],
)
def test_wrong_words(tmp_path: Path, words: list[str], message: str) -> None:
    refuses(message, expanded, tmp_path, *words)


def test_links_of_unequal_lengths_are_refused(tmp_path: Path) -> None:
    refuses(
        "the same number of values: cache.page_size has 2, workload.requests has 3",
        lambda: experiment_with_axes(write(tmp_path), [], ["cache.page_size=16,32", "workload.requests=1,2,3"]),
    )


def test_the_words_go_over_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, "sweep: {axes: {backend: [eager, auto], cache.page_size: [16, 32]}, repeat: 2}\n")
    experiment = experiment_with_axes(file, ["backend=eager", "cache.page_size=8,16,64"], repeat=1)
    assert experiment.sweep is not None and experiment.sweep.repeat == 1
    assert dict(experiment.sweep.axes) == {"cache.page_size": (8, 16, 64)}
    listed = experiment_with_axes(file, ["sampling.stop=[a, b],[c]"]).sweep
    assert listed is not None and listed.axes["sampling.stop"] == (["a", "b"], ["c"])
    again = Experiment.from_yaml(experiment.to_yaml())
    assert again == experiment


def test_a_value_that_the_sweep_would_overrule_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path, "sweep: {overrides: [{backend: eager}, {backend: auto}]}\n")
    refuses("--set backend: the sweep sets backend", experiment_with_axes, file, ["backend=mlir"])


def test_a_list_of_overrides_is_an_axis(tmp_path: Path) -> None:
    lists = "sweep: {overrides: [{}, {cache.page_size: 16}, {cache.page_size: 16, backend: auto}]}\n"
    labels = [point.label for point in expanded(tmp_path, more=lists).points]
    assert labels == [
        "cache.page_size=64 backend=eager", "cache.page_size=16 backend=eager", "cache.page_size=16 backend=auto"
    ]  # fmt: skip


@given(st.lists(st.sampled_from("ab"), min_size=1, max_size=3), st.lists(st.sampled_from("ab"), min_size=1, max_size=3))
def test_paths_overlap_where_one_leads_into_the_other(one: list[str], other: list[str]) -> None:
    shared = min(len(one), len(other))
    assert paths_overlap(".".join(one), ".".join(other)) == (one[:shared] == other[:shared])
