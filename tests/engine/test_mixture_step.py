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
from tests.thorough import tries
from workbench.engine.runner import Runner, generate
from workbench.executors.mlir import MlirStep
from workbench.executors.reference import CacheLayout, single_decode_step
from workbench.executors.select import Backends
from workbench.model.feedforward import MixtureOfExperts
from workbench.model.spec import ModelSpec, RouterSpec
from workbench.model.transformer import Transformer

problem = backend_problems()[Backend.MLIR]
pytestmark = pytest.mark.skipif(problem is not None, reason=f"backend mlir: {problem}")
ALL = Backends(Backend.MLIR, Backend.MLIR, Backend.MLIR, "all on mlir")
ROUTERS = st.builds(
    RouterSpec, score=st.sampled_from(["logit", "softmax", "sigmoid"]), softmax_chosen=st.booleans(),
    renormalize=st.booleans(), factor=st.sampled_from([1.0, 2.5]),
)  # fmt: skip


def model_of(spec: ModelSpec, dtype: torch.dtype = torch.float32, seed: int = 0) -> Transformer:
    model = Transformer.from_state(spec, weights_of(spec, dtype, seed), Backend.MLIR)
    model.use_panels()
    return model


def runner(spec: ModelSpec, dtype: torch.dtype = torch.float32, seed: int = 0, **more) -> Runner:
    return runner_of(model_of(spec, dtype, seed), backends=ALL, pages=80, page_size=8, **more)


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
