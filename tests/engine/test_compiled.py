"""The inductor lane: the same rows, and compilation that is bounded and counted."""

from __future__ import annotations

import pytest

from compiled_kernels import Lane, lane_problems
from tests.engine.test_runner import request
from tests.engine.tiny import Oracle, layer, model_of, runner_of, spec_of
from workbench.engine.compiled import DECODE_BUCKETS, bucket_for
from workbench.engine.runner import generate

problem = lane_problems()[Lane.INDUCTOR]


def test_buckets() -> None:
    assert [bucket_for(rows) for rows in (1, 2, 3, 16, 33, 64, 65, 129)] == [1, 2, 4, 16, 64, 64, 128, 192]
    assert all(bucket_for(rows) >= rows for rows in range(1, 300))


@pytest.mark.skipif(problem is not None, reason=f"inductor lane: {problem}; install a compiler to run this")
def test_compiled_rows_are_the_oracles_and_graphs_are_bounded() -> None:
    model = model_of(spec_of(layer(4, 2), layer(4, 2)), lane=Lane.INDUCTOR)
    runner = runner_of(model, max_num_seqs=2)
    Oracle(runner)
    first = [request("a", 5, 12), request("b", 19, 4)]
    generate(runner, first)
    compiled = runner.executor.compiles
    # One kind of block: two sides of attention, a block a bucket, a head a bucket.
    assert 0 < compiled <= 2 + 2 * 2 + 2
    assert len([rows for rows in DECODE_BUCKETS if rows <= 2]) == 2
    generate(runner, [request("c", 11, 9), request("d", 30, 6), request("e", 7, 3)])
    assert runner.executor.compiles <= 2 + 2 * 2 + 2, "new lengths must not compile anew"
