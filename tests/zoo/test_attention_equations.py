"""Equations of the zoo's attention, written out plainly, and the limits in which they become something known."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from einops import einsum, rearrange
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import workbench
from tests.zoo.loaded import part_of
from workbench.claims.technique import load_zoo
from workbench.model.attention_spec import RotaryConfig, RotaryScaling
from workbench.model.rotary import RotaryTable, rotary_frequencies
from workbench.parts import SlidingWindow
from workbench.testing.attention_scenarios import AttentionScenario
from workbench.trace.events import Submitted

QUERY, KEY = torch.arange(200)[:, None], torch.arange(200)[None]
HEADS = torch.arange(4)[:, None, None]
LATER = torch.arange(900, 1000)[:, None]  # queries, as in a chunk of a long text
PLAIN = AttentionScenario(seed=3, num_kv_heads=2, queries_per_kv=2, head_dim=8, lengths=(9,), max_num_batched_tokens=4,
                          page_size=4)  # fmt: skip


def shown(name: str, head: int | None = None, **arguments: Any) -> Tensor:
    mask = part_of(name, **arguments)
    return mask(QUERY, KEY) if head is None else mask(QUERY, KEY, torch.tensor(head))


def one_by_one(rule: Callable[[int, int], bool]) -> Tensor:
    """Ask a rule in plain Python about each pair of query and key."""
    return torch.tensor([[key <= query and rule(query, key) for key in range(200)] for query in range(200)])


# %% Masks against the paper's rule, pair by pair, and their limits.


@settings(max_examples=12, derandomize=True)
@given(window=st.integers(1, 40) | st.just(200), step=st.integers(1, 9))
def test_a_dilated_window_is_every_dth_token_of_a_window(window: int, step: int) -> None:
    right = one_by_one(lambda q, k: (q - k) % step == 0 and (q - k) // step < window)
    near = SlidingWindow(window)(QUERY, KEY)
    for head, pattern in ((3, right), (1, near)):
        assert torch.equal(shown("dilated", head, window=window, step=step, plain=2), pattern)


@settings(max_examples=8, derandomize=True)
@given(st.integers(1, 20), st.integers(1, 4) | st.just(200), st.integers(0, 3), st.integers(0, 3))
def test_bigbird_sees_a_window_the_first_and_drawn_blocks(block: int, window: int, first: int, draws: int) -> None:
    def rule(query: int, key: int) -> bool:
        mine, other = query // block, key // block
        drawn = {((101 * mine + 57 * draw + 31) % 8191) % (mine + 1) for draw in range(draws)}
        return mine - other < window or other < first or other in drawn

    assert torch.equal(shown("bigbird", block=block, window=window, first=first, random=draws), one_by_one(rule))


def test_bigbird_draws_other_blocks_for_other_queries() -> None:
    """Of 60 late blocks of queries, each with 2 draws, more than 40 different earlier blocks are drawn."""
    mask = part_of("bigbird", block=1, window=1, first=0, random=2)
    seen = mask(torch.arange(60, 120)[:, None], torch.arange(120)[None])
    assert int(seen.any(0)[:60].sum()) > 40 and bool((seen.sum(1) <= 3).all())


@settings(max_examples=8, derandomize=True)
@given(stride=st.integers(1, 60), columns=st.integers(0, 9))
def test_sparse_transformers_patterns(stride: int, columns: int) -> None:
    fixed = one_by_one(lambda q, k: q // stride == k // stride or k % stride in range(stride - columns, stride))
    assert torch.equal(shown("sparse_transformer", stride=stride, columns=columns), fixed)
    strided = one_by_one(lambda q, k: q - k < stride or (q - k) % stride == 0)
    assert torch.equal(shown("sparse_transformer", stride=stride, pattern="strided"), strided)
    with pytest.raises(workbench.WorkbenchError, match="pattern 'diagonal': write fixed or strided"):
        part_of("sparse_transformer", pattern="diagonal")


@settings(max_examples=8, derandomize=True)
@given(window=st.integers(1, 70) | st.just(200))
def test_log_sparse_sees_powers_of_two(window: int) -> None:
    right = one_by_one(lambda q, k: q - k < window or (q - k).bit_count() == 1)
    assert torch.equal(shown("log_sparse", window=window), right)
    mask = part_of("log_sparse", window=window)
    far = mask(LATER, torch.arange(1000)[None]).sum(1)
    assert int(far.max()) <= window + math.ceil(math.log2(1000))


# %% Scores: what is put in the place of a score.


SCORES = torch.randn(4, 200, 200, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
DISTANCE = (QUERY - KEY).clamp(min=0).double()
POWERS = {  # of each key, before all are divided by their sum
    ("scalable_softmax", "s", 0.3): (QUERY + 1.0) ** (0.3 * SCORES),  # n^(s z)
    ("kerple", "r2", 0.25): SCORES.exp() * (1 + 0.25 * DISTANCE) ** -1.5,
}


def scored(name: str, **arguments: Any) -> Tensor:
    return part_of(name, **arguments)(SCORES, HEADS, QUERY, KEY)


@pytest.mark.parametrize(("name", "argument", "value"), POWERS)
def test_scores_are_powers_of_the_number_of_keys_and_of_the_distance(name: str, argument: str, value: float) -> None:
    powers = torch.where(KEY <= QUERY, POWERS[name, argument, value], 0.0)
    found = scored(name, **{argument: value} | ({"r1": 1.5} if name == "kerple" else {}))
    weights = torch.where(KEY <= QUERY, found, -torch.inf).softmax(-1)
    torch.testing.assert_close(weights, powers / powers.sum(-1, keepdim=True), rtol=1e-9, atol=1e-12)


def test_scores_are_unchanged_in_their_limits() -> None:
    torch.testing.assert_close(scored("scalable_softmax", s=1 / math.log(100))[:, 99], SCORES[:, 99])
    torch.testing.assert_close(scored("kerple", r1=0.0), SCORES)


def logits(attention: dict[str, Any], text: range = range(9)) -> Tensor:
    """Return the logits of a tiny model in float64 with random weights."""
    return PLAIN.model(attention).logits(list(text))


def test_a_softcap_by_score_is_the_softcap_by_setting() -> None:
    part = {"path": "experiments/zoo/tanh_softcap.py:TanhSoftcap", "arguments": {"cap": 0.05}}
    torch.testing.assert_close(logits({"score": part}), logits({"softcap": 0.05}), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(logits({}), logits({"softcap": 0.05}))
    wide = {**part, "arguments": {"cap": 1e8}}
    torch.testing.assert_close(logits({"score": wide}), logits({}), rtol=1e-9, atol=1e-9)


# %% Softmax off by one, and modules: a layer of the tiny model against its equation.


def projected(module: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return rotated q, k and v [token, head, ...] of a layer, with a key and a value for each query head."""
    cos, sin = RotaryTable(RotaryConfig(), 8, 8)(torch.arange(len(x)))
    q, k, v = module.qkv_proj(x, cos, sin)
    return q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)


def mapped(q: Tensor, k: Tensor, scale: float, extra: float = 0.0) -> Tensor:
    """Return softmax(scale q k^T) with `extra` added to its sum: [head, token, context]."""
    scores = einsum(q, k, "token head dim, context head dim -> head token context") * scale
    powers = torch.where(torch.ones(len(q), len(q)).tril().bool(), scores.exp(), 0.0)
    return powers / (powers.sum(-1, keepdim=True) + extra)


def mixed(weights: Tensor, v: Tensor) -> Tensor:
    return einsum(weights, v, "head token context, context head dim -> token head dim")


def in_model(model: Any, right: Callable[[Any, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Return what the first layer's attention gives within the model, and what `right` says of its input."""
    module, seen = model.blocks[0].attention, {}
    project, project_back = module.qkv_proj, module.o_proj

    def qkv_proj(x: Tensor, *angles: Tensor) -> Any:
        seen["x"] = x
        return project(x, *angles)

    def o_proj(result: Tensor) -> Tensor:
        seen["result"] = result
        return project_back(result)

    module.qkv_proj, module.o_proj = qkv_proj, o_proj
    model.logits(list(range(9)))
    module.qkv_proj = project
    return seen["result"], right(module, seen["x"])


def test_a_sink_logit_of_zero_is_the_softmax_off_by_one() -> None:
    def right(module: Any, x: Tensor) -> Tensor:
        q, k, v = projected(module, x)
        return mixed(mapped(q, k, 8**-0.5, extra=1.0), v)

    runner = workbench.load("demo", attention={"sink_logits": True}, backend="eager", pages=4)
    demo: Any = runner.model
    sinks = [block.attention.sink_logits for block in demo.blocks]
    assert all(each is not None and bool((each == 0).all()) for each in sinks), "a trained model's begin at 0"
    model: Any = PLAIN.model({"sink_logits": True})
    for block in model.blocks:
        block.attention.sink_logits.data.zero_()
    torch.testing.assert_close(*in_model(model, right), rtol=1e-9, atol=1e-12)


def module(name: str, **arguments: Any) -> Any:
    path = load_zoo()[name].settings.use["attention.module"]["path"]
    return PLAIN.model({"module": {"path": path, "arguments": arguments}})


@pytest.mark.parametrize(("lam", "norm"), [(0.8, True), (0.3, False), (0.0, False)])
def test_differential_attention_is_the_difference_of_two_maps(lam: float, norm: bool) -> None:
    def right(module: Any, x: Tensor) -> Tensor:
        q, k, v = projected(module, x)
        # Rotary turns columns i and i + 4 together: pairs 0 and 2 are one half, 1 and 3 the other.
        first, second = ([0, 2, 4, 6], [1, 3, 5, 7])
        maps = mapped(q[..., first], k[..., first], 4**-0.5) - lam * mapped(q[..., second], k[..., second], 4**-0.5)
        out = mixed(maps, v)
        if norm:
            out = (1 - lam) * out / (out.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return out

    torch.testing.assert_close(*in_model(module("differential", lam=lam, norm=norm), right), rtol=1e-5, atol=1e-6)


def test_gated_attention_is_multiplied_by_a_sigmoid_of_the_input() -> None:
    model = module("gated_attention", bias=0.5)
    gate = torch.randn(32, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    model.blocks[0].attention.gate.data.copy_(gate)

    def right(module: Any, x: Tensor) -> Tensor:
        cos, sin = RotaryTable(RotaryConfig(), 8, 8)(torch.arange(len(x)))
        q, k, v = module.qkv_proj(x, cos, sin)
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        opened = rearrange((x @ gate.T + 0.5).sigmoid(), "token (head dim) -> token head dim", dim=8)
        return mixed(mapped(q[..., :8], k, 8**-0.5), v) * opened

    torch.testing.assert_close(*in_model(model, right), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(logits_of(module("gated_attention", bias=60.0)), logits({}), rtol=1e-9, atol=1e-9)


def logits_of(model: Any) -> Tensor:
    return model.logits(list(range(9)))


# %% Rotary: frequencies by the paper's equation, and what does not scale.

LONG = {name: entry for name, entry in load_zoo().items() if entry.settings.model.get("context") == 2048}


def rotary_of(name: str, **scaling: Any) -> RotaryConfig:
    rotary = RotaryConfig.model_validate(LONG[name].settings.use["attention.rotary"])
    return rotary.model_copy(update={"scaling": RotaryScaling.model_validate(dict(rotary.scaling) | scaling)})


def plain_frequencies(base: float = 10_000.0) -> Tensor:
    return base ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)


def test_frequencies_are_those_of_the_papers() -> None:
    plain = plain_frequencies()
    turns = 1024 * plain / (2 * math.pi)
    torch.testing.assert_close(rotary_frequencies(rotary_of("position_interpolation"), 64), plain / 2)
    aware = plain_frequencies(10_000 * 2 ** (64 / 62))
    torch.testing.assert_close(rotary_frequencies(rotary_of("ntk_aware"), 64), aware, rtol=1e-5, atol=0)
    torch.testing.assert_close(rotary_frequencies(rotary_of("dynamic_ntk"), 64, 2048), aware)
    torch.testing.assert_close(rotary_frequencies(rotary_of("dynamic_ntk"), 64, 1024), plain)
    kept = ((turns - 1) / 3).clamp(0, 1)
    torch.testing.assert_close(rotary_frequencies(rotary_of("llama3_rope"), 64), kept * plain + (1 - kept) * plain / 2)
    yarn = rotary_frequencies(rotary_of("yarn"), 64)
    torch.testing.assert_close(yarn[turns > 40], plain[turns > 40])
    torch.testing.assert_close(yarn[turns < 0.8], plain[turns < 0.8] / 2)
    assert bool(((yarn >= plain / 2 - 1e-15) & (yarn <= plain + 1e-15)).all())
    assert abs(rotary_of("yarn").scaling.attention_factor - (0.1 * math.log(2) + 1)) < 1e-4


@pytest.mark.parametrize("name", ["position_interpolation", "llama3_rope", "yarn"])
def test_a_factor_of_one_scales_nothing(name: str) -> None:
    torch.testing.assert_close(rotary_frequencies(rotary_of(name, factor=1.0), 64), plain_frequencies())


def test_a_longer_context_is_a_setting_of_the_model() -> None:
    for name, entry in LONG.items():
        model: dict[str, Any] = {"name": "demo", **entry.settings.model}
        attention = {"rotary": entry.settings.use["attention.rotary"]}
        runner = workbench.load(model, attention=attention, backend="eager", pages=40, max_num_batched_tokens=2048)
        assert runner.model.spec.max_position_embeddings == 2048, name
    text = "x = 1\n" * 300
    submitted, *rest = runner.stream(text, max_tokens=2, temperature=0, ignore_eos=True)
    assert (
        isinstance(submitted, Submitted) and submitted.prompt_tokens == 1500 and "".join(event.text for event in rest)
    )
    short = workbench.load("demo", backend="eager", pages=40)
    with pytest.raises(workbench.WorkbenchError, match="1,?024"):
        list(short.stream(text, max_tokens=2))


# %% Layers that share keys and values: what a cache holds.


@pytest.mark.parametrize(
    ("name", "share"), [("cross_layer_kv", 0.5), ("grouped_query", 0.5), ("decoder_decoder", None)]
)
def test_what_the_cache_holds(name: str, share: float | None) -> None:
    use = load_zoo()[name].settings.use
    attention = {key.removeprefix("attention."): value for key, value in use.items()}
    runner = workbench.load("demo", attention=attention, backend="eager", pages=4)
    spec = runner.model.spec
    caching = [index for index, kind in enumerate(spec.layers) if kind.attention.kv_shared_with is None]
    if share is None:
        assert caching == [0, 1, 2] and [kind.attention.kv_shared_with for kind in spec.layers[3:]] == [2, 2, 2]
        assert [kind.attention.sliding_window for kind in spec.layers] == [256, 256, None, None, None, None]
        return
    whole = workbench.load("demo", backend="eager", pages=4)
    assert runner.store.bytes == share * whole.store.bytes
