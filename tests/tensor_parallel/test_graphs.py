"""Blocks that Inductor compiles, on ranks: as near exact logits as one process's modules, and compiled in truth."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from compiled_kernels import Backend, backend_problems
from compiled_kernels.paged_attention import inductor as paged_inductor
from tests.helpers import recorded
from tests.helpers.recorded import Rows
from tests.patience import limit
from tests.tensor_parallel.bound import allowed
from tests.tensor_parallel.in_threads import runner_of_ranks
from tests.tensor_parallel.specs import DENSE, models, weights
from tests.thorough import tries
from workbench.engine.config import EngineConfig
from workbench.engine.runner import Runner
from workbench.executors.capabilities import unsupported
from workbench.executors.programs import inductor
from workbench.executors.requirements import Requirements
from workbench.model.spec import ModelSpec
from workbench.model.transformer import Transformer
from workbench.request import Request, SamplingParameters

problem = backend_problems()[Backend.INDUCTOR]
pytestmark = pytest.mark.skipif(problem is not None, reason=f"backend inductor: {problem}")
GREEDY = SamplingParameters(temperature=0, max_tokens=4, ignore_eos=True)


def rows_of(runner: Runner, *lengths: int) -> Rows:
    prompts = (tuple((3 * place + length) % 23 for place in range(length)) for length in lengths)
    return recorded.rows_of(runner, [Request(f"r{i}", prompt, GREEDY) for i, prompt in enumerate(prompts)])


def is_near(found: Rows, exact: Transformer, plain: Transformer) -> bool:
    """Return whether all rows are within the bound of rounding of those of `exact`, given one process's, `plain`."""
    texts = list(found)
    right, own = (torch.stack([model.logits(text)[-1] for text in texts]) for model in (exact, plain))
    return bool((torch.stack(list(found.values())) - right).abs().max() <= allowed(own, right))


@settings(max_examples=tries(40))
@given(st.sampled_from([2, 4]).flatmap(lambda size: st.tuples(st.just(size), models(size))))
def test_blocks_on_ranks_give_the_logits_of_one_process(shared: tuple[int, ModelSpec]) -> None:
    """As Python, which is what Inductor compiles: every model that the table allows."""
    size, spec = shared
    assume(unsupported(Backend.INDUCTOR, Requirements(spec, ranks=size)) is None)
    state = weights(spec, torch.float32)
    given: dict[str, Any] = {"page_size": 4, "pages": 40, "max_num_batched_tokens": 9}
    with pytest.MonkeyPatch.context() as patch:
        for module in (inductor, paged_inductor):
            patch.setattr(module, "compile_once", lambda function, **_: function)
        with runner_of_ranks(spec, state, DENSE, size, Backend.INDUCTOR, **given) as runner:
            found = rows_of(runner, 3, 7, 12)
    exact = Transformer.from_state(spec, {name: tensor.double() for name, tensor in state.items()})
    assert is_near(found, exact, Transformer.from_state(spec, state))


@pytest.mark.processes
@pytest.mark.timeout(limit(400))
def test_ranks_compile_their_blocks() -> None:
    """Each rank does, with the sums over ranks in the graphs. One number of rows, since each takes many seconds."""
    runner = Runner(
        EngineConfig.build("shape:tiny", backend="inductor", dtype="float32", tensor=2, pages=8, rank_timeout=limit(60))
    )
    try:
        executor: Any = runner.core.executor
        found = rows_of(runner, 7)
        assert executor.compiles >= 4  # a decode, the two sides of a prefill's attention, and the head
    finally:
        runner.close()
    exact, plain = (
        Runner(EngineConfig.build("shape:tiny", backend="eager", dtype=dtype)).model for dtype in ("float64", "float32")
    )
    assert is_near(found, exact, plain)
