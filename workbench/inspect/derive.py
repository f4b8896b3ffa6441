"""Derive one number of a forward pass from earlier stages, as a sum of products."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor, nn

from workbench.inspect import derive_attention, derive_feedforward, derive_mla
from workbench.inspect.derivation import Derivation, DerivationTerm
from workbench.inspect.forward_pass import BY_HEAD, ForwardPass, Stage
from workbench.inspect.number_place import NumberPlace, matrix_row, product_terms
from workbench.model.linear import ResidualScale
from workbench.model.mla import MLA


@torch.inference_mode()
def derive(found: ForwardPass, stage: Stage, row: int, column: int, head: int = 0) -> Derivation:
    """Return the derivation of one number of a forward pass, in `row` and `column` of a stage, as a sum of products.
    `head` selects the head in stages of scores and weights.
    """
    value = float(stage.values[head, row, column] if stage.name in BY_HEAD else stage.values[row, column])
    at = NumberPlace(found, stage.layer, row, column, head, value)
    is_mla = stage.layer is not None and isinstance(at.block.attention, MLA)
    return _method(f"of_{stage.name}", is_mla)(at)


def _method(name: str, is_mla: bool) -> Callable[[NumberPlace], Derivation]:
    places: list[ModuleType] = [*([derive_mla] if is_mla else []), derive_attention, derive_feedforward]
    return next((vars(each)[name] for each in places if name in vars(each)), None) or globals()[name]


def of_embedding(at: NumberPlace) -> Derivation:
    model = at.found.model
    token, spec = at.found.token_ids[at.row], model.spec
    value = float(model.lookup(torch.tensor([token], device=model.device))[0, at.column])
    formula = f"column {at.column} of row {token} of the embedding"
    if spec.embedding_norm:
        return at.explain(formula, note="normed as a whole row after that")
    terms = [DerivationTerm("table", (value, spec.embedding_scale))]
    if model.positions is not None:
        place = at.row + (spec.learned_positions or 0)
        terms.append(DerivationTerm(f"position {at.row}", (float(model.positions.weight[place, at.column]), 1.0)))
    return at.explain(formula, ("value", "scale"), terms)


def of_attention_norm(at: NumberPlace) -> Derivation:
    return _normed(at, at.block.attention_norm, at.residual())


def of_feedforward_norm(at: NumberPlace) -> Derivation:
    parallel = at.block.parallel != "no"
    return _normed(at, at.block.feedforward_norm, at.residual() if parallel else at.stage("after_attention"))


def of_attention_post_norm(at: NumberPlace) -> Derivation:
    return _normed(at, at.block.attention_post_norm, at.stage("attention"))


def of_feedforward_post_norm(at: NumberPlace) -> Derivation:
    return _normed(at, at.block.feedforward_post_norm, at.stage("feedforward"))


def of_norm(at: NumberPlace) -> Derivation:
    return _normed(at, at.found.model.norm, at.found.residual(len(at.found.model.blocks)))


def of_after_attention(at: NumberPlace) -> Derivation:
    return _sum(at, ("input", at.residual()), ("attention", _added(at, "attention")))


def of_output(at: NumberPlace) -> Derivation:
    made = "feed-forward", _added(at, "feedforward")
    if at.block.parallel != "no":
        return _sum(at, ("input", at.residual()), ("attention", _added(at, "attention")), made)
    return _sum(at, ("stream", at.stage("after_attention")), made)


def of_logits(at: NumberPlace) -> Derivation:
    model, x = at.found.model, at.found.values("norm")[at.row]
    if model.head is None:
        row, bias = model.head_tensors[0][at.column], None
    else:
        row, bias = matrix_row(model.head, at.column), model.head.bias
    scale = model.spec.logit_scale
    factors = (x, row) if scale == 1 else (x, row, torch.full_like(row, scale))
    terms = product_terms("column", *factors)
    if bias is not None:
        terms += (DerivationTerm("bias", (float(bias[at.column]), scale)),)
    cap = model.spec.final_logit_softcapping
    names = ("normed", "weight", "scale")[: len(factors)]
    note = f"then capped at {cap:g}" if cap else ""
    return at.explain(f"the normed row times row {at.column} of the head", names, terms, note)


def _normed(at: NumberPlace, norm: nn.Module, x: Tensor) -> Derivation:
    if isinstance(norm, ResidualScale):
        terms = (DerivationTerm(f"column {at.column}", (float(x[at.row, at.column]), norm.factor)),)
        return at.explain("times a fixed number", ("value", "factor"), terms)
    return at.normed(norm, x[at.row], at.column)


def _added(at: NumberPlace, name: str) -> Tensor:
    """Return the block's addition to the residual stream, after its norm or scale if it has one."""
    return at.stage(f"{name}_post_norm" if at.has(f"{name}_post_norm") else name)


def _sum(at: NumberPlace, *parts: tuple[str, Tensor]) -> Derivation:
    terms = [DerivationTerm(name, (float(values[at.row, at.column]),)) for name, values in parts]
    return at.explain(" + ".join(name for name, _ in parts), ("value",), terms)
