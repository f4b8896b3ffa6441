"""Step times: whole numbers that add up, the same count as the real runner's, and what is fitted to real steps."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.refusals import refuses
from tests.simulate.scenes import FORMS
from workbench.model.attention_spec import MLASpec
from workbench.model.cost import StepCostModel
from workbench.model.shapes import SHAPES, named_shape
from workbench.simulate.roofline import (
    HARDWARE,
    ModelSizes,
    all_reduce_bytes_per_token,
    bubble_share,
    cache_copies,
    roofline_step_times,
)
from workbench.simulate.step_times import (
    TICKS_PER_SECOND,
    AttentionReach,
    StepTimeModel,
    StepWork,
    fit_step_times,
    step_work_of,
)

COUNTS = st.integers(0, 50)
WORKS = st.builds(StepWork, COUNTS, COUNTS, COUNTS, st.tuples(COUNTS, COUNTS), st.tuples(COUNTS, COUNTS))
KINDS = (AttentionReach(None, 0), AttentionReach(7, 2))


CHOICES = st.lists(st.lists(FORMS, min_size=1, max_size=2).map(tuple), min_size=1, max_size=4)


@given(CHOICES, WORKS, st.tuples(COUNTS, COUNTS), st.integers(0, 9), st.integers(1, 40))
def test_many_steps_take_what_they_take_one_by_one(
    choices: list, work: StepWork, rows: tuple[int, int], more: int, steps: int
) -> None:
    times = StepTimeModel("drawn", KINDS, choices[0], tuple(choices[1:]))
    run = times.series(work, rows, more)
    ends, now = [0], more
    for step in range(steps):
        grown = work._replace(
            query_key_pairs=tuple(p + step * r for p, r in zip(work.query_key_pairs, rows, strict=True)),
            positions_read=tuple(p + step * r for p, r in zip(work.positions_read, rows, strict=True)),
        )
        now += times(grown)
        ends.append(now)
    assert [run.elapsed(count) for count in range(steps + 1)] == ends
    assert run.last_step(steps) == ends[-1] - ends[-2]
    for moment in (0, 1, ends[-1] // 2, ends[-1]):
        assert run.steps_until(moment, steps) == next(i for i, end in enumerate(ends) if end >= moment)


@given(
    st.sampled_from(sorted(SHAPES)),
    st.lists(st.tuples(st.integers(0, 900), st.integers(1, 90)), min_size=1, max_size=5),
    st.sampled_from(sorted(HARDWARE)),
)
def test_the_roofline_counts_as_the_real_runner_does(name: str, spans: list[tuple[int, int]], hardware: str) -> None:
    spec, machine = named_shape(name), HARDWARE[hardware]
    sizes = ModelSizes.dense(spec)
    times = roofline_step_times(sizes, machine)
    cost = StepCostModel(spec, 2, 2, 2)(spans, len(spans))
    assert times(step_work_of(spans, len(spans), times.kinds)) / TICKS_PER_SECOND == pytest.approx(
        cost.seconds(machine.flops, machine.bandwidth), rel=2e-3
    )


def test_more_of_everything_takes_longer_and_more_accelerators_less() -> None:
    sizes = ModelSizes.dense(named_shape("llama-3.1-70b"))
    work = step_work_of([(1000, 1)] * 8, 8, (AttentionReach(None, 0),))
    one, two = (roofline_step_times(sizes, HARDWARE["h100"], gpus)(work) for gpus in (1, 2))
    assert one / 2 < two < one  # half the weights each, and what they send each other
    slower = roofline_step_times(sizes, HARDWARE["h100"], 1, 0.5, 0.5, 0.001)(work)
    assert slower == pytest.approx(2 * one + TICKS_PER_SECOND // 1000, rel=1e-6)
    assert roofline_step_times(sizes, HARDWARE["a100"])(work) > one > roofline_step_times(sizes, HARDWARE["h200"])(work)


def test_a_pipeline_of_one_microbatch_is_one_accelerator_after_the_other() -> None:
    """Nothing is gained but memory: a single microbatch passes all stages, and its rows travel between them."""
    spec = named_shape("llama-3.1-70b")
    sizes, h100 = ModelSizes.dense(spec), HARDWARE["h100"]
    work = step_work_of([(1000, 1)] * 8, 8, (AttentionReach(None, 0),))
    alone = roofline_step_times(sizes, h100)(work)
    sent = 3 * 8 * spec.hidden_size * 2 / h100.link
    assert roofline_step_times(sizes, h100, pipeline=4, microbatches=1)(work) == pytest.approx(
        alone + sent * TICKS_PER_SECOND, rel=1e-6
    )


PIPELINES = st.tuples(st.integers(1, 4), st.integers(2, 8), st.integers(1, 8))  # gpus, stages, microbatches
SPANS = st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 900)), min_size=1, max_size=40)


@given(PIPELINES, SPANS)
def test_a_step_is_cut_only_where_that_is_faster(pipeline: tuple[int, int, int], spans: list) -> None:
    """Never above the time of the uncut step; a single row is not cut, and more microbatches are never slower."""
    gpus, stages, most = pipeline
    sizes, h100 = ModelSizes.dense(named_shape("llama-3.1-70b")), HARDWARE["h100"]
    uncut, cut, more = (
        roofline_step_times(sizes, h100, gpus, pipeline=stages, microbatches=count) for count in (1, most, most + 1)
    )
    work = step_work_of(spans, len(spans), uncut.kinds)
    assert more(work) <= cut(work) <= uncut(work)
    row = step_work_of([(spans[0][0], 1)], 1, uncut.kinds)
    assert cut(row) == uncut(row)


@given(PIPELINES, st.integers(0, 5000))
def test_more_rows_take_no_less(pipeline: tuple[int, int, int], start: int) -> None:
    gpus, stages, most = pipeline
    times = roofline_step_times(
        ModelSizes.dense(named_shape("llama-3.1-70b")), HARDWARE["h100"], gpus, pipeline=stages, microbatches=most
    )
    found = [times(step_work_of([(start, 1)] * rows, rows, times.kinds)) for rows in (*range(1, 20), 300, 301, 3000)]
    assert found == sorted(found)


def test_a_pipeline_reads_its_weights_once_for_one_sequence() -> None:
    """Half of the weights of 70B by two accelerators each, twice: 141 GB at 2 x 3.35 TB/s, less the embedding."""
    spec = named_shape("llama-3.1-70b")
    times = roofline_step_times(ModelSizes.dense(spec), HARDWARE["h100"], 2, pipeline=2)
    read = 2 * (spec.num_parameters - spec.vocab_size * spec.hidden_size) / (2 * 3.35e12)
    assert times(step_work_of([(0, 1)], 1, times.kinds)) / TICKS_PER_SECOND == pytest.approx(read, rel=2e-3)


@given(st.integers(1, 8), st.integers(1, 64))
def test_an_even_pipeline_waits_for_its_bubbles(stages: int, microbatches: int) -> None:
    """Computing takes the time of one accelerator over the stages, and over the fraction that is no bubble."""
    spec = named_shape("llama-3.1-70b")
    layers = spec.layers[:1] * (stages * 2)  # as many in each
    sizes = ModelSizes.dense(spec.model_copy(update={"layers": layers}))
    endless = HARDWARE["h100"].model_copy(update={"bandwidth": 1e30, "link": 1e30})
    work = step_work_of([(0, 4096)], 0, (AttentionReach(None, 0),))
    alone = roofline_step_times(sizes, endless)(work)
    found = roofline_step_times(sizes, endless, pipeline=stages, microbatches=microbatches)(work)
    assert found == pytest.approx(alone / stages / (1 - bubble_share(stages, microbatches)), rel=1e-6)


def test_keys_that_several_accelerators_hold_are_read_by_each() -> None:
    latent = MLASpec(num_heads=8, kv_lora_rank=5, qk_rope_head_dim=2, qk_nope_head_dim=3, v_head_dim=4)
    grouped = named_shape("llama-3.1-8b")
    assert [cache_copies(grouped.layers[0].attention, gpus) for gpus in (1, 2, 8, 16)] == [1, 1, 1, 2]
    assert [cache_copies(latent, gpus) for gpus in (1, 4)] == [1, 4]
    assert all_reduce_bytes_per_token(grouped, 1) == 0
    assert all_reduce_bytes_per_token(grouped, 2) == 2 * 32 * 4096 * 2  # two a layer, a row in 16 bits each


def table_of(prefill_step: float, decode_step: float, kinds: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """Return steps of these kinds, with prompts or decodes or both."""
    draw, now, rows = random.Random(0), 0.0, []
    for _ in range(200):
        prefill, decode = draw.choice(kinds)
        prefill, decode = prefill * draw.randrange(2, 200), decode * draw.randrange(1, 9)
        context = prefill + decode * draw.randrange(100, 400)
        steps = 1e-3 + prefill_step * (prefill > 0) + decode_step * (decode > 0)
        seconds = steps + 2e-5 * prefill + 1e-4 * decode + 3e-7 * context
        now += seconds
        rows.append({
            "time": now, "wall_seconds": seconds, "prefill_tokens": prefill, "decode_tokens": decode,
            "context_tokens": context,
        })  # fmt: skip
    return rows


def test_a_table_is_fitted_to_steps_that_follow_it() -> None:
    rows = table_of(0, 0, [(0, 1), (0, 1), (1, 1)])
    (form,) = fit_step_times(rows).costs
    found = [
        ticks / TICKS_PER_SECOND
        for ticks in (form.step, form.prefill_tokens, form.decode_tokens, form.positions_read[0])
    ]
    assert found == pytest.approx([1e-3, 2e-5, 1e-4, 3e-7], rel=1e-3)
    for row in rows:  # a step that takes the same whatever it does: no figure becomes negative
        row["wall_seconds"] = 1e-3
    (form,) = fit_step_times(rows).costs
    assert min(form.step, form.prefill_tokens, form.decode_tokens, *form.positions_read) >= 0
    refuses(
        "lacks context_tokens",
        lambda: fit_step_times([{key: value for key, value in row.items() if key != "context_tokens"} for row in rows]),
    )
    refuses("has 3 steps, 20 are needed", lambda: fit_step_times(rows[:3]))


def test_steps_of_either_kind_and_of_both_have_their_own_times() -> None:
    """Each kind has its part of a step, where steps have prompts alone, decodes alone, and both."""
    rows = table_of(5e-3, 2e-3, [(0, 1), (1, 0), (1, 1)])
    times = fit_step_times(rows)
    for row in rows:
        work = StepWork(row["prefill_tokens"], row["decode_tokens"], 0, (), (row["context_tokens"],))
        assert times(work) / TICKS_PER_SECOND == pytest.approx(row["wall_seconds"], rel=1e-6)
    (form,) = times.costs
    found = [form.step, form.prefill_step, form.decode_step]
    assert [ticks / TICKS_PER_SECOND for ticks in found] == pytest.approx([1e-3, 5e-3, 2e-3], rel=1e-3)
