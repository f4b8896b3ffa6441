"""Tiny models and the oracle's verdict on a step."""

from __future__ import annotations

import random

import torch
from hypothesis import strategies as st
from torch import Tensor

from compiled_kernels import Lane
from workbench.engine import naive
from workbench.engine.runner import Runner, generate
from workbench.engine.scheduler import Limits
from workbench.model.spec import Attention, LayerKind, ModelSpec
from workbench.model.transformer import Transformer
from workbench.model.weights import random_weights
from workbench.request import Request, SamplingParameters

VOCAB, CONTEXT = 31, 48


def layer(heads: int = 2, groups: int = 1, dim: int = 4, window: int | None = None, bias: bool = False) -> LayerKind:
    attention = Attention(heads=heads, groups=groups, dim=dim, window=window, input_bias=bias, output_bias=bias)
    return LayerKind(attention=attention, hidden=12, feedforward_bias=bias)


def spec_of(*layers: LayerKind, tied: bool = True, end_ids: tuple[int, ...] = ()) -> ModelSpec:
    kinds = layers or (layer(), layer())
    return ModelSpec(name="tiny", vocab=VOCAB, width=8, layers=kinds, context=CONTEXT, tied=tied, end_ids=end_ids)


specs = st.builds(
    lambda kinds, tied: spec_of(*kinds, tied=tied),
    st.lists(
        st.builds(
            lambda groups, share, dim, window, bias: layer(groups * share, groups, dim, window, bias),
            st.integers(1, 2), st.integers(1, 3), st.sampled_from([2, 6]), st.sampled_from([None, None, 3, 9]),
            st.booleans(),
        ),
        min_size=1, max_size=3,
    ),
    st.booleans(),
)  # fmt: skip


def model_of(
    spec: ModelSpec, seed: int = 0, lane: Lane = Lane.EAGER, dtype: torch.dtype = torch.float32
) -> Transformer:
    return Transformer.from_state(spec, random_weights(spec, dtype, seed), lane)


def runner_of(model: Transformer, **settings) -> Runner:
    """A runner whose unwritten cache is NaN."""
    limits = Limits(settings.pop("max_num_seqs", 4), settings.pop("max_num_batched_tokens", 16))
    runner = Runner(model, limits=limits, **{"page_size": 4, "pages": 40, **settings})
    poison(runner)
    return runner


def poison(runner: Runner) -> None:
    for cache in runner.store.layers:
        cache.keys[1:], cache.values[1:] = torch.nan, torch.nan


def request(name: str, prompt: int, most: int, **sampling) -> Request:
    draw = random.Random(name)
    ids = tuple(draw.randrange(VOCAB) for _ in range(prompt))
    return Request(name, ids, SamplingParameters(max_tokens=most, ignore_eos=True, **{"temperature": 0, **sampling}))


def finals(runner, requests) -> dict[str, tuple[int, ...]]:
    return {name: event.token_ids for name, event in generate(runner, requests).items()}


class Objection(BaseException):
    """Not an Exception: the runner turns those into the end of a request."""


class Oracle:
    """Stands in for a runner's executor and holds every sampled row against the oracle in float64.

    The bound is derived: four times the error that the plain computation makes in the same precision, plus
    a rounding term. `margins` keeps, for each row, whether the first choice stands clear of the second.
    """

    def __init__(self, runner: Runner):
        self.inner, self.model = runner.executor, runner.model
        self.clear: list[bool] = []
        runner.executor = self  # type: ignore[assignment]

    @property
    def compiles(self) -> int:
        return self.inner.compiles

    @property
    def kernel_seconds(self) -> float | None:
        return self.inner.kernel_seconds

    @property
    def artifacts(self):
        return self.inner.artifacts

    def forward(self, plan) -> Tensor:
        texts = [list(span.sequence.token_ids) for span in plan.spans if span.samples]
        try:
            rows = self.inner.forward(plan)
        except Exception as error:  # the runner would end the requests with it, and the test would go on
            raise Objection(f"the step failed: {type(error).__name__}: {error}") from error
        assert rows.shape[0] == len(texts)
        for row, text in zip(rows, texts, strict=True):
            exact, bound = expected(self.model, text)
            error = (row.double() - exact).abs().max().item()
            if not error <= bound:
                raise Objection(f"a row is {error} away from the oracle's, {bound} is allowed")
            best = exact.topk(2).values
            clear = bool(best[0] - best[1] > 2 * bound)
            self.clear.append(clear)
            if clear and int(row.argmax()) != int(exact.argmax()):
                raise Objection("another token where the oracle's margin is clear")
        return rows


def expected(model: Transformer, text: list[int]) -> tuple[Tensor, float]:
    """The last row of the oracle in float64, and how far another way of computing it may be away."""
    ids = torch.tensor(text)
    exact = naive.logits(model, ids, torch.float64)[-1]
    plain = naive.logits(model, ids)[-1]
    rounding = 8 * torch.finfo(model.dtype).eps * (1 + exact.abs().max().item())
    return exact, 4 * (plain.double() - exact).abs().max().item() + rounding
