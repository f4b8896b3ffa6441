"""The compiled step of a mixture: the oracle's rows with any router, and experts that no row chose are never read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compiled_kernels import Backend, backend_problems
from tests.engine.tiny import Oracle, in_step, mixture_of, runner_of, weights_of
from tests.helpers.events import of
from tests.helpers.rows import rows
from tests.model.packed_experts import FORMATS
from workbench.engine.runner import generate
from workbench.executors.programs.decode_step import DecodeProgram, MlirStep
from workbench.executors.reference import CacheLayout, single_decode_step
from workbench.executors.select import Backends
from workbench.model.feedforward import MixtureOfExperts
from workbench.model.quantized import WeightFormat
from workbench.model.spec import ModelSpec, RouterSpec
from workbench.model.transformer import DENSE, Transformer

problem = backend_problems()[Backend.MLIR]
pytestmark = pytest.mark.skipif(problem is not None, reason=f"backend mlir: {problem}")
ALL = Backends(Backend.MLIR, Backend.MLIR, Backend.MLIR, "all on mlir")
WEIGHTS = {"dense": DENSE, **FORMATS}


def model_of(spec: ModelSpec, format: WeightFormat) -> Transformer:
    state = weights_of(spec, torch.float32, 0)
    model = Transformer.from_state(spec, state, Backend.MLIR, format)
    model.use_panels()
    return model


@pytest.mark.sampled(10)
@rows(
    {"weights": list(WEIGHTS), "score": ["logit", "softmax", "sigmoid"], "counts": [(5, 5), (1, 1), (16, 3)],
     "heads": [(4, 2), (3, 1)], "softmax_chosen": [True, False], "renormalize": [True, False], "factor": [1.0, 2.5]},
)  # fmt: skip
def test_rows_equal_oracle(
    weights: str, score: Any, counts: tuple[int, int], heads: tuple[int, int], softmax_chosen: bool, renormalize: bool,
    factor: float,
) -> None:  # fmt: skip
    """Several rows may take one expert; norms of queries and keys are over all their heads."""
    router = RouterSpec(score=score, softmax_chosen=softmax_chosen, renormalize=renormalize, factor=factor)
    spec = mixture_of(*counts, router, num_heads=heads[0], num_kv_heads=heads[1])
    ours = runner_of(model_of(spec, WEIGHTS[weights]), backends=ALL, pages=80, page_size=8, max_num_seqs=3)
    oracle = Oracle(ours)
    generate(ours, in_step(3, 4, 1, tokens=7))  # eight rows, then four, over the end of a page
    assert oracle.clear
    assert any(name.startswith("decode") for name in ours.core.executor.inner.artifacts)  # type: ignore[attr-defined]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_experts_that_no_row_chose_are_never_read(weights: str) -> None:
    """Once a step has said what it chose, all else becomes NaN, or its scales do: the same step gives the same bits."""
    model = model_of(mixture_of(16, 3), WEIGHTS[weights])
    store, plan = single_decode_step(model, CacheLayout(model.cache_shapes(), 8, torch.float32), 9)
    step = MlirStep(DecodeProgram(model, store), 1)
    before = step(plan).clone()
    nan = 255 if weights == "mxfp4" else torch.nan
    names = [f"{side}{'' if weights == 'dense' else '_scales'}" for side in ("gate_up", "down")]
    stacks = [[dict(part.named_parameters())[name] for name in names] for part in of(MixtureOfExperts, model.modules())]
    for index, stack in enumerate(stacks):
        chosen = set(step.step.chosen[index][0].tolist())
        assert len(chosen) == 3
        for part in stack:
            part.data[sorted(set(range(16)) - chosen)] = nan
    assert torch.equal(step(plan), before) and before.isfinite().all()
    stacks[0][1].data[step.step.chosen[0][0, 1]] = nan
    assert step(plan).isnan().any()  # and a chosen one is
