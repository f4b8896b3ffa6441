"""The timed work of peers: lengths, totals, prompts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.peers.works import (
    decode_workload,
    mixed_workload,
    parse_workloads,
    prefill_workload,
    standard_workloads,
)
from tests.helpers.refusals import refuses


@given(st.data(), st.integers(1, 20), st.integers(1, 50), st.integers(0, 60), st.integers(0, 5))
def test_mixed_lengths_lie_between_the_ends_and_sum_to_the_total(data, count, least, range_, seed) -> None:
    most = least + range_
    totals = st.integers(count * least, count * most)
    prompts, outputs = data.draw(totals), data.draw(totals)
    work = mixed_workload(count, (least, most), (least, most), prompts, outputs, seed)
    assert len(work.requests) == count
    assert all(least <= length <= most for pair in work.requests for length in pair)
    assert (sum(prompt for prompt, _ in work.requests), sum(output for _, output in work.requests)) == (
        prompts,
        outputs,
    )
    assert work == mixed_workload(count, (least, most), (least, most), prompts, outputs, seed)


def test_a_total_that_cannot_be_reached_is_refused() -> None:
    refuses("cannot sum to 5", mixed_workload, 2, (3, 4), (1, 1), 5, 2)


def test_the_sixteen_requests_of_the_notes() -> None:
    requests = mixed_workload().requests
    assert len(requests) == 16
    assert sum(prompt for prompt, _ in requests) == 4352 and sum(output for _, output in requests) == 1274
    assert len(set(requests)) > 8


def test_prompts_are_seeded_in_the_vocabulary_and_differ_between_repetitions() -> None:
    work = decode_workload(100, output_tokens=3)
    first, again, other = work.repetition(50, 0), work.repetition(50, 0), work.repetition(50, 1)
    assert first == again and first != other
    assert [(len(each["prompt"]), each["output_tokens"]) for each in first] == [(100, 3)]
    assert set(first[0]["prompt"]) <= set(range(50))


def test_names_on_the_command_line() -> None:
    assert parse_workloads(["all"]) == standard_workloads()
    assert parse_workloads(["decode", "decode@4096", "prefill@512", "mixed"]) == (
        decode_workload(0),
        decode_workload(4096),
        prefill_workload(512),
        mixed_workload(),
    )
    for wrong in ("decode@", "prefill", "prefill@0", "mixed@3", "decode@-1", ""):
        refuses("is none of", parse_workloads, [wrong])
