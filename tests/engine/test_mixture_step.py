"""The compiled step of a mixture: the oracle's rows with any router, the same bits beside any other rows of their
experts, and weights of experts that no row chose are never read."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_kernels import Backend, backend_problems
from compiled_kernels.level import Level, available_levels, limited_to
from tests.engine.tiny import Oracle, mixture_of, request, runner_of, weights_of
from tests.model.packed_experts import FORMATS, pack_experts
from tests.thorough import tries
from workbench.engine.runner import Runner, generate
from workbench.executors.mlir import MlirStep
from workbench.executors.reference import CacheLayout, single_decode_step
from workbench.executors.select import Backends
from workbench.model.feedforward import MixtureOfExperts
from workbench.model.quantized import WeightFormat
from workbench.model.spec import ModelSpec, RouterSpec
from workbench.model.transformer import DENSE, Transformer

problem = backend_problems()[Backend.MLIR]
pytestmark = pytest.mark.skipif(problem is not None, reason=f"backend mlir: {problem}")
ALL = Backends(Backend.MLIR, Backend.MLIR, Backend.MLIR, "all on mlir")
ROUTERS = st.builds(
    RouterSpec, score=st.sampled_from(["logit", "softmax", "sigmoid"]), softmax_chosen=st.booleans(),
    renormalize=st.booleans(), factor=st.sampled_from([1.0, 2.5]),
)  # fmt: skip


def model_of(
    spec: ModelSpec, dtype: torch.dtype = torch.float32, seed: int = 0, format: WeightFormat = DENSE
) -> Transformer:
    state = weights_of(spec, dtype, seed)
    state = state if format == DENSE else pack_experts(state, format, seed)
    model = Transformer.from_state(spec, state, Backend.MLIR, format)
    model.use_panels()
    return model


def runner(
    spec: ModelSpec, dtype: torch.dtype = torch.float32, seed: int = 0, format: WeightFormat = DENSE, **more
) -> Runner:
    return runner_of(model_of(spec, dtype, seed, format), backends=ALL, pages=80, page_size=8, **more)


@settings(max_examples=tries(8), deadline=None)
@given(router=ROUTERS, counts=st.sampled_from([(6, 2), (1, 1), (5, 5), (16, 3)]), seed=st.integers(0, 2**31),
       together=st.integers(1, 5), heads=st.sampled_from([(4, 2), (2, 2), (3, 1)]))  # fmt: skip
def test_rows_are_the_oracles(
    router: RouterSpec, counts: tuple[int, int], seed: int, together: int, heads: tuple[int, int]
) -> None:
    """Several rows may take one expert; norms of queries and keys are over all their heads."""
    spec = mixture_of(*counts, router, num_heads=heads[0], num_kv_heads=heads[1])
    ours = runner(spec, seed=seed, max_num_seqs=together)
    oracle = Oracle(ours)
    generate(ours, [request(f"{seed}-{i}", 3 + 5 * i, 4 + i) for i in range(together + 1)])
    assert oracle.clear
    assert any(name.startswith("decode") for name in ours.executor.inner.artifacts)  # type: ignore[attr-defined]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", FORMATS)
@settings(max_examples=tries(3), deadline=None)
@given(counts=st.sampled_from([(6, 2), (5, 5), (16, 3)]), seed=st.integers(0, 2**31), together=st.integers(1, 5))
def test_rows_of_experts_in_few_bits_are_the_oracles(
    kind: str, counts: tuple[int, int], seed: int, together: int
) -> None:
    ours = runner(mixture_of(*counts), seed=seed, format=FORMATS[kind], max_num_seqs=together)
    oracle = Oracle(ours)
    generate(ours, [request(f"{seed}-{i}", 3 + 5 * i, 4 + i) for i in range(together + 1)])
    assert oracle.clear
    assert any(name.startswith("decode") for name in ours.executor.inner.artifacts)  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", FORMATS)
def test_scales_of_experts_that_no_row_chose_are_never_read(kind: str) -> None:
    model = model_of(mixture_of(16, 3), format=FORMATS[kind])
    store, plan = single_decode_step(model, CacheLayout(model.cache_shapes(), 8, torch.float32), 9)
    step = MlirStep(model, store, 1)
    before = step(plan).clone()
    nan = 255 if kind == "mxfp4" else torch.nan
    mixtures = [part for part in model.modules() if isinstance(part, MixtureOfExperts)]
    for index, mixture in enumerate(mixtures):
        unused = sorted(set(range(16)) - set(step.step.chosen[index][0].tolist()))
        for scales in (mixture.gate_up_scales, mixture.down_scales):
            assert scales is not None
            scales.data[unused] = nan
    assert torch.equal(step(plan), before) and before.isfinite().all()
    assert mixtures[0].down_scales is not None
    mixtures[0].down_scales.data[step.step.chosen[0][0, 1]] = nan
    assert step(plan).isnan().any()  # and a chosen one is


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", available_levels(), ids=str)
def test_every_level(level: Level, dtype: torch.dtype) -> None:
    """17 rows: more than one tile of an expert's rows."""
    with limited_to(level):
        ours = runner(mixture_of(4, 2), dtype, max_num_seqs=17)
        Oracle(ours)
        generate(ours, [request(f"r{i}", 3 + i, 4) for i in range(17)])


def test_experts_that_no_row_chose_are_never_read() -> None:
    """Once a step has said what it chose, all else becomes NaN: the same step gives the same bits."""
    model = model_of(mixture_of(16, 3))
    store, plan = single_decode_step(model, CacheLayout(model.cache_shapes(), 8, torch.float32), 9)
    step = MlirStep(model, store, 1)
    before = step(plan).clone()
    mixtures = [part for part in model.modules() if isinstance(part, MixtureOfExperts)]
    for index, mixture in enumerate(mixtures):
        chosen = step.step.chosen[index][0].tolist()
        assert len(set(chosen)) == 3
        for stack in (mixture.gate_up, mixture.down):
            stack.data[[each for each in range(16) if each not in chosen]] = torch.nan
    assert torch.equal(step(plan), before) and before.isfinite().all()
    mixtures[0].down.data[step.step.chosen[0][0, 1]] = torch.nan
    assert step(plan).isnan().any()  # and a chosen one is
