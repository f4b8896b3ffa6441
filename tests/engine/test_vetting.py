"""Blocks that `auto` did not compile beforehand: where they fail that is told, and the step is right all the same."""

from __future__ import annotations

import pytest
import torch

from compiled_kernels import Lane, LaneError
from tests.engine.tiny import layer, model_of, spec_of
from workbench.engine.exact import Held, decode_of_one
from workbench.engine.executors import EagerExecutor
from workbench.engine.vetting import Vetted
from workbench.errors import WorkbenchError


class Broken(EagerExecutor):
    """Writes half of what it should, then fails."""

    def __init__(self, model, store, error: Exception):
        super().__init__(model, store)
        self.error, self.calls = error, 0

    def forward(self, plan):
        self.calls += 1
        super().forward(plan)
        for each in self.store.layers:
            each.keys.mul_(0.5)  # pyright: ignore[reportAttributeAccessIssue]  # the cache here is dense
        raise self.error


def made():
    model = model_of(spec_of(layer(4, 2)))
    held = Held(model.cache_shapes(), 4, model.dtype)
    return model, *decode_of_one(model, held, 1)


def test_what_does_not_compile_is_told_and_runs_as_written() -> None:
    model, store, plan = made()
    expected = EagerExecutor(model, store).forward(plan).clone()
    broken = Broken(model, store, RuntimeError("no\n compiler"))
    broken.store = decode_of_one(model, Held(model.cache_shapes(), 4, model.dtype), 1)[0]
    vetted = Vetted(model, broken, lambda: EagerExecutor(model, store))
    with pytest.warns(UserWarning, match="prefill on eager .RuntimeError: no compiler."):
        assert torch.equal(vetted.forward(plan), expected)
    assert torch.equal(vetted.forward(plan), expected) and broken.calls == 1, "from then on nothing is compiled"
    assert model.lane is Lane.EAGER or all(
        part.lane is Lane.EAGER for part in model.modules() if "lane" in vars(part) and part is not model
    )


@pytest.mark.parametrize("error", [WorkbenchError("not this"), LaneError("nor that")])
def test_what_is_refused_stays_refused(error: Exception) -> None:
    model, store, plan = made()
    with pytest.raises(type(error)):
        Vetted(model, Broken(model, store, error), lambda: EagerExecutor(model, store)).forward(plan)


def test_later_failures_are_not_the_compilers() -> None:
    model, store, plan = made()
    vetted = Vetted(model, EagerExecutor(model, store), lambda: EagerExecutor(model, store))
    vetted.forward(plan)
    vetted.executor = Broken(model, store, RuntimeError("a fault of its own"))
    with pytest.raises(RuntimeError, match="a fault of its own"):
        vetted.forward(plan)
