"""Derive numbers of multi-head latent attention (see `workbench/model/mla.py`)."""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.inspect.derivation import Derivation, DerivationTerm
from workbench.inspect.derive_attention import rotated
from workbench.inspect.number_place import NumberPlace, product_terms
from workbench.model.mla import MLA


def of_latents(at: NumberPlace) -> Derivation:
    return at.product(_mla(at).down, at.attention_input(), "normed")


def of_query_latent(at: NumberPlace) -> Derivation:
    return at.normed(_mla(at).query_norm, _latent_parts(at)[0], at.column)


def of_head_queries(at: NumberPlace) -> Derivation:
    return at.product(_mla(at).query_up, at.row_of("query_latent"), "query latent")


def of_queries(at: NumberPlace) -> Derivation:
    spec = _mla(at).spec
    head, column = divmod(at.column, spec.head_dim)
    query = (at.row_of("head_queries") if at.has("head_queries") else _latent_parts(at)[0]).unflatten(
        -1, (spec.num_heads, -1)
    )[head]
    plain, rotary = query.split([spec.qk_nope_head_dim, spec.qk_rope_head_dim])
    if column >= spec.kv_lora_rank:
        return _rotated(at, rotary, column - spec.kv_lora_rank, f"head {head}: ")
    weights = _mla(at).up[head, : spec.qk_nope_head_dim, column]
    return at.explain(f"head {head}: its query times column {column} of its keys' matrix (absorbed)",
                      ("query", "weight"), product_terms("dim", plain, weights))  # fmt: skip


def of_keys(at: NumberPlace) -> Derivation:
    spec = _mla(at).spec
    _, latent, key = _latent_parts(at)
    if at.column >= spec.kv_lora_rank:
        return _rotated(at, key, at.column - spec.kv_lora_rank, "the key of all heads: ")
    return at.normed(_mla(at).latent_norm, latent, at.column)


def of_values(at: NumberPlace) -> Derivation:
    value = float(at.row_of("keys")[at.column])
    return at.copied("the latent, of which keys and values are made", f"column {at.column} of the key", value)


def of_head_values(at: NumberPlace) -> Derivation:
    spec = _mla(at).spec
    head, place = divmod(at.column, spec.v_head_dim)
    mixed = at.row_of("heads").unflatten(-1, (spec.num_heads, -1))[head]
    weights = _mla(at).up[head, spec.qk_nope_head_dim + place]
    return at.explain(f"head {head}: what it has read, times row {place} of its values' matrix",
                      ("latent", "weight"), product_terms("latent", mixed, weights))  # fmt: skip


def _mla(at: NumberPlace) -> MLA:
    return at.part("attention", MLA)


def _latent_parts(at: NumberPlace) -> tuple[Tensor, ...]:
    """Split the row of latents into the queries (or their latent), the latent of keys and values, and the shared key.
    """
    spec = _mla(at).spec
    return at.row_of("latents").split(
        [spec.down_proj_columns - spec.head_dim, spec.kv_lora_rank, spec.qk_rope_head_dim]
    )


def _rotated(at: NumberPlace, part: Tensor, dim: int, whose: str) -> Derivation:
    """Derive column `dim` of a rotated part [qk_rope_head_dim]."""
    size = len(part)
    half, order = size // 2, torch.arange(size)
    if _mla(at).spec.rope_interleave:
        order = torch.cat([order[::2], order[1::2]])  # adjacent pairs become (i, i + half)
    before = [[(f"dim {int(place)}", (float(part[place]),))] for place in order]
    made = rotated(at, before, dim, (dim + half) % size, dim % half, -1.0 if dim < half else 1.0)
    return at.explain(f"{whose}a pair of columns, rotated by the angle of position {at.row}",
                      ("value", "cos or ±sin"), [DerivationTerm(*each) for each in made])  # fmt: skip
