"""Record a forward pass: every tensor between a prompt's token ids and its logits, in the order of computation.

The blocks of the running model, compiled or not, are called part by part, apart from its runner: the same weights and
operators, with keys and values in full precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from einops import einsum, rearrange, repeat
from torch import Tensor, nn

from workbench.batch import TokenBatch
from workbench.errors import WorkbenchError
from workbench.inspect.whole_text import TOKENS_PER_CHUNK, TextAttention
from workbench.kv_cache.layer import CacheLayer
from workbench.model.feedforward import GatedMLP, MixtureOfExperts, PlainMLP, apply_gate
from workbench.model.layers import Attention, TransformerBlock
from workbench.model.linear import NoNorm
from workbench.model.mixer import Angles, AttentionMixer
from workbench.model.mla import MLA
from workbench.model.spec import LayerSpec
from workbench.model.transformer import Transformer
from workbench.units import format_bytes

Record = Callable[[str, Tensor], None]
MAX_BYTES = 2**31  # maximum bytes of one recorded pass
LENS_TOKENS = 5  # number of tokens kept for each layer and position
# Descriptions of the stages of a block.
STAGES = {
    "embedding": "embedding: one row of the table for each token",
    "attention_norm": "norm: every row scaled to a like size",
    "projected": "queries, keys and values: the normed row times three matrices",
    "latents": "latents: the normed row times one matrix; queries, the latent of keys and values, the shared key",
    "query_latent": "latent of the queries, normed",
    "head_queries": "queries of each head, made of their latent",
    "queries": "queries, rotated by position",
    "keys": "keys, rotated by position",
    "values": "values",
    "gates": "gates: the sigmoid of each multiplies a column of a head",
    "scores": "scores: each query times each key it may see",
    "weights": "attention weights: the softmax of the scores",
    "heads": "heads: the sum of the values, by those weights",
    "head_values": "values of each head, made of the latents that it has read",
    "attention": "attention: the heads times the output matrix",
    "attention_post_norm": "attention, normed or scaled before it is added",
    "after_attention": "residual stream: the input plus attention",
    "feedforward_norm": "norm: every row scaled to a like size",
    "router_logits": "router: the normed row times its matrix, one number for each expert",
    "router": "router: how much each expert counts",
    "expert_gate_up": "chosen experts, one after the other: gate and up projections",
    "expert_activation": "chosen experts: the activated gate times up",
    "shared_gate_up": "shared expert: gate and up projections",
    "shared_activation": "shared expert: the activated gate times up",
    "shared_gate": "shared expert: its sigmoid multiplies what the expert gives",
    "gate_up": "feed-forward: gate and up projections",
    "up": "feed-forward: up projection",
    "activation": "feed-forward: the activated gate times up",
    "activated": "feed-forward: the activation",
    "feedforward": "feed-forward: back to the residual stream's size",
    "feedforward_post_norm": "feed-forward, normed or scaled before it is added",
    "output": "residual stream: plus the feed-forward",
    "norm": "final norm",
    "logits": "logits: the normed row times the head, one number for each token of the vocabulary",
}
CHOSEN = "chosen"  # chosen experts: not a stage, but indices of other stages' columns
BY_HEAD = ("scores", "weights")  # [head, token, context]; all others are [token, column]


@dataclass(frozen=True)
class Stage:
    """One tensor of a forward pass: `values` [token, column], or [head, token, context] for scores and weights. `layer`
    is None before the first block and after the last block.
    """

    name: str
    layer: int | None
    values: Tensor = field(repr=False)

    @property
    def meaning(self) -> str:
        return STAGES[self.name]

    @property
    def num_columns(self) -> int:
        return self.values.shape[-1]


class LensRow(NamedTuple):
    """The likeliest tokens of the logit lens at one position, best first, after each layer: their ids, their
    probabilities at that layer (`here`), and their probabilities after the last layer (`at_end`). Each is [layer + 1,
    LENS_TOKENS].
    """

    ids: Tensor
    here: Tensor
    at_end: Tensor


@dataclass(frozen=True)
class ForwardPass:
    """All stages of `token_ids` through `model`, in the order of computation. `chosen_experts` has the router's choice
    for each mixture-of-experts layer, best first: [token, chosen].
    """

    model: Transformer = field(repr=False)
    token_ids: tuple[int, ...]
    stages: tuple[Stage, ...] = field(repr=False)
    chosen_experts: Mapping[int, Tensor] = field(default_factory=dict, repr=False)
    _lenses: dict[int, LensRow] = field(default_factory=dict, repr=False, compare=False)

    def find(self, name: str, layer: int | None = None) -> Stage | None:
        """Return the stage with this name and layer, or None if this model does not have it."""
        return next((each for each in self.stages if each.name == name and each.layer == layer), None)

    def values(self, name: str, layer: int | None = None) -> Tensor:
        """Return a stage's tensor. Raises WorkbenchError if this model does not have the stage."""
        found = self.find(name, layer)
        if found is None:
            raise WorkbenchError(f"layer {layer}: there is no stage {name!r}")
        return found.values

    def residual(self, layer: int) -> Tensor:
        """Return the residual stream before block `layer`, or after the last: [token, hidden]."""
        return self.values("output", layer - 1) if layer else self.values("embedding")

    @torch.inference_mode()
    def logit_lens(self, position: int) -> Tensor:
        """Apply the output head to the residual stream at `position` before each block and after the last; return
        probabilities [layer + 1, vocab] in float64 (the logit lens, nostalgebraist, 2020).
        """
        return self.model.compute_logits(self._streams(position)).double().softmax(-1)

    @torch.inference_mode()
    def lens_rows(self, positions: Iterable[int]) -> list[LensRow]:
        """Return the likeliest tokens of the logit lens at `positions`. Results are cached.

        The output head is called once for all new positions: each call dequantizes the whole head if it is quantized.
        """
        wanted = tuple(positions)
        if new := [position for position in dict.fromkeys(wanted) if position not in self._lenses]:
            logits = self.model.compute_logits(torch.cat([self._streams(position) for position in new]))
            for position, rows in zip(new, logits.chunk(len(new)), strict=True):
                shares = rows.double().softmax(-1)
                best = shares.topk(min(LENS_TOKENS, shares.shape[-1]))
                self._lenses[position] = LensRow(best.indices, best.values, shares[-1][best.indices])
        return [self._lenses[position] for position in wanted]

    def _streams(self, position: int) -> Tensor:
        """Return the residual stream at `position` before each block and after the last: [layer + 1, hidden]."""
        return torch.stack([self.residual(layer)[position] for layer in range(len(self.model.blocks) + 1)])


@torch.inference_mode()
def record_forward_pass(model: Transformer, token_ids: Iterable[int]) -> ForwardPass:
    """Compute a prompt through `model` and record every stage.

    Raises:
        WorkbenchError: for layers with recurrent states or several residual streams, and prompts that are too long.
    """
    ids = tuple(model.validate_token_ids(token_ids).tolist())
    _refuse(model, len(ids))
    stages: list[Stage] = []
    chosen: dict[int, Tensor] = {}
    numbers = {block: number for number, block in enumerate(model.blocks)}

    def run(
        block: TransformerBlock, x: Tensor, cos: Angles, sin: Angles, batch: TokenBatch, cache: CacheLayer
    ) -> Tensor:
        layer = numbers[block]
        if not layer:
            stages.append(Stage("embedding", None, x))

        def record(name: str, values: Tensor) -> None:
            if name == CHOSEN:
                chosen[layer] = values
            else:
                stages.append(Stage(name, layer, values))

        return record_block(block, x, cos, sin, batch, cache, record)

    text = TextAttention(model, ids, run)
    for layer in range(len(model.blocks)):
        _insert_weights(stages, text, layer)
    last = text.hidden_states
    stages.append(Stage("norm", None, model.norm(last)))
    stages.append(Stage("logits", None, model.compute_logits(last)))
    return ForwardPass(model, ids, tuple(stages), chosen)


def record_block(
    block: TransformerBlock, x: Tensor, cos: Angles, sin: Angles, batch: TokenBatch, cache: CacheLayer, record: Record
) -> Tensor:
    """Compute a block part by part and record each part; return the block's output: [token, hidden]."""
    attention = block.attention
    assert isinstance(attention, AttentionMixer)  # see `refuse_recurrent_layers`
    normed = block.attention_norm(x)
    if not isinstance(block.attention_norm, NoNorm):
        record("attention_norm", normed)
    if isinstance(attention, MLA):
        _record_latents(attention, normed, record)
    elif type(attention) is Attention:  # the stages of a custom module are unknown
        record("projected", attention.qkv(normed))
    q, k, v = attention.qkv_proj(normed, cos, sin)
    gated = type(attention) is Attention and attention.spec.output_gate
    query, gate = q.chunk(2, dim=-1) if gated else (q, q[:, :0])
    for name, heads in (("queries", query), ("keys", k), ("values", v), ("gates", gate)):
        if heads.shape[1]:  # a layer that reads another layer's keys has none itself
            record(name, rearrange(heads, "token head dim -> token (head dim)"))
    mixed = attention.write_and_read((q, k, v), batch, cache)
    record("heads", rearrange(mixed, "token head dim -> token (head dim)"))
    if isinstance(attention, MLA):
        value_up = attention.up[:, attention.spec.qk_nope_head_dim :]
        made = einsum(mixed, value_up, "token head latent, head value latent -> token head value")
        record("head_values", rearrange(made, "token head value -> token (head value)"))
    out = attention.o_proj(mixed)
    record("attention", out)
    read = _post(block.attention_post_norm, block.sum_over_ranks(out), "attention_post_norm", record)
    if block.parallel != "no":
        total = x + read
        if block.parallel == "two_norms":
            normed = block.feedforward_norm(x)
            record("feedforward_norm", normed)
    else:
        total, normed = block.feedforward_norm.add_and_norm(x, read)
        record("after_attention", total)
        if not isinstance(block.feedforward_norm, NoNorm):
            record("feedforward_norm", normed)
    made = block.sum_over_ranks(_record_feedforward(block.feedforward, normed, record))
    total = total + _post(block.feedforward_post_norm, made, "feedforward_post_norm", record)
    record("output", total)
    return total


def _record_latents(attention: MLA, normed: Tensor, record: Record) -> None:
    """Record the latents and parts of the queries and keys of latent attention."""
    latents, spec = attention.down(normed), attention.spec
    record("latents", latents)
    if spec.q_lora_rank is not None:
        query = attention.query_norm(latents[:, : spec.q_lora_rank])
        record("query_latent", query)
        record("head_queries", attention.query_up(query))


def _record_feedforward(part: nn.Module, x: Tensor, record: Record) -> Tensor:
    if isinstance(part, GatedMLP):
        gate_up = part.gate_up(x)
        record("gate_up", gate_up)
        hidden = apply_gate(gate_up, part.activation, part.backend)
        record("activation", hidden)
        out = part.down(hidden)
    elif isinstance(part, PlainMLP):
        up = part.up(x)
        record("up", up)
        hidden = part.activation(up)
        record("activated", hidden)
        out = part.down(hidden)
    else:
        if isinstance(part, MixtureOfExperts):
            _record_experts(part, x, record)
        out = part(x)
    record("feedforward", out)
    return out


def _record_experts(part: MixtureOfExperts, x: Tensor, record: Record) -> None:
    """Record a mixture of experts up to its neurons: [token, neuron], expert by expert in the order of choice."""
    weights, chosen = part.router.choose(x)
    record("router_logits", part.router(x))
    record("router", weights.new_zeros(len(x), part.router.num_experts).scatter(-1, chosen, weights))
    record(CHOSEN, chosen)
    rows = repeat(x, "token width -> (token used) width", used=part.num_experts_per_tok)
    if part.weighs_input:
        rows = (rows * rearrange(weights, "token used -> (token used) 1")).to(x.dtype)
    gate_up = part.multiply("gate_up", rows, rearrange(chosen, "token used -> (token used)"))
    for name, made in (("gate_up", gate_up), ("activation", apply_gate(gate_up, part.activation, part.backend))):
        columns = rearrange(made, "(token used) width -> token (used width)", used=part.num_experts_per_tok)
        record(f"expert_{name}", columns)
    if part.shared is not None:
        gate_up = part.shared.gate_up(x)
        record("shared_gate_up", gate_up)
        record("shared_activation", apply_gate(gate_up, part.activation, part.backend))
    if part.shared_gate is not None:
        record("shared_gate", part.shared_gate(x))


def _post(norm: nn.Module, x: Tensor, name: str, record: Record) -> Tensor:
    if isinstance(norm, nn.Identity):
        return x
    out = norm(x)
    record(name, out)
    return out


def _insert_weights(stages: list[Stage], text: TextAttention, layer: int) -> None:
    """Insert a layer's scores and weights before its stage `heads`; a custom module that does not read its cache by
    `attend` has none.
    """
    kept = text.layers[layer]
    if kept.parameters is None:
        return
    weights = text.weights(layer, range(len(text.token_ids)))
    at = next(n for n, each in enumerate(stages) if each.name == "heads" and each.layer == layer)
    found = [Stage("weights", layer, weights)]
    scores = dot_products(kept.q, kept.k, kept.parameters.scale)
    found.insert(0, Stage("scores", layer, scores.masked_fill(weights == 0, torch.nan)))
    stages[at:at] = found


def dot_products(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Return scaled products of queries [token, head, head_dim] and keys [token, kv_head, head_dim]: [head, token,
    context] in float32 or wider.
    """
    exact = torch.promote_types(q.dtype, torch.float32)
    grouped = rearrange(q.to(exact), "token (group share) dim -> token group share dim", group=k.shape[1])
    found = einsum(grouped, k.to(exact), "token group share dim, context group dim -> group share token context")
    return rearrange(found * scale, "group share token context -> (group share) token context")


def _refuse(model: Transformer, tokens: int) -> None:
    spec = model.spec
    if spec.altup is not None:
        raise WorkbenchError(f"{spec.name}: a model with several residual streams cannot be followed")
    if tokens > TOKENS_PER_CHUNK:
        raise WorkbenchError(f"a prompt of {tokens} tokens: at most {TOKENS_PER_CHUNK} can be followed")
    heads = max((kind.attention.num_heads for kind in spec.layers if kind.recurrent is None), default=0)
    widest = max(map(_neurons, spec.layers))
    row = len(spec.layers) * (16 * spec.hidden_size + 3 * widest + 2 * heads * tokens) + spec.vocab_size
    if 4 * row * tokens > MAX_BYTES:
        size = format_bytes(4 * row * tokens)
        raise WorkbenchError(f"a prompt of {tokens} tokens would take {size}; follow a shorter one")


def _neurons(kind: LayerSpec) -> int:
    """Return the number of neurons of a layer that one token uses."""
    if kind.experts is None:
        return kind.intermediate_size
    return kind.intermediate_size * kind.experts.num_experts_per_tok + (kind.experts.shared_intermediate_size or 0)
