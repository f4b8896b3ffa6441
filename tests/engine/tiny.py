"""Tiny models and the oracle's verdict on a step."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from hypothesis import strategies as st
from torch import Tensor

from compiled_kernels import Backend
from compiled_kernels.linear.int8_activations import quantize_rows
from tests.helpers.recorded import Around
from workbench.engine.config import EngineConfig
from workbench.engine.loaded_model import LoadedModel
from workbench.engine.runner import Runner, generate
from workbench.executors.programs.eager import EagerProgram
from workbench.kv_cache.store import KVStore
from workbench.model.attention_spec import AttentionSpec, QKNormSpec, RotaryConfig
from workbench.model.hf.weights import random_weights
from workbench.model.spec import LayerSpec, ModelSpec, MoESpec, RouterSpec
from workbench.model.transformer import Transformer
from workbench.oracle import naive
from workbench.request import CustomPart, Request, SamplingParameters, random_token_ids

VOCAB, CONTEXT = 31, 48
RUNNER_ARGUMENTS = ("page_orders", "listener", "clock", "sleep")


def layer(
    heads: int = 2, groups: int = 1, dim: int = 4, sliding_window: int | None = None, bias: bool = False, **slots
) -> LayerSpec:
    sizes = {"num_heads": heads, "num_kv_heads": groups, "head_dim": dim, "sliding_window": sliding_window}
    attention = AttentionSpec(**sizes, qkv_bias=bias, o_proj_bias=bias, **slots)
    return LayerSpec(attention=attention, intermediate_size=12, mlp_bias=bias)


def mixture_of(
    experts: int = 6, chosen: int = 2, router: RouterSpec | None = None, layers: int = 2, **attention: Any
) -> ModelSpec:
    """A model of mixtures, as wide as the compiled step wants them; norms of queries and keys are over all heads."""
    slots = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "qk_norm": QKNormSpec(over="projection")} | attention
    mixture = MoESpec(num_experts=experts, num_experts_per_tok=chosen, router=router or RouterSpec())
    kind = LayerSpec(attention=AttentionSpec(**slots), intermediate_size=64, experts=mixture)
    return spec_of(*[kind] * layers).model_copy(update={"name": "mixture", "hidden_size": 64})


def spec_of(*layers: LayerSpec, tied: bool = True, eos_token_ids: tuple[int, ...] = ()) -> ModelSpec:
    kinds = layers or (layer(), layer())
    return ModelSpec(
        name="tiny",
        vocab_size=VOCAB,
        hidden_size=8,
        layers=kinds,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=tied,
        eos_token_ids=eos_token_ids,
    )


def in_eights(spec: ModelSpec) -> ModelSpec:
    """Return a model whose feed-forwards have whole words of INT4."""
    sizes = (kind.intermediate_size + -kind.intermediate_size % 8 for kind in spec.layers)
    kinds = zip(spec.layers, sizes, strict=True)
    layers = tuple(kind.model_copy(update={"intermediate_size": size}) for kind, size in kinds)
    return spec.model_copy(update={"layers": layers})


class Whole(EagerProgram):
    """A user's program that computes all steps."""


class Kept:
    """A user's choice of pages: the one whose keys look the most like the query, on average."""

    keep, page_size, first = 1, 64, 0
    summaries = ("mean",)

    def __call__(self, query: Tensor, mean: Tensor) -> Tensor:
        return query * mean


class Halved:
    """A cache codec."""

    def encode(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (rows.half(),)

    def decode(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.float()


class HalvedGroups(Halved):
    """A cache codec of groups of tokens."""

    group = 8


def even(query: Tensor, key: Tensor) -> Tensor:
    """A user's mask: every other key, and the query's own."""
    return (key <= query) & ((key % 2 == 0) | (key == query))


def shy(query: Tensor, key: Tensor) -> Tensor:
    """A user's mask under which every third query sees nothing."""
    return (key <= query) & (query % 3 != 0)


def farther(score: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A user's score function: heads after the first see keys that are far away the better."""
    return score + 0.1 * head * (query - key)


HERE = "tests.engine.tiny:"
# What every decode backend can say, and what masks and score functions of one's own add to it.
SLOTS = {
    "softcap": st.sampled_from([0.0, 0.0, 1.5]),
    "scale": st.sampled_from([None, None, 0.3]),
    "qk_norm": st.booleans(),
    "position": st.sampled_from(["rotary", "rotary", "none"]),
    "rotary": st.sampled_from([None, None, RotaryConfig(rope_theta=50.0)]),
    "sink_logits": st.booleans(),
}
OWN = {
    "position": st.sampled_from(["rotary", "alibi", "none"]),
    "mask": st.sampled_from([None, None, CustomPart(path=HERE + "even"), CustomPart(path=HERE + "shy")]),
    "score": st.sampled_from([None, None, CustomPart(path=HERE + "farther")]),
}


@st.composite
def layers(draw: st.DrawFn, own: bool = False) -> LayerSpec:
    groups, window = draw(st.integers(1, 2)), draw(st.sampled_from([None, None, 3, 9]))
    slots = {name: draw(values) for name, values in (SLOTS | OWN if own else SLOTS).items()}
    sinks = draw(st.integers(0, 3)) if window else 0
    heads, dim, bias = groups * draw(st.integers(1, 3)), draw(st.sampled_from([2, 6])), draw(st.booleans())
    return layer(heads, groups, dim, window, bias, num_sink_tokens=sinks, **slots)


def _specs(own: bool) -> st.SearchStrategy[ModelSpec]:
    kinds = st.lists(layers(own), min_size=1, max_size=3)
    return st.builds(lambda kinds, tied: spec_of(*kinds, tied=tied), kinds, st.booleans())


specs, own_specs = _specs(own=False), _specs(own=True)


def model_of(
    spec: ModelSpec, seed: int = 0, backend: Backend = Backend.EAGER, dtype: torch.dtype = torch.float32
) -> Transformer:
    return Transformer.from_state(spec, weights_of(spec, dtype, seed), backend)


def weights_of(spec: ModelSpec, dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
    """Random weights whose norms are not all ones, which would hide that one of them is left out."""
    state = random_weights(spec, dtype, seed)
    generator = torch.Generator().manual_seed(seed)
    for name, values in state.items():
        if name.endswith("norm.weight"):
            values.copy_(1 + 0.3 * torch.randn(values.shape, generator=generator))
    return state


def runner_of(model: Transformer, **settings) -> Runner:
    """A runner whose unwritten cache is NaN, the null page included."""
    given = {name: settings.pop(name) for name in RUNNER_ARGUMENTS if name in settings}
    loaded = LoadedModel(model, settings.pop("tokenizer", None), settings.pop("backends", None))
    speculator = settings.pop("speculator", None)
    if settings.get("offload") == "memory":  # of the default gigabyte tiny pages are millions, a list of each
        settings["offload"] = {"kind": "memory", "bytes": 2**20}
    sizes = {"page_size": 4, "pages": 40, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    runner = Runner(EngineConfig.build(**{**sizes, **settings}), loaded, **given)
    runner.core.set_speculator(speculator)
    poison(runner)
    return runner


def poison(runner: Runner) -> None:
    for table in range(len(runner.store.groups)):
        for tensor in runner.store.page_tensors(table):
            tensor.view(torch.uint8).fill_(255)  # NaN in every type of float


def request(name: str, prompt: int, most: int, **sampling) -> Request:
    ids = random_token_ids(random.Random(name), VOCAB, prompt)
    return Request(name, ids, SamplingParameters(max_tokens=most, ignore_eos=True, **{"temperature": 0, **sampling}))


def with_filter(made: Request, path: str) -> Request:
    """Return a request with a filter of a user's own."""
    return replace(made, sampling=made.sampling.model_copy(update={"filters": (CustomPart(path=path),)}))


def in_step(*prompts: int, tokens: int = 4) -> list[Request]:
    """Requests that decode together from the first step to the last, where that has room for all their prompts: a
    backend that compiles for each number of rows compiles once, for rows and a row of padding."""
    return [request(f"r{i}", length, tokens) for i, length in enumerate(prompts)]


def every_tensor(store: KVStore) -> list[Tensor]:
    """All that the pages of a store hold, each once: its first axis is the pages of one table."""
    return [tensor for table in range(len(store.groups)) for tensor in store.page_tensors(table)]


def finals(runner, requests) -> dict[str, tuple[int, ...]]:
    return {name: event.token_ids for name, event in generate(runner, requests).items()}


class Objection(BaseException):
    """Not an Exception: the runner turns those into the end of a request."""


class Oracle(Around):
    """Stands in for a runner's executor and holds every sampled row against the oracle in float64.

    The bound is derived: four times the error that the plain computation makes in the same precision, plus
    a rounding term. `margins` keeps, for each row, whether the first choice stands clear of the second.
    """

    def __init__(self, runner: Runner):
        super().__init__(runner)
        self.model, self.clear = runner.model, list[bool]()

    def forward(self, plan) -> Tensor:
        texts = [
            [*span.sequence.token_ids, *span.draft_token_ids[:place]]
            for span in plan.spans
            for place in range(len(span.draft_token_ids) + 1)
            if span.needs_sample
        ]
        try:
            rows = self.inner.forward(plan)
        except Exception as error:  # the runner would end the requests with it, and the test would go on
            raise Objection(f"the step failed: {type(error).__name__}: {error}") from error
        assert rows.shape[0] == len(texts)
        for row, text in zip(rows, texts, strict=True):
            exact, bound = expected(self.model, text)
            error = (row.double() - exact).abs().max().item()
            if error > bound:  # seldom: only then is it worth asking how far rounding is carried here
                bound += carried(self.model, text, exact)
            if error > bound and self.model.format.activations == "int8":
                exact, error = nearest_coding(self.model, text, row)
            if not error <= bound:
                raise Objection(f"a row is {error} away from the oracle's, {bound} is allowed")
            best = exact.topk(2).values
            clear = bool(best[0] - best[1] > 2 * bound)
            self.clear.append(clear)
            if clear and int(row.argmax()) != int(exact.argmax()):
                raise Objection("another token where the oracle's margin is clear")
        return rows


def expected(model: Transformer, text: list[int]) -> tuple[Tensor, float]:
    """The last row of the oracle in float64, and how far another way of computing it may be away.

    For a model in float64 the plain computation is the oracle, whose own error counts as the row's: test_oracle.py."""
    ids = torch.tensor(text)
    exact = naive.logits(model, ids, torch.float64)[-1]
    plain = naive.logits(model, ids)[-1]
    rounding = 8 * torch.finfo(model.dtype).eps * (1 + exact.abs().max().item())
    return exact, 4 * (plain.double() - exact).abs().max().item() + rounding


TIE = 2e-5  # of a code: a number so near the middle of two may be either's, after some roundings of float32
MAX_TIES = 4


def nearest_coding(model: Transformer, text: list[int], row: Tensor) -> tuple[Tensor, float]:
    """Return the oracle's last row that is nearest to `row`, and how far it is away.

    Numbers that lie between two INT8 codes, `MAX_TIES` at most, may have been given either."""
    ties: list[tuple[int, tuple[int, ...]]] = []  # (call of quantize_rows, place in its values)
    calls, flipped = itertools.count(), set[tuple[int, tuple[int, ...]]]()

    def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
        (values, scales), call = quantize_rows(x), next(calls)
        exact = x / scales[:, None]
        beyond = exact - values  # from -0.5 to 0.5
        for place in (beyond.abs() > 0.5 - TIE).nonzero().tolist():
            tie = call, tuple(place)
            if tie in flipped:
                values[tie[1]] += int(beyond[tie[1]].sign())
            elif not flipped:
                ties.append(tie)
        return values, scales

    def last_row(*some: tuple[int, tuple[int, ...]]) -> Tensor:
        nonlocal calls
        calls = itertools.count()
        flipped.clear()
        flipped.update(some)
        return naive.logits(model, torch.tensor(text), torch.float64)[-1]

    with mock.patch.object(naive, "quantize_rows", quantize):
        rows = [last_row()]
        assert len(ties) <= MAX_TIES, f"{len(ties)} numbers between two codes excuse anything"
        known = list(ties)
        subsets = (some for count in range(len(known)) for some in itertools.combinations(known, count + 1))
        rows += [last_row(*some) for some in subsets]
    return min(((each, (row.double() - each).abs().max().item()) for each in rows), key=lambda found: found[1])


class _Nudged:
    """A model whose weights are one rounding away, up or down."""

    def __init__(self, model: Transformer, seed: int):
        self.model, self.seed = model, seed
        self.spec, self.dtype, self.format = model.spec, model.dtype, model.format

    def dense_state(self, dtype: torch.dtype) -> dict[str, Tensor]:
        generator, eps = torch.Generator().manual_seed(self.seed), torch.finfo(self.dtype).eps
        return {
            name: values * (1 + eps * (2 * torch.rand(values.shape, generator=generator, dtype=dtype) - 1))
            for name, values in self.model.dense_state(dtype).items()
        }


def carried(model: Transformer, text: list[int], exact: Tensor) -> float:
    """Return how far roundings of the weights move the last row: a norm of small values enlarges a rounding, and then
    the plain computation's own error, which is one draw of it, says little about another's."""
    nudged = (naive.logits(_Nudged(model, seed), torch.tensor(text), torch.float64)[-1] for seed in range(4))  # type: ignore[arg-type]
    return 4 * max((row - exact).abs().max().item() for row in nudged)
