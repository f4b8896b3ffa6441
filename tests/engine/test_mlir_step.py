"""The compiled step: threads, times, artifacts, compilations, refusals. Its rows are tests/laws'."""

from __future__ import annotations

import pytest
import torch

from compiled_kernels import Backend, backend_problems
from compiled_kernels.mlir.artifacts import ArtifactCache, cache_directory
from tests.engine.tiny import Oracle, layer, model_of, poison, request, runner_of, spec_of
from tests.helpers.events import of
from workbench.engine.runner import Runner, generate
from workbench.errors import WorkbenchError
from workbench.executors.programs.decode_step import DecodeProgram
from workbench.executors.select import Backends
from workbench.model.spec import ModelSpec
from workbench.trace.events import Stepped

problem = backend_problems()[Backend.MLIR]
pytestmark = pytest.mark.skipif(problem is not None, reason=f"backend mlir: {problem}")

MIXED = Backends(Backend.MLIR, Backend.EAGER, Backend.EAGER, "decode steps alone are compiled")


def runner(spec: ModelSpec, dtype: torch.dtype = torch.float32, **settings) -> Runner:
    return runner_of(model_of(spec, dtype=dtype), backends=MIXED, **settings)


def test_a_context_that_threads_share_is_merged_right(two_threads: None) -> None:
    """Two threads split one context; what they find is weighed by their peaks."""
    ours = runner(spec_of(layer(2, 1), layer(2, 1, sliding_window=9)))
    Oracle(ours)
    generate(ours, [request("long", 40, 7)])
    assert ours.core.executor.inner.programs["decode"].steps[1].step.shape.chunks == 2  # type: ignore[attr-defined]


def test_a_step_tells_its_kernels_time_and_its_artifact() -> None:
    ours = runner(spec_of(), max_num_seqs=2)
    steps = of(Stepped, ours.stream([request("a", 5, 9), request("b", 3, 4)]))
    for step in steps:
        assert step.kernel_seconds is not None and 0 < step.kernel_seconds < step.forward_seconds
    assert {step.phase for step in steps} == {"prefill", "decode"}
    found = ours.core.executor.artifacts
    assert set(found) == {"decode 1", "decode 2", "blocks 8", "head 8"} and len(set(found.values())) == 4
    assert all(ArtifactCache(cache_directory()).load(digest) for digest in found.values())


def test_a_model_elsewhere_than_on_the_cpu_is_refused() -> None:
    ours = runner(spec_of())
    with pytest.raises(WorkbenchError, match="device is 'meta': its kernels run on the CPU"):
        DecodeProgram(ours.model.to("meta"), ours.store)


def test_steps_are_compiled_once_a_bucket_and_counted() -> None:
    ours = runner(spec_of())
    generate(ours, [request("a", 5, 9), request("b", 9, 4), request("c", 3, 7)])
    programs = ours.core.executor.programs
    assert ours.core.executor.compiles == len(programs["decode"].artifacts) + programs["rows"].made <= 3 + 4
    before = ours.core.executor.compiles
    poison(ours)
    generate(ours, [request("d", 11, 9), request("e", 20, 5)])
    assert ours.core.executor.compiles == before
