"""Derive numbers of attention, with heads that are normed, clipped, rotated, gated, or shared with another layer."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from compiled_kernels.masks import is_normalized
from workbench.inspect.derivation import Derivation, DerivationTerm
from workbench.inspect.number_place import NumberPlace, norm_factors, norm_products, product_terms
from workbench.model.layers import HEAD_COLUMNS, Attention, HeadRMSNorm
from workbench.model.mixer import AttentionMixer
from workbench.model.mla import MLA
from workbench.model.rotary import rotary_of_layer

Products = list[tuple[str, tuple[float, ...]]]  # a name and factors


def attention_of(at: NumberPlace) -> Attention:
    return at.part("attention", Attention)


def _mixer(at: NumberPlace) -> AttentionMixer:
    return at.part("attention", AttentionMixer)


def of_projected(at: NumberPlace) -> Derivation:
    return at.product(attention_of(at).qkv, at.attention_input(), "normed")


def of_queries(at: NumberPlace) -> Derivation:
    return _head(at, 0, attention_of(at).query_norm) if at.has("projected") else _custom(at)


def of_keys(at: NumberPlace) -> Derivation:
    return _head(at, _first_key_head(at), attention_of(at).key_norm) if at.has("projected") else _custom(at)


def of_values(at: NumberPlace) -> Derivation:
    if not at.has("projected"):
        return _custom(at)
    attention, spec = attention_of(at), attention_of(at).spec
    head, dim = divmod(at.column, spec.head_dim)
    head += _first_key_head(at) + spec.num_kv_heads
    row, place = at.row_of("projected").unflatten(-1, (-1, spec.head_dim))[head], head * spec.head_dim + dim
    formula = f"column {place} of the projection"
    if attention.value_norm is not None:
        ((_, factors),) = _clipped([(f"dim {dim}", each) for each in norm_products(attention.value_norm, row, dim)],
                                   spec.qkv_clip)  # fmt: skip
        return at.explain(f"{formula}, over the size of its head", norm_factors(attention.value_norm),
                          (DerivationTerm(f"dim {dim}", factors),))  # fmt: skip
    ((name, factors),) = _clipped([("value", (float(row[dim]),))], spec.qkv_clip)
    return at.explain(formula, ("value",), (DerivationTerm(name, factors),))


def of_gates(at: NumberPlace) -> Derivation:
    attention = attention_of(at)
    place = attention.spec.num_heads * attention.spec.head_dim + at.column
    return at.copied(f"column {place} of the projection", "value", float(at.row_of("projected")[place]))


def of_scores(at: NumberPlace) -> Derivation:
    if math.isnan(at.value):
        return at.explain("a key that this query does not see", note="after it, or outside its window")
    query = at.row_of("queries").unflatten(-1, (_mixer(at).spec.num_heads, -1))[at.head]
    key = _of_kv_head(at, "keys")[at.column]
    return at.explain(
        f"query of token {at.row} times key of token {at.column}, times the scale", ("query", "key", "scale"),
        product_terms("dim", query, key, torch.full_like(key, float(_mixer(at).scale))),
    )  # fmt: skip


def of_weights(at: NumberPlace) -> Derivation:
    scores = at.stage("scores")[at.head, at.row].double()
    seen = ~scores.isnan()
    if not seen[at.column]:
        return at.explain("a key that this query does not see", note="its weight is zero")
    attention = _mixer(at)
    scores = scores[seen]
    if attention.spec.softcap:
        scores = attention.spec.softcap * torch.tanh(scores / attention.spec.softcap)
    if attention.score is not None:
        head = torch.tensor(at.head).view(1, 1, 1, 1)
        keys = torch.arange(len(seen))[seen].view(1, 1, 1, -1)
        scores = attention.score(scores.view(1, 1, 1, -1), head, torch.tensor(at.row).view(1, 1, 1, 1), keys).flatten()
    sinks = [] if attention.sink_logits is None else [float(attention.sink_logits[at.head])]
    return _of_softmax(at, scores, int(seen[: at.column].sum()), sinks)


def of_heads(at: NumberPlace) -> Derivation:
    if not at.has("weights"):
        return _custom(at)
    spec = _mixer(at).spec
    head, dim = divmod(at.column, at.stage("heads").shape[-1] // spec.num_heads)
    weights, column = at.stage("weights")[head, at.row], _of_kv_head(at, "values", head)[:, dim]
    formula, names = f"head {head}: the values of all tokens in this column, by their weights", ("weight", "value")
    if not at.has("gates"):
        return at.explain(formula, names, product_terms("token", weights, column))
    gate = torch.sigmoid(at.row_of("gates")[at.column].double())
    terms = product_terms("token", weights, column, torch.full_like(weights, float(gate), dtype=torch.float64))
    return at.explain(f"{formula}, times the sigmoid of the gate", (*names, "sigmoid(gate)"), terms)


def of_attention(at: NumberPlace) -> Derivation:
    if isinstance(at.block.attention, MLA):
        return at.product(at.block.attention.output, at.row_of("head_values"), "head value")
    return at.product(attention_of(at).output, at.row_of("heads"), "heads") if at.has("projected") else _custom(at)


def rotated(at: NumberPlace, before: list[Products], dim: int, partner: int, pair: int, sign: float) -> Products:
    """Return the products that sum to a column of a head after rotary embedding: those of column `dim` times the cosine
    of the pair's angle, and those of column `partner` times `sign` times the sine.
    """
    cos, sin = angles(at)
    turned = [(name, (*factors, float(cos[pair]))) for name, factors in before[dim]]
    return turned + [(name, (*factors, sign * float(sin[pair]))) for name, factors in before[partner]]


def angles(at: NumberPlace) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of the rotary angles at the row's position: [head_dim / 2] each."""
    model = at.found.model
    table = model.rotary[model.rotary_of_block[at.in_layer] or 0]
    place = torch.tensor([at.row], device=model.device)
    cos, sin = table(place, torch.full_like(place, len(at.found.token_ids)))
    return cos[0], sin[0]


def _head(at: NumberPlace, first_head: int, norm: nn.Module | None) -> Derivation:
    """Derive a column of a query or key; `first_head` is the index of the first query or key head in the projection."""
    spec = attention_of(at).spec
    size, half = spec.head_dim, spec.head_dim // 2
    head, dim = divmod(at.column, size)
    rotary = rotary_of_layer(at.found.model.spec, spec) is not None
    is_late = spec.qk_norm is not None and spec.qk_norm.after_rotary
    count = spec.num_heads if first_head == 0 else spec.num_kv_heads
    heads = at.row_of("projected").unflatten(-1, (-1, size))[first_head : first_head + count]
    pair, partner, sign = dim % half, (dim + half) % size, -1.0 if dim < half else 1.0
    words = [*([] if norm is None else ["normed"]), *(["rotated by the angle of its position"] if rotary else [])]
    formula = f"head {head}: " + ", ".join(words[::-1] if is_late else words or ["as projected"])
    names = () if norm is None else norm_factors(norm)[1:]
    value = "value" if norm is None else norm_factors(norm)[0]
    rotation = ("cos or ±sin",) if rotary else ()
    if is_late and norm is not None:
        turned = _rotated_heads(at, heads) if rotary else heads.double()
        return _explained(at, formula, (value, *names), _normed_column(norm, turned, head, dim))
    columns = [dim, partner] if rotary else [dim]
    before: list[Products] = [[]] * size
    for each in columns:
        plain: Products = [(f"dim {each}", (float(heads[head, each]),))]
        before[each] = _clipped(plain if norm is None else _normed_column(norm, heads, head, each), spec.qkv_clip)
    made = rotated(at, before, dim, partner, pair, sign) if rotary else before[dim]
    return _explained(at, formula, (value, *names, *rotation), made)


def _explained(at: NumberPlace, formula: str, factors: tuple[str, ...], products: Products) -> Derivation:
    return at.explain(formula, factors, [DerivationTerm(name, each) for name, each in products])


def _normed_column(norm: nn.Module, heads: Tensor, head: int, dim: int) -> Products:
    """Return the products of a column of a head [head, head_dim] that is normed alone or together with all heads."""
    if isinstance(norm, HeadRMSNorm) and norm.columns == HEAD_COLUMNS["projection"]:
        products = norm_products(norm, heads.flatten(), head * heads.shape[1] + dim)
    else:
        products = norm_products(norm, heads[head], dim, head)
    return [(f"dim {dim}" if not n else f"bias of dim {dim}", each) for n, each in enumerate(products)]


def _rotated_heads(at: NumberPlace, heads: Tensor) -> Tensor:
    """Return heads [head, head_dim] of this row, rotated, in float64."""
    cos, sin = angles(at)
    first, second = heads.double().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _clipped(products: Products, limit: float) -> Products:
    """Return products unchanged, or only the limit if their sum exceeds it."""
    total = math.fsum(math.prod(factors) for _, factors in products)
    if not limit or abs(total) <= limit:
        return products
    return [("clipped", (math.copysign(limit, total), *[1.0] * (len(products[0][1]) - 1)))]


def _first_key_head(at: NumberPlace) -> int:
    """Return the index of the first key head in the projection, after the queries and their gates."""
    return attention_of(at).spec.num_heads * (1 + attention_of(at).spec.output_gate)


def _of_kv_head(at: NumberPlace, name: str, head: int | None = None) -> Tensor:
    """Return the keys or values [token, head_dim] that a query head reads, of this layer or of the layer that it
    shares.
    """
    model = at.found.model
    attention, layer = model.spec.layers[at.in_layer].attention, at.in_layer
    source = layer if attention.kv_shared_with is None else attention.kv_shared_with
    heads = at.found.values(name, source).unflatten(-1, (attention.num_kv_heads, -1))
    return heads[:, (at.head if head is None else head) // attention.queries_per_kv]


def _of_softmax(at: NumberPlace, scores: Tensor, place: int, others: list[float]) -> Derivation:
    """Derive an attention weight: the softmax of scores, with `others` added to its denominator, or only exp(score)."""
    exact = torch.cat([scores, scores.new_tensor(others)])
    best = float(exact.max())
    above, total = math.exp(float(scores[place]) - best), float((exact - best).exp().sum())
    name, changed = f"key {at.column}", _changes(at)
    formula = f"exp(score{changed}), over the sum of {len(scores)} of them{', and of a sink' if others else ''}"
    if not is_normalized(_mixer(at).score):
        return at.explain(f"exp(score{changed}), of no softmax", ("exp(score)",),
                          (DerivationTerm(name, (math.exp(float(scores[place])),)),))  # fmt: skip
    return at.explain(formula, ("exp(score − largest)", "1 / sum"), (DerivationTerm(name, (above, 1 / total)),))


def _changes(at: NumberPlace) -> str:
    spec = _mixer(at).spec
    capped = f"capped at {spec.softcap:g}" if spec.softcap else ""
    changed = "changed by position" if _mixer(at).score is not None else ""
    return "".join(f", {each}" for each in (capped, changed) if each)


def _custom(at: NumberPlace) -> Derivation:
    return at.explain("by a custom attention module", note="its own code is not followed")
