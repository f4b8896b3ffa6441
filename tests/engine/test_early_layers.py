"""Filters that combine the logits of early layers: they see what the model cut after those layers would give."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import workbench
from compiled_kernels import Backend
from tests.engine.poison import MODEL, Poison, asked
from tests.engine.tiny import layer, model_of, request, runner_of, spec_of, with_filter
from tests.helpers.events import of
from tests.thorough import tries
from workbench.custom import temporarily_registered
from workbench.engine.runner import Runner, generate
from workbench.errors import WorkbenchError
from workbench.executors.select import Backends, why_no_early_layers
from workbench.model.transformer import ModulesOf, Transformer
from workbench.oracle import naive
from workbench.request import SamplingParameters
from workbench.sampling.filters import History
from workbench.trace.events import Finished


@dataclass
class Noted:
    """A combiner that subtracts a share of the last early logits, and keeps what it was given, by the tokens before."""

    share: float = 0.0

    layers: tuple[int, ...] = (0, 1)
    seen: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    def __call__(self, logits: Tensor, histories: Sequence[History], early: Tensor) -> Tensor:
        for row, history in enumerate(histories):
            self.seen[(*history.prompt_ids, *history.output_ids)] = early[:, row].clone()
        return logits - self.share * early[-1]


def cut(model: Transformer, layers: int) -> Transformer:
    """The model that ends after so many layers."""
    made = copy.deepcopy(model)
    made.spec = made.spec.model_copy(update={"layers": made.spec.layers[:layers]})
    made.blocks = ModulesOf(list(made.blocks)[:layers])
    return made


@settings(max_examples=tries(12))
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 9), st.integers(1, 6), st.booleans()), min_size=1,
                max_size=4), st.integers(3, 16), st.integers(8, 24))  # fmt: skip
def test_they_are_those_of_the_model_that_ends_there(prompts: list, chunk: int, pages: int) -> None:
    """In any batch, in chunks, after cached prefixes and preemptions, beside requests without such a filter; and the
    tokens are those of the equation."""
    noted, shorter = Noted(0.5), cut(MODEL, 1)
    runner = runner_of(MODEL, pages=pages, max_num_batched_tokens=chunk, prefix="radix")
    Poison(runner)
    with temporarily_registered(noted) as path:
        plain = [asked(f"r{i}", *each[:3]) for i, each in enumerate(prompts)]
        requests = [with_filter(each, path) if it[3] else each for each, it in zip(plain, prompts, strict=True)]
        done = generate(runner, requests)
    for ids, (embedded, early) in noted.seen.items():
        expected = naive.logits(shorter, torch.tensor(ids))[-1]
        torch.testing.assert_close(early, expected.float(), rtol=1e-4, atol=1e-4)
        states = MODEL.embed(torch.tensor(ids[-1:]))
        torch.testing.assert_close(embedded, MODEL.compute_logits(states)[0], rtol=1e-4, atol=1e-4)
    for each, (*_, filtered) in zip(plain, prompts, strict=True):
        ids = list(each.prompt_ids)
        for token in done[each.request_id].token_ids:
            row, early = (naive.logits(model, torch.tensor(ids))[-1] for model in (MODEL, shorter))
            assert token == int((row - 0.5 * filtered * early).argmax())
            ids.append(token)
        assert len(ids) == len(each.prompt_ids) + each.sampling.max_tokens


@pytest.mark.parametrize("backend", [Backend.INDUCTOR, Backend.MLIR])
def test_backends_give_the_same(backend: Backend, as_written: None) -> None:
    spec = spec_of(layer(2, 1, 16), layer(2, 1, 16)).model_copy(update={"hidden_size": 32})
    found: list[dict] = []
    for each in (Backend.EAGER, backend):
        noted = Noted()
        with temporarily_registered(noted) as path:
            runner = runner_of(model_of(spec, backend=each))
            done = generate(runner, [with_filter(request("a", 5, 6), path), with_filter(request("b", 9, 6), path)])
        assert {end.reason for end in done.values()} == {"length"}
        found.append(noted.seen)
    assert found[0].keys() == found[1].keys()
    for ids, rows in found[0].items():
        torch.testing.assert_close(found[1][ids], rows, rtol=1e-3, atol=1e-3)


def test_the_compiled_step_of_auto_lets_blocks_give_them() -> None:
    noted = Noted(layers=(2, 4))
    runner = workbench.load("demo")
    with temporarily_registered(noted) as path:
        plain, seen = (
            [e.token_ids for e in of(Finished, runner.stream("def f(", max_tokens=8, temperature=0, filters=filters))]
            for filters in ([], [{"path": path}])
        )
    assert plain == seen and len(noted.seen) == 8
    for ids, rows in noted.seen.items():
        exact = torch.stack([naive.logits(cut(runner.model, n), torch.tensor(ids))[-1] for n in (2, 4)])
        assert (rows.argmax(-1) == exact.argmax(-1)).all() and (rows - exact).abs().max() < 0.1 * exact.abs().max()


def refusal(runner: Runner, path: str) -> str:
    done = generate(runner, [with_filter(request("a", 5, 4), path), request("b", 5, 4)])
    assert done["b"].reason == "length" and done["a"].reason == "refused"
    return done["a"].error


def test_what_cannot_be_is_refused_with_the_reason() -> None:
    with temporarily_registered(Noted()) as path:
        backends = Backends(Backend.MLIR, Backend.MLIR, Backend.MLIR, "batch_invariant")
        runner = runner_of(model_of(spec_of(), backend=Backend.EAGER), backends=backends)
        assert why_no_early_layers(backends, False, 1) is None
        assert "each rank has the head for its own tokens" in str(why_no_early_layers(backends, False, 2))
        problem = why_no_early_layers(backends, True, 1)
        early = replace(runner.core.decoder.early_logits, problem=problem)
        runner.core.decoder.early_logits = early
        assert "'mlir' cannot give the logits that its filter combines" in refusal(runner, path)
        sampling = SamplingParameters.model_validate({"filters": [{"path": path}]})
        with pytest.raises(WorkbenchError, match="combines these logits with others"):
            workbench.trace_filters(torch.zeros(31), History(), sampling)
