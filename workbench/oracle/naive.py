"""The oracle: compute one text without cache, batch, pages or backend. It is slow, and short enough to read in one go.

It shares only the weights with the model; user-defined attention is called on whole texts.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from einops import einsum, rearrange
from torch import Tensor

from compiled_kernels import Backend
from compiled_kernels.attention import AttentionParameters, SpanContext, attend
from compiled_kernels.linear.int8_activations import int8_problem, rounded_to_int8
from compiled_kernels.linear.matrix_format import MatrixFormat
from workbench.batch import TokenBatch
from workbench.custom import load_custom
from workbench.errors import WorkbenchError
from workbench.model.attention_spec import AnyAttentionSpec, AttentionSpec, MLASpec, RotaryConfig
from workbench.model.layers import build_custom_attention
from workbench.model.quantized import WeightFormat
from workbench.model.recurrent.spec import ParallelRecurrentSpec, RecurrentSpec
from workbench.model.rotary import build_rotary_table, rotary_frequencies, rotary_of_layer
from workbench.model.spec import ActivationSpec, LayerSpec, ModelSpec, MoESpec, NormSpec  # fmt: skip
from workbench.model.transformer import Transformer
from workbench.oracle.altup import NaiveStreams
from workbench.oracle.recurrent import run_recurrent

KeysAndValues = tuple[Tensor, Tensor] | None  # [token, kv_head, head_dim] each


class Weights(dict[str, Tensor]):
    """A model's dequantized weights by name, with the formats in which the model stores them."""

    format = WeightFormat()

    def entering(self, x: Tensor, matrix: MatrixFormat) -> Tensor:
        """Return the rows `x` as a product with a matrix of this format uses them: rounded to INT8 if the format has
        INT8 activations, else unchanged.
        """
        if self.format.activations == "float" or int8_problem(matrix.codes, matrix.group, x.shape[1]):
            return x
        return rounded_to_int8(x, by_row=not matrix.group)

    def product(self, x: Tensor, name: str) -> Tensor:
        """Return x @ matrix.T for the matrix `name`, whose rows may have different formats."""
        rows = self.format.rows_of(name, tuple(self[name].shape))
        parts = zip(self[name].split([count for count, _ in rows]), rows, strict=True)
        return torch.cat([self.entering(x, format) @ part.T for part, (_, format) in parts], -1)


@torch.inference_mode()
def logits(model: Transformer, ids: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the logits [token, vocab] of every position for ids [token], computed in `dtype` (default: the model's
    own).
    """
    spec = model.spec
    w = Weights(model.dense_state(dtype or model.dtype))
    w.format = model.format
    x = w["embedding.weight"][ids]
    if spec.embedding_scale != 1:  # the scale is rounded to the model's dtype, as in the model
        x = x * torch.tensor(spec.embedding_scale, dtype=model.dtype).to(x.dtype)
    if spec.learned_positions is not None:
        x = x + w["positions.weight"][torch.arange(len(ids)) + spec.learned_positions]
    if spec.embedding_norm:
        x = _norm(x, w, "embedding_norm", spec.norm)
    streams = None
    if spec.altup is not None:
        by_name = lambda rows, name: _linear(rows, w, name), lambda rows, name: _norm(rows, w, name, spec.norm)
        streams = NaiveStreams(x, ids, w, spec, spec.altup, *by_name, model.dtype)
    cached: list[KeysAndValues] = []  # keys and values of each layer so far
    for index, kind in enumerate(spec.layers):
        at = f"blocks.{index}."
        x = x if streams is None else streams.enter(at)
        h = _norm(x, w, at + "attention_norm", spec.norm) if kind.norms != "post" else x
        read = (
            _attention(h, w, at + "attention.", kind.attention, spec, cached)
            if kind.beside is None
            else _both(h, w, at, kind, kind.beside, spec, cached)
        )
        read = _norm(read, w, at + "attention_post_norm", spec.norm) if kind.norms != "pre" else read
        added = x + spec.residual_scale * read
        added = added if streams is None else streams.beside_attention(added, h, at)
        if not kind.intermediate_size:
            x = added
            continue
        if kind.parallel == "no":
            h = _norm(added, w, at + "feedforward_norm", spec.norm) if kind.norms != "post" else added
        elif kind.parallel == "two_norms":
            h = _norm(x, w, at + "feedforward_norm", spec.norm)
        made = (_feedforward if kind.experts is None else _mixture)(h, w, at + "feedforward.", kind)
        made = _norm(made, w, at + "feedforward_post_norm", spec.norm) if kind.norms != "pre" else made
        x = added + spec.residual_scale * kind.feedforward_scale * made
        if streams is not None:
            streams.leave(x, at, _gelu)
    x = _norm(x if streams is None else streams.hidden(), w, "norm", spec.norm)
    logits = w.entering(x, model.format.head) @ w["embedding.weight" if spec.tie_word_embeddings else "head.weight"].T
    logits = spec.logit_scale * (logits + w["head.bias"] if spec.head_bias else logits)
    return (
        spec.final_logit_softcapping * torch.tanh(logits / spec.final_logit_softcapping)
        if spec.final_logit_softcapping
        else logits
    )


def _attention(
    h: Tensor, w: Weights, at: str, a: AnyAttentionSpec, spec: ModelSpec, cached: list[KeysAndValues]
) -> Tensor:
    """Return the attention output for the normed rows `h` [token, hidden] of a whole text: [token, hidden]. Appends its
    keys and values to `cached`, after those of earlier layers; None for MLA, recurrent and custom layers.
    """
    if isinstance(a, AttentionSpec) and a.module is None:
        return _grouped(h, w, at, a, spec, cached)
    cached.append(None)
    if isinstance(a, MLASpec):
        return _latent(h, w, at, a, a.rotary or spec.rotary)
    if isinstance(a, RecurrentSpec):
        return run_recurrent(h, w, at, a, lambda rows, name: _linear(rows, w, at + name))
    return _own(h, w, at, a, spec)


def _grouped(h: Tensor, w: Weights, at: str, a: AttentionSpec, spec: ModelSpec, cached: list[KeysAndValues]) -> Tensor:
    qkv = rearrange(_linear(h, w, at + "qkv"), "token (head dim) -> token head dim", dim=a.head_dim)
    q = _placed(qkv[:, : a.num_heads], w, at + "query_norm", a, spec)
    if a.kv_shared_with is None:
        k, v = qkv[:, -2 * a.num_kv_heads :].chunk(2, dim=1)
        v = _norm(v, w, "", spec.norm) if a.value_norm else v
        cached.append((_placed(k, w, at + "key_norm", a, spec), _clamped(v, a)))
    else:
        cached.append(cached[a.kv_shared_with])
    assert cached[-1] is not None, "layers can share only the keys and values of grouped attention"
    k, v = cached[-1]
    shown = None if a.pages is None else _chosen_pages(q, k, a)
    k, v = (
        heads.repeat_interleave(a.num_heads // a.num_kv_heads, dim=1) for heads in (k, v)
    )  # one key head per query head
    scores = einsum(q, k, "token head dim, context head dim -> head token context") * (a.scale or a.head_dim**-0.5)
    sinks = w[at + "sink_logits"] if a.sink_logits else None
    weights = _weights(scores, a, sinks, shown).to(v.dtype)
    mixed = einsum(weights, v, "head token context, context head dim -> token head dim")
    if a.output_gate:
        mixed = mixed * qkv[:, a.num_heads : 2 * a.num_heads].sigmoid()
    return _linear(rearrange(mixed, "token head dim -> token (head dim)"), w, at + "output")


def _both(
    h: Tensor, w: Weights, at: str, kind: LayerSpec, beside: ParallelRecurrentSpec, spec: ModelSpec,
    cached: list[KeysAndValues],
) -> Tensor:  # fmt: skip
    """Return the sum of attention and the recurrent layer parallel to it."""
    attended = _attention(beside.attention_input_scale * h, w, at + "attention.", kind.attention, spec, cached)
    entering, at = beside.recurrent_input_scale * h, at + "recurrent."
    state = run_recurrent(entering, w, at, beside.recurrent, lambda rows, name: _linear(rows, w, at + name))
    return beside.attention_output_scale * attended + beside.recurrent_output_scale * state


def _placed(heads: Tensor, w: Weights, norm: str, a: AttentionSpec, spec: ModelSpec) -> Tensor:
    """Norm, clamp and rotate queries or keys [token, head, head_dim]."""
    if a.qk_norm is not None and not a.qk_norm.after_rotary:
        heads = _normed_heads(heads, w, norm, a, spec)
    heads = _clamped(heads, a)
    if a.position == "rotary":
        heads = _turn(heads, a.rotary or spec.rotary, a.rotary_dim)
    return _normed_heads(heads, w, norm, a, spec) if a.qk_norm is not None and a.qk_norm.after_rotary else heads


def _clamped(heads: Tensor, a: AttentionSpec) -> Tensor:
    return heads.clamp(-a.qkv_clip, a.qkv_clip) if a.qkv_clip else heads


def _normed_heads(heads: Tensor, w: Weights, at: str, a: AttentionSpec, spec: ModelSpec) -> Tensor:
    """Norm queries or keys [token, head, head_dim] by head, or all columns of a token together."""
    assert a.qk_norm is not None
    if a.qk_norm.over == "projection":
        rows = _norm(rearrange(heads, "token head dim -> token (head dim)"), w, at, spec.norm)
        return rearrange(rows, "token (head dim) -> token head dim", dim=a.head_dim)
    return _norm(heads, w, at, spec.norm)


def _latent(h: Tensor, w: Weights, at: str, a: MLASpec, rotary: RotaryConfig) -> Tensor:
    """Return the output of multi-head latent attention as published: keys and values of every head are computed from
    the latents (DeepSeek-V2, 2024, section 2.1)."""
    query, latent, key = _linear(h, w, at + "down").split(
        [a.down_proj_columns - a.head_dim, a.kv_lora_rank, a.qk_rope_head_dim], dim=-1
    )
    if a.q_lora_rank is not None:
        query = _linear(_norm(query, w, at + "query_norm", NormSpec(eps=a.rms_norm_eps)), w, at + "query_up")
    query = rearrange(query, "token (head dim) -> token head dim", head=a.num_heads)
    latent = _norm(latent, w, at + "latent_norm", NormSpec(eps=a.rms_norm_eps))
    made = einsum(latent, w[at + "up"], "token latent, head row latent -> token head row")
    plain_key, value = made.split([a.qk_nope_head_dim, a.v_head_dim], dim=-1)
    plain, turned = query.split([a.qk_nope_head_dim, a.qk_rope_head_dim], dim=-1)
    turned, key = (_turn(vectors, rotary, a.rotary_dim, a.rope_interleave) for vectors in (turned, key[:, None]))
    scores = einsum(plain, plain_key, "token head dim, context head dim -> head token context")
    scores = scores + einsum(turned, key[:, 0], "token head dim, context dim -> head token context")
    scale = (a.qk_nope_head_dim + a.qk_rope_head_dim) ** -0.5 if a.scale is None else a.scale
    mixed = einsum(_weights(scores * scale, a, None), value, "head token context, context head dim -> token head dim")
    return _linear(rearrange(mixed, "token head dim -> token (head dim)"), w, at + "output")


def _chosen_pages(q: Tensor, k: Tensor, a: AttentionSpec) -> Tensor:
    """Return which positions queries see in their selected pages [head, token, context], selecting page by page."""
    assert a.pages is not None
    rule, reduced = load_custom(a.pages), {"min": torch.amin, "max": torch.amax, "mean": torch.mean}
    size, first, share = getattr(rule, "page_size", 64), getattr(rule, "first", 0), a.num_heads // a.num_kv_heads
    seen = torch.zeros(a.num_heads, len(q), len(k), dtype=torch.bool)
    for token in range(len(q)):
        own_page = token // size
        for group in range(a.num_kv_heads):
            heads, chosen = slice(group * share, (group + 1) * share), []
            for page in range(first, own_page):
                keys = k[page * size : (page + 1) * size, group]
                summaries = [reduced[kind](keys, dim=0) for kind in rule.summaries]
                chosen.append((-max(float(rule(query, *summaries).sum()) for query in q[token, heads]), page))
            best = {page for _, page in sorted(chosen)[: rule.keep]}
            for page in best | set(range(min(first, own_page))) | {own_page}:
                seen[heads, token, page * size : (page + 1) * size] = True
    return seen


def _weights(scores: Tensor, a: AttentionSpec | MLASpec, sinks: Tensor | None, shown: Tensor | None = None) -> Tensor:
    """Turn scaled scores [head, token, context] into weights; unseen positions get 0, all of them if a query sees none.
    """
    heads, tokens, _ = scores.shape
    if a.softcap:
        scores = a.softcap * (scores / a.softcap).tanh()
    head, query, key = torch.meshgrid(torch.arange(heads), torch.arange(tokens), torch.arange(tokens), indexing="ij")
    far = query - key
    if a.position == "alibi":
        scores = scores - torch.tensor(_slopes(heads), dtype=scores.dtype)[:, None, None] * far
    if isinstance(a, AttentionSpec) and a.temperature is not None:
        steps = torch.floor((query + a.temperature.offset) / a.temperature.floor)
        scores = scores * (1 + a.temperature.strength * torch.log(1 + steps.to(scores.dtype)))
    if a.score is not None:
        scores = load_custom(a.score)(scores, head, query, key)
    seen = far >= 0
    if a.sliding_window is not None:
        seen &= (far < a.sliding_window) | (key < a.num_sink_tokens)
    if isinstance(a, AttentionSpec) and a.chunk_size is not None:
        seen &= key >= query - query % a.chunk_size
    if a.mask is not None:
        seen &= _shown(load_custom(a.mask), query, key, head)
    scores = scores.masked_fill(~seen if shown is None else ~(seen & shown), -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype)[:, None, None].expand(-1, tokens, 1)], dim=-1)
    if a.score is not None and not getattr(load_custom(a.score), "normalized", True):
        return scores.exp()
    blind = (scores[..., :tokens] == -torch.inf).all(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(blind, 0.0), dim=-1)[..., :tokens].masked_fill(blind, 0.0)


def _shown(mask: Any, query: Tensor, key: Tensor, head: Tensor) -> Tensor:
    """Call a user-defined mask, with the head if it has that parameter."""
    by_head = list(inspect.signature(mask).parameters)[2:3] == ["head"]
    return mask(query, key, head) if by_head else mask(query, key)


def _slopes(heads: int) -> list[float]:
    """Return ALiBi's slopes by the formula of its authors."""
    if heads & (heads - 1) == 0:
        return [2.0 ** (-8.0 * n / heads) for n in range(1, heads + 1)]
    below = 2 ** (heads.bit_length() - 1)
    return _slopes(below) + _slopes(2 * below)[::2][: heads - below]


class _WholeText:
    """A stand-in for a cache: keys and values of one whole text, in order, without pages or backend."""

    def write(self, k: Tensor, v: Tensor, batch: object, backend: object) -> None:
        self.k, self.v = k, v

    def attend(self, q: Tensor, batch: object, parameters: AttentionParameters, backend: object) -> Tensor:
        return attend(q, SpanContext.whole(self.k, self.v, len(q)), parameters)


def _own(h: Tensor, w: Weights, at: str, a: AttentionSpec, spec: ModelSpec) -> Tensor:
    """Return the output of a custom attention module, called with a plain cache and a plain batch."""
    if w.format.activations == "int8":
        raise WorkbenchError("activations: int8 with a custom attention module: the oracle does not compute it")
    module: Any = build_custom_attention(a, spec.hidden_size, Backend.EAGER, WeightFormat(), spec.norm, h.dtype)
    weights = {name.removeprefix(at): values for name, values in w.items() if name.startswith(at)}
    module.load_state_dict(weights, strict=False)
    cos = sin = None
    if turn := rotary_of_layer(spec, a):
        at_positions = torch.arange(len(h)), torch.full((len(h),), len(h))
        cos, sin = (table.to(h.dtype) for table in build_rotary_table(turn)(*at_positions))
    q, k, v = module.qkv_proj(h, cos, sin)
    cache, rows = _WholeText(), torch.arange(len(h))
    batch = TokenBatch(rows, rows, torch.tensor([0, len(h)]), torch.tensor([len(h)]), (), (), rows, False)
    cache.write(k, v, batch, Backend.EAGER)
    return module.o_proj(module.attend(q, batch, cache, Backend.EAGER))  # type: ignore[arg-type] (a layer's two verbs)


def greedy(model: Transformer, prompt_ids: list[int], max_tokens: int, dtype: torch.dtype | None = None) -> list[int]:
    """Return the first `max_tokens` tokens of the greedy continuation, recomputing the whole text for each."""
    ids = list(prompt_ids)
    for _ in range(max_tokens):
        ids.append(int(logits(model, torch.tensor(ids), dtype)[-1].argmax()))
    return ids[len(prompt_ids) :]


def _feedforward(h: Tensor, w: Weights, at: str, kind: LayerSpec) -> Tensor:
    if not kind.activation.gated:
        up = _linear(h, w, at + "up")
        made = _xielu(up, w, at) if kind.activation.kind == "xielu" else _activated(up, kind.activation)
        return _linear(made, w, at + "down")
    gate, up = _linear(h, w, at + "gate_up").chunk(2, dim=-1)
    gate = kind.activation.gate_scale * gate
    if kind.activation.sparsity:
        quantile = math.sqrt(2) * torch.special.erfinv(torch.tensor(2 * kind.activation.sparsity - 1).double()).item()
        mean = gate.mean(-1, keepdim=True)
        gate = (gate - mean - quantile * (gate - mean).square().mean(-1, keepdim=True).sqrt()).clamp(min=0)
    return _linear(_gated(gate, up, kind.activation), w, at + "down")


def _mixture(h: Tensor, w: Weights, at: str, kind: LayerSpec) -> Tensor:
    """Run each token through its experts, one token after another."""
    assert kind.experts is not None
    rows = []
    for token, logits in zip(h, _linear(h, w, at + "router"), strict=True):
        made = torch.zeros_like(token)
        for number, weight in _chosen(logits, w.get(at + "router.selection_bias"), kind.experts):
            enters = weight * token if kind.experts.router.weighs_input else token
            gate_up, down = w[at + "gate_up"][number] @ enters, w[at + "down"][number]
            if kind.mlp_bias:
                gate_up = gate_up + w[at + "gate_up_bias"][number]
            gate, up = gate_up.chunk(2)
            out = down @ _gated(gate, up, kind.activation)
            out = out + w[at + "down_bias"][number] if kind.mlp_bias else out
            made = made + (out if kind.experts.router.weighs_input else weight * out)
        rows.append(made)
    total = torch.stack(rows)
    if kind.experts.shared_intermediate_size:
        shared = _feedforward(h, w, at + "shared.", kind)
        total = total + (torch.sigmoid(_linear(h, w, at + "shared_gate")) if kind.experts.shared_gate else 1) * shared
    return total


def _chosen(logits: Tensor, bias: Tensor | None, experts: MoESpec) -> list[tuple[int, Tensor]]:
    """Return the experts of one token, and their weights."""
    router = experts.router
    if router.score == "sparsemixer":
        return _mixed(logits, experts)
    scores = {"logit": lambda: logits, "softmax": lambda: logits.softmax(-1), "sigmoid": logits.sigmoid}[router.score]()
    ranked = scores if bias is None else scores + bias
    size = experts.num_experts // router.groups
    if router.groups > 1:
        best = [group.sort().values[-2 if router.group_score == "top2" else -1 :].sum() for group in ranked.split(size)]
        groups = sorted(range(router.groups), key=lambda group: -best[group].item())[: router.kept_groups]
        ranked = torch.where(torch.isin(torch.arange(len(ranked)) // size, torch.tensor(groups)), ranked, -torch.inf)
    numbers = ranked.topk(experts.num_experts_per_tok).indices
    weights = scores[numbers]
    weights = weights.softmax(-1) if router.softmax_chosen else weights
    weights = weights / (weights.sum() + 1e-20) if router.renormalize else weights
    return list(zip(numbers.tolist(), router.factor * weights, strict=True))


def _mixed(logits: Tensor, experts: MoESpec) -> list[tuple[int, Tensor]]:
    """Choose experts one after another as SparseMixer does; an expert's weight is its softmax among the remaining
    experts with a close logit.
    """
    chosen, left = [], set(range(len(logits)))
    for _ in range(experts.num_experts_per_tok):
        best = max(left, key=lambda number: logits[number].item())
        close = [
            each for each in left
            if (logits[best] - logits[each]) / max(logits[each].abs(), logits[best]) <= 2 * experts.router.jitter
        ]  # fmt: skip
        chosen.append((best, experts.router.factor * (logits[best] - logits[close].logsumexp(0)).exp()))
        left.remove(best)
    return chosen


def _gated(gate: Tensor, up: Tensor, kind: ActivationSpec) -> Tensor:
    if kind.kind != "clamped":
        return _activated(gate, kind) * up
    gate, up = gate.clamp(max=kind.limit), up.clamp(-kind.limit, kind.limit)
    return gate * torch.sigmoid(kind.alpha * gate) * (up + 1)


def _activated(x: Tensor, kind: ActivationSpec) -> Tensor:
    if kind.kind == "silu":
        return torch.nn.functional.silu(x)
    if kind.kind == "gelu":
        return x * 0.5 * torch.special.erfc(-x / math.sqrt(2))
    if kind.kind == "gelu_tanh":
        return _gelu(x)
    return x.clamp(min=0) ** (2 if kind.kind == "relu2" else 1)


def _xielu(x: Tensor, w: Weights, at: str) -> Tensor:
    """Compute xIELU: quadratic above 0, exponential below (Huang and Schlag, 2024, equation 6)."""
    positive, negative, beta, eps = (w[f"{at}activation.{name}"] for name in ("alpha_p", "alpha_n", "beta", "eps"))
    above = torch.log1p(positive.exp()) * x**2
    below = (beta + torch.log1p(negative.exp())) * (torch.expm1(torch.minimum(x, eps)) - x)
    return torch.where(x > 0, above, below) + beta * x


def _gelu(x: Tensor) -> Tensor:
    """Compute GELU's tanh approximation, x / 2 (1 + tanh z) (Hendrycks and Gimpel, 2016), with 1 + tanh z computed as 2
    / (1 + exp(-2 z)).

    Far below 0 the sum 1 + tanh z loses all its digits, in torch's function too; an oracle must be accurate there.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    z = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)
    return (wide / (1 + torch.exp(-2 * z))).to(x.dtype)


def _norm(x: Tensor, w: Weights, name: str, norm: NormSpec) -> Tensor:
    """Norm the last axis, with the weights and bias that `w` has."""
    x = x - x.mean(-1, keepdim=True) if norm.kind == "layer" else x
    x = x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    x = x * (w[name + ".weight"] + norm.offset) if name + ".weight" in w else x
    return x + w[name + ".bias"] if name + ".bias" in w else x


def _linear(x: Tensor, w: Weights, name: str) -> Tensor:
    out = w.product(x, name + ".weight")
    return out + w[name + ".bias"] if name + ".bias" in w else out


def _turn(x: Tensor, rotary: RotaryConfig, rotated: int, interleaved: bool = False) -> Tensor:
    """Rotate x [token, head, head_dim], each pair by its position's angle.

    Pairs are (i, i + head_dim / 2); partly rotated heads rotate their first pairs.
    """
    angles = torch.outer(torch.arange(len(x)).double(), rotary_frequencies(rotary, rotated, len(x)))[:, None]
    factor, long_factor = rotary.scaling.attention_factor, rotary.scaling.long_attention_factor
    factor = long_factor if long_factor is not None and rotary.scaling.length_class(len(x)) else factor
    cos, sin = (factor * angle.to(x.dtype) for angle in (angles.cos(), angles.sin()))
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    (a, first), (b, second) = ((half[..., : rotated // 2], half[..., rotated // 2 :]) for half in (first, second))
    return torch.cat([a * cos - b * sin, first, b * cos + a * sin, second], dim=-1)
