"""Decode as one compiled MLIR function: the oracle's rows, in every batch, over every kind of layer and weight."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_kernels import Backend, backend_problems
from compiled_kernels.level import Level, available_levels, limited_to
from compiled_kernels.linear.matrix_format import MatrixFormat
from compiled_kernels.mlir.artifacts import ArtifactCache, cache_directory
from tests.engine.tiny import Oracle, in_step, layer, poison, request, runner_of, spec_of, specs, weights_of
from tests.engine.weight_formats import FORMATS
from tests.thorough import tries
from workbench.engine.runner import Runner, generate
from workbench.errors import WorkbenchError
from workbench.executors.mlir import MlirStep
from workbench.executors.select import Backends
from workbench.model.hf.weights import random_weights
from workbench.model.quantized import WeightFormat
from workbench.model.shapes import named_shape
from workbench.model.spec import ModelSpec
from workbench.model.transformer import Transformer
from workbench.trace.events import Stepped

problem = backend_problems()[Backend.MLIR]
pytestmark = pytest.mark.skipif(problem is not None, reason=f"backend mlir: {problem}")

W8A8 = WeightFormat.parse("int8", activations="int8")
MIXED = Backends(Backend.MLIR, Backend.EAGER, Backend.EAGER, "decode steps alone are compiled")


def runner(
    spec: ModelSpec, dtype: torch.dtype = torch.float32, format: WeightFormat | None = None, seed: int = 0, **settings
) -> Runner:
    model = Transformer.from_state(spec, weights_of(spec, dtype, seed), format=format or WeightFormat())
    return runner_of(model, backends=MIXED, **settings)


@settings(max_examples=tries(8), deadline=None)
@given(specs, st.integers(0, 2**31), st.integers(1, 5))
def test_rows_are_the_oracles(spec: ModelSpec, seed: int, together: int) -> None:
    """Windows, groups, biases, odd widths; rows are padded to a bucket, pages begin as NaN."""
    ours = runner(spec, seed=seed, max_num_seqs=together)
    Oracle(ours)
    generate(ours, [request(f"{seed}-{i}", 3 + 5 * i, 4 + i) for i in range(together + 1)])


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    "format",
    [
        WeightFormat.parse("int8"),
        W8A8,
        WeightFormat.parse("int4", quant_group=4),
        WeightFormat.parse("int4", "int8", 4),
        *FORMATS.values(),
    ],
    ids=str,
)
@pytest.mark.parametrize("tied", [True, False])
def test_quantized_weights_are_the_oracles(format: WeightFormat, tied: bool) -> None:
    """The oracle multiplies with the same quantized values, made dense."""
    ours = runner(
        spec_of(layer(4, 2, bias=True), layer(4, 2, sliding_window=5), tied=tied),
        format=format,
        max_num_batched_tokens=32,
    )
    Oracle(ours)
    generate(ours, in_step(5, 19, 3, tokens=6))


WIDE = {
    "int4 with minima": WeightFormat(MatrixFormat("int4", 64, torch.float16, torch.float32)),
    "int8 by group": WeightFormat(MatrixFormat("int8", 32, torch.float16)),
    "fp8 by row": WeightFormat(MatrixFormat("fp8")),
    "fp8 by block": WeightFormat(MatrixFormat("fp8", 128)),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("format", ["dense", "int8", "w8a8", "int4", *WIDE])
@pytest.mark.parametrize("level", available_levels(), ids=str)
def test_bfloat16_at_every_level(format: str, level: Level) -> None:
    """A shape wide enough for dot products of pairs, with them and without; 17 rows need more than one run."""
    settings = {"max_num_seqs": 17, "pages": 80, "page_size": 8}
    with limited_to(level):
        weights = W8A8 if format == "w8a8" else WIDE.get(format) or WeightFormat.parse(format)
        ours = runner(named_shape("tiny"), torch.bfloat16, weights, **settings)
        Oracle(ours)
        generate(ours, [request(f"{format}-{i}", 3 + i, 5) for i in range(17)])


def test_a_context_that_threads_share_is_merged_right() -> None:
    """Two threads split one context; what they find is weighed by their peaks."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        ours = runner(spec_of(layer(2, 1), layer(2, 1, sliding_window=9)))
        Oracle(ours)
        generate(ours, [request("long", 40, 7)])
        assert ours.executor.inner.decode_steps[1].step.shape.chunks == 2  # type: ignore[attr-defined]
    finally:
        torch.set_num_threads(threads)


def test_a_step_tells_its_kernels_time_and_its_artifact() -> None:
    ours = runner(spec_of(), max_num_seqs=2)
    steps = [e for e in ours.stream([request("a", 5, 9), request("b", 3, 4)]) if isinstance(e, Stepped)]
    for step in steps:
        assert step.kernel_seconds is not None and 0 < step.kernel_seconds < step.forward_seconds
    assert {step.phase for step in steps} == {"prefill", "decode"}
    found = ours.executor.artifacts
    assert set(found) == {"decode 1", "decode 2", "blocks 8", "head 8"} and len(set(found.values())) == 4
    assert all(ArtifactCache(cache_directory()).load(digest) for digest in found.values())


@pytest.mark.parametrize("size", [47, 48, 100])
def test_a_page_may_hold_the_whole_context(size: int) -> None:
    ours = runner(spec_of(layer(2, 1), layer(2, 1, sliding_window=9)), page_size=size, pages=8)
    Oracle(ours)
    generate(ours, [request("a", 5, 9), request("b", 40, 8)])


def test_a_model_elsewhere_than_on_the_cpu_is_refused() -> None:
    ours = runner(spec_of())
    with pytest.raises(WorkbenchError, match="device is 'meta': its kernels run on the CPU"):
        MlirStep(ours.model.to("meta"), ours.store, 1)


def test_steps_are_compiled_once_a_bucket_and_counted() -> None:
    ours = runner(spec_of())
    generate(ours, [request("a", 5, 9), request("b", 9, 4), request("c", 3, 7)])
    rows = ours.executor.token_parallel  # type: ignore[attr-defined]
    assert ours.executor.compiles == len(ours.executor.decode_steps) + rows.compiles <= 3 + 4  # type: ignore[attr-defined]
    before = ours.executor.compiles
    poison(ours)
    generate(ours, [request("d", 11, 9), request("e", 20, 5)])
    assert ours.executor.compiles == before


def test_a_type_it_does_not_know_is_refused() -> None:
    with pytest.raises(WorkbenchError, match="float64 weights: everything is computed in float32 or bfloat16"):
        runner(spec_of(), torch.float64)


@pytest.mark.parametrize("few_tokens", [0, 256])
def test_the_backend_alone_runs_prefill_too(few_tokens: int) -> None:
    spec = spec_of(layer(4, 2, bias=True), layer(4, 2, sliding_window=5))
    model = Transformer.from_state(spec, random_weights(spec, torch.float32), Backend.MLIR)
    ours = runner_of(model)
    ours.executor.max_token_parallel_tokens = few_tokens  # type: ignore[attr-defined]
    Oracle(ours)
    generate(ours, [request("a", 5, 6), request("b", 19, 4)])


@pytest.mark.skipif(backend_problems()[Backend.INDUCTOR] is not None, reason="backend inductor: no compiler here")
def test_as_auto_runs_it() -> None:
    """Blocks by Inductor, attention and decode steps in MLIR, prefills and decodes mixed, the smaller ones as rows."""
    spec = spec_of(layer(4, 2, bias=True), layer(4, 2, sliding_window=5))
    model = Transformer.from_state(spec, random_weights(spec, torch.float32), Backend.INDUCTOR)
    ours = runner_of(model, backends=Backends(Backend.MLIR, Backend.INDUCTOR, Backend.MLIR, "as auto has it"))
    ours.executor.max_token_parallel_tokens = 6  # type: ignore[attr-defined]
    Oracle(ours)
    generate(ours, [request("a", 5, 6), request("b", 39, 4), request("c", 17, 3)])
