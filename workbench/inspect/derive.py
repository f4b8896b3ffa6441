"""Derive one number of a forward pass from the stage before it, as a sum of products."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from workbench.inspect.derivation import Derivation, DerivationTerm
from workbench.inspect.forward_pass import BY_HEAD, ForwardPass, Stage
from workbench.model.feedforward import GatedMLP, PlainMLP
from workbench.model.layers import Attention, ParallelBlock, TransformerBlock
from workbench.model.linear import LayerNorm, Linear, ResidualScale, RMSNorm
from workbench.model.rotary import rotary_of_layer


@torch.inference_mode()
def derive(found: ForwardPass, stage: Stage, row: int, column: int, head: int = 0) -> Derivation:
    """Derive the number in `row` and `column` of a stage; of scores and weights, of head `head`."""
    value = float(stage.values[head, row, column] if stage.name in BY_HEAD else stage.values[row, column])
    terms = _Terms(found, stage.layer, row, column, head, value)
    return getattr(terms, f"of_{stage.name}")()


class _Terms:
    """The place of one number in a pass, and a method for each kind of stage."""

    def __init__(self, found: ForwardPass, layer: int | None, row: int, column: int, head: int, value: float):
        self.found, self.model, self.spec = found, found.model, found.model.spec
        self.layer, self.row, self.column, self.head, self.value = layer, row, column, head, value

    @property
    def block(self) -> TransformerBlock:
        return cast(TransformerBlock, self.model.blocks[cast(int, self.layer)])

    def of_embedding(self) -> Derivation:
        token, spec = self.found.token_ids[self.row], self.spec
        value = float(self.model.lookup(torch.tensor([token], device=self.model.device))[0, self.column])
        formula = f"column {self.column} of row {token} of the embedding"
        if spec.embedding_norm:
            return Derivation(formula, self.value, note="normed as a whole row after that")
        terms = [DerivationTerm("table", (value, spec.embedding_scale))]
        if self.model.positions is not None:
            place = self.row + (spec.learned_positions or 0)
            terms.append(
                DerivationTerm(f"position {self.row}", (float(self.model.positions.weight[place, self.column]), 1.0))
            )
        return Derivation(formula, self.value, ("value", "scale"), tuple(terms))

    def of_attention_norm(self) -> Derivation:
        return self._normed(self.block.attention_norm, self._residual())

    def of_feedforward_norm(self) -> Derivation:
        parallel = isinstance(self.block, ParallelBlock)
        return self._normed(self.block.feedforward_norm, self._residual() if parallel else self._at("after_attention"))

    def of_attention_post_norm(self) -> Derivation:
        return self._normed(self.block.attention_post_norm, self._at("attention"))

    def of_feedforward_post_norm(self) -> Derivation:
        return self._normed(self.block.feedforward_post_norm, self._at("feedforward"))

    def of_norm(self) -> Derivation:
        return self._normed(self.model.norm, self.found.residual(len(self.model.blocks)))

    def of_projected(self) -> Derivation:
        return self._product(self.block.attention.qkv, self._normed_input("attention_norm"), "normed")

    def of_queries(self) -> Derivation:
        return self._rotated(0)

    def of_keys(self) -> Derivation:
        heads = self.block.attention.spec.num_heads
        return self._rotated(heads)

    def of_values(self) -> Derivation:
        attention = self.block.attention
        if type(attention) is not Attention or attention.value_norm is not None or attention.spec.qkv_clip:
            return Derivation("a column of the values", self.value, note="more than one product away from the norm")
        spec = attention.spec
        place = (spec.num_heads + spec.num_kv_heads) * spec.head_dim + self.column
        value = float(self._at("projected")[self.row, place])
        return Derivation(
            f"column {place} of the projection", self.value, ("value",), (DerivationTerm("value", (value,)),)
        )

    def of_scores(self) -> Derivation:
        if math.isnan(self.value):
            return Derivation("a key that this query does not see", self.value, note="after it, or outside its window")
        q, k, scale = self._heads("queries", "num_heads"), self._heads("keys", "num_kv_heads"), self._scale()
        if q is None or k is None:
            return Derivation("query times key", self.value, note="this layer reads another layer's keys")
        key = k[self.column, self.head * k.shape[1] // q.shape[1]]
        query = q[self.row, self.head]
        if len(query) != len(key):
            return Derivation("query times key", self.value, note="the query has a gate beside it")
        return Derivation(
            f"query of token {self.row} times key of token {self.column}, times the scale", self.value,
            ("query", "key", "scale"), _terms("dim", query, key, torch.full_like(key, scale)),
        )  # fmt: skip

    def of_weights(self) -> Derivation:
        scores = self._at("scores")[self.head, self.row].double()
        seen = ~scores.isnan()
        count = int(seen.sum())
        formula = f"exp(score), over the sum of {count} of them"
        if not seen[self.column]:
            return Derivation("a key that this query does not see", self.value, note="its weight is zero")
        exact = scores[seen].softmax(-1)
        weights = self._at("weights")[self.head, self.row][seen].double()
        if self._bends_scores() or (exact - weights).abs().max() > 1e-3:
            return Derivation(formula, self.value, note="the scores are capped, biased, or share with a sink before")
        best = float(scores[seen].max())
        total = float((scores[seen] - best).exp().sum())
        above = math.exp(float(scores[self.column]) - best)
        return Derivation(formula, self.value, ("exp(score − largest)", "1 / sum"),
                          (DerivationTerm(f"key {self.column}", (above, 1 / total)),))  # fmt: skip

    def _bends_scores(self) -> bool:
        """Return whether something changes the scores before their softmax."""
        spec = self.block.attention.spec
        changes = ("softcap", "score", "sink_logits", "temperature")
        return any(getattr(spec, name, None) for name in changes) or spec.position == "alibi"

    def of_heads(self) -> Derivation:
        attention, values = self.block.attention, self._heads("values", "num_kv_heads")
        weights = self.found.find("weights", self.layer)
        formula = "the values of all tokens in this column, by their weights"
        if type(attention) is not Attention or values is None or weights is None:
            return Derivation(formula, self.value, note="gated, or of keys and values that are kept in another form")
        head, dim = divmod(self.column, values.shape[2])
        column = values[:, head * values.shape[1] // attention.spec.num_heads, dim]
        return Derivation(
            f"head {head}: {formula}", self.value, ("weight", "value"),
            _terms("token", weights.values[head, self.row], column),
        )  # fmt: skip

    def of_attention(self) -> Derivation:
        if type(self.block.attention) is not Attention:
            return Derivation("the heads times the output matrix", self.value, note="by way of the latents")
        return self._product(self.block.attention.output, self._at("heads")[self.row], "heads")

    def of_after_attention(self) -> Derivation:
        return self._sum(("input", self._residual()), ("attention", self._last_of("attention")))

    def of_router(self) -> Derivation:
        return Derivation("the router's share of this expert", self.value, note="zero where it is not chosen")

    def of_gate_up(self) -> Derivation:
        return self._product(cast(GatedMLP, self.block.feedforward).gate_up, self._feedforward_input(), "normed")

    def of_up(self) -> Derivation:
        return self._product(cast(PlainMLP, self.block.feedforward).up, self._feedforward_input(), "normed")

    def of_activation(self) -> Derivation:
        gate, up = self._at("gate_up")[self.row].chunk(2)
        kind = cast(GatedMLP, self.block.feedforward).activation.kind
        formula = f"{kind}(gate) times up"
        if kind != "silu" and not kind.startswith("gelu"):
            return Derivation(formula, self.value, note="clamped on the way")
        gated, factor = float(gate[self.column]), float(up[self.column])
        active = self.value / factor if factor else 0.0
        return Derivation(f"{formula}; the gate is {gated:.4g}", self.value, (f"{kind}(gate)", "up"),
                          (DerivationTerm(f"column {self.column}", (active, factor)),))  # fmt: skip

    def of_activated(self) -> Derivation:
        up = float(self._at("up")[self.row, self.column])
        return Derivation(f"the activation of {up:.4g}", self.value, note="element by element")

    def of_feedforward(self) -> Derivation:
        part = self.block.feedforward
        if not isinstance(part, GatedMLP | PlainMLP):
            return Derivation("the chosen experts' results, by the router's weights", self.value, note="a mixture")
        return self._product(part.down, self._at("activation" if isinstance(part, GatedMLP) else "activated")[self.row],
                             "neuron")  # fmt: skip

    def of_output(self) -> Derivation:
        made = self._last_of("feedforward")
        if isinstance(self.block, ParallelBlock):
            return self._sum(("input", self._residual()), ("attention", self._last_of("attention")),
                             ("feed-forward", made))  # fmt: skip
        return self._sum(("stream", self._at("after_attention")), ("feed-forward", made))

    def of_logits(self) -> Derivation:
        model, x = self.model, self.found.values("norm")[self.row]
        if model.head is None:
            row, bias = cast(nn.Embedding, model.embedding).weight[self.column], None
        else:
            row, bias = _row(model.head, self.column), model.head.bias
        formula = f"the normed row times row {self.column} of the head"
        scale = self.spec.logit_scale
        factors = (x, row) if scale == 1 else (x, row, torch.full_like(row, scale))
        terms = _terms("column", *factors)
        if bias is not None:
            terms += (DerivationTerm("bias", (float(bias[self.column]), scale)),)
        note = f"then capped at {self.spec.final_logit_softcapping:g}" if self.spec.final_logit_softcapping else ""
        return Derivation(formula, self.value, ("normed", "weight", "scale")[: len(factors)], terms, note)

    def _at(self, name: str) -> Tensor:
        return self.found.values(name, self.layer)

    def _residual(self) -> Tensor:
        return self.found.residual(cast(int, self.layer))

    def _last_of(self, name: str) -> Tensor:
        """Return what is added to the stream: normed or scaled, where the block does that."""
        post = self.found.find(f"{name}_post_norm", self.layer)
        return self._at(name) if post is None else post.values

    def _normed_input(self, name: str) -> Tensor:
        found = self.found.find(name, self.layer)
        return (self._residual() if found is None else found.values)[self.row]

    def _feedforward_input(self) -> Tensor:
        if (found := self.found.find("feedforward_norm", self.layer)) is not None:
            return found.values[self.row]
        if isinstance(self.block, ParallelBlock):
            return self._normed_input("attention_norm")
        return self._at("after_attention")[self.row]

    def _heads(self, name: str, count: str) -> Tensor | None:
        """Return a stage of heads as [token, head, head_dim]."""
        found = self.found.find(name, self.layer)
        if found is None:
            return None
        heads = 1 if name != "queries" and not hasattr(self.block.attention, "qkv") else 0
        heads = heads or getattr(self.block.attention.spec, count)
        return found.values.unflatten(-1, (heads, -1))

    def _scale(self) -> float:
        return float(self.block.attention.scale)

    def _normed(self, norm: nn.Module, x: Tensor) -> Derivation:
        row, name = x[self.row].double(), f"column {self.column}"
        value = float(row[self.column])
        if isinstance(norm, ResidualScale):
            terms = (DerivationTerm(name, (value, norm.factor)),)
            return Derivation("times a fixed number", self.value, ("value", "factor"), terms)
        if isinstance(norm, RMSNorm):
            size = float((row.square().mean() + norm.eps).rsqrt())
            terms = (DerivationTerm(name, (value, size, float(norm.multiplier[self.column]))),)
            formula = "value over the root mean square of its row, times a weight"
            return Derivation(formula, self.value, ("value", "1 / rms", "weight"), terms)
        layer_norm = cast(LayerNorm, norm)
        weight = 1.0 if layer_norm.weight is None else float(layer_norm.weight[self.column]) + layer_norm.offset
        size = float((row.var(unbiased=False) + layer_norm.eps).rsqrt())
        terms = (DerivationTerm(name, (value - float(row.mean()), size, weight)),)
        if layer_norm.bias is not None:
            terms += (DerivationTerm("bias", (float(layer_norm.bias[self.column]), 1.0, 1.0)),)
        formula = "distance from the row's mean over its standard deviation, times a weight"
        return Derivation(formula, self.value, ("value − mean", "1 / deviation", "weight"), terms)

    def _product(self, matrix: Linear, x: Tensor, name: str) -> Derivation:
        terms = _terms("column", x, _row(matrix, self.column))
        if matrix.bias is not None:
            terms += (DerivationTerm("bias", (float(matrix.bias[self.column]), 1.0)),)
        note = "the row is rounded to INT8 first" if matrix.activations == "int8" else ""
        formula = f"dot product of the row before it with row {self.column} of the matrix"
        return Derivation(formula, self.value, (name, "weight"), terms, note)

    def _sum(self, *parts: tuple[str, Tensor]) -> Derivation:
        terms = tuple(DerivationTerm(name, (float(values[self.row, self.column]),)) for name, values in parts)
        return Derivation(" + ".join(name for name, _ in parts), self.value, ("value",), terms)

    def _rotated(self, first_head: int) -> Derivation:
        attention = self.block.attention
        if type(attention) is not Attention or attention.query_norm is not None or attention.spec.qkv_clip:
            return Derivation("normed and rotated", self.value, note="each head is normed, clipped or made of latents")
        spec = attention.spec
        head, dim = divmod(self.column, spec.head_dim)
        row = self._at("projected")[self.row, (first_head + head) * spec.head_dim :][: spec.head_dim]
        if rotary_of_layer(self.spec, spec) is None:
            return Derivation(
                "not rotated", self.value, ("value",), (DerivationTerm(f"dim {dim}", (float(row[dim]),)),)
            )
        cos, sin = self._angles()
        half = spec.head_dim // 2
        pair, other, sign = dim % half, (dim + half) % spec.head_dim, -1.0 if dim < half else 1.0
        terms = (
            DerivationTerm(f"dim {dim}", (float(row[dim]), float(cos[pair]))),
            DerivationTerm(f"dim {other}", (float(row[other]), sign * float(sin[pair]))),
        )
        formula = f"head {head}: a pair of columns, rotated by the angle of position {self.row}"
        return Derivation(formula, self.value, ("value", "cos or ±sin"), terms)

    def _angles(self) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of the row's position: [head_dim / 2]."""
        table = self.model.rotary[cast(int, self.model.rotary_of_block[cast(int, self.layer)])]
        place = torch.tensor([self.row], device=self.model.device)
        cos, sin = table(place, torch.full_like(place, len(self.found.token_ids)))
        return cos[0], sin[0]


def _row(matrix: Linear, column: int) -> Tensor:
    """Return one row of a matrix as numbers, quantized or not."""
    return matrix.lookup_rows(slice(column, column + 1), torch.float32)[0]


def _terms(name: str, *factors: Tensor) -> tuple[DerivationTerm, ...]:
    columns: Sequence[Sequence[float]] = [each.double().tolist() for each in factors]
    return tuple(DerivationTerm(f"{name} {n}", values) for n, values in enumerate(zip(*columns, strict=True)))
