"""Derive numbers of a feed-forward layer, dense or a mixture of experts."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from compiled_kernels import Backend
from workbench.inspect.derivation import Derivation, DerivationTerm
from workbench.inspect.number_place import NumberPlace, matrix_row, product_terms
from workbench.model.feedforward import GatedMLP, MixtureOfExperts, PlainMLP, Router, apply_gate
from workbench.model.spec import ActivationSpec


def of_router_logits(at: NumberPlace) -> Derivation:
    return at.product(_mixture(at).router, at.feedforward_input(), "normed")


def of_router(at: NumberPlace) -> Derivation:
    router, chosen = _mixture(at).router, _chosen(at)
    if at.column not in chosen:
        return at.explain("not among the chosen experts", note="it is not computed for this token")
    factors = _router_factors(router, at.row_of("router_logits").double(), chosen, chosen.index(at.column))
    if router.spec.factor != 1:
        factors["factor"] = router.spec.factor
    place = f"choice {chosen.index(at.column) + 1} of {len(chosen)}"
    return at.explain(f"expert {at.column}, {place}, by its router's number", tuple(factors),
                      (DerivationTerm(f"expert {at.column}", tuple(factors.values())),))  # fmt: skip


def of_gate_up(at: NumberPlace) -> Derivation:
    return at.product(at.part("feedforward", GatedMLP).gate_up, at.feedforward_input(), "normed")


def of_expert_gate_up(at: NumberPlace) -> Derivation:
    part = _mixture(at)
    number, expert, column = _expert_of(at, at.stage("expert_gate_up"))
    row = part.matrix("gate_up", expert)[column]
    factors, names = [at.feedforward_input(), row], ["normed", "weight"]
    if part.weighs_input:
        factors.insert(0, torch.full_like(factors[0], float(at.row_of("router")[expert])))
        names.insert(0, "router")
    terms = product_terms("column", *factors)
    if part.gate_up_bias is not None:
        terms += (_bias(part.gate_up_bias[expert, column], len(names)),)
    return at.explain(f"expert {expert}, choice {number + 1}: the row before it times row {column} of its matrix",
                      names, terms)  # fmt: skip


def of_shared_gate_up(at: NumberPlace) -> Derivation:
    shared = _mixture(at).shared
    assert shared is not None
    return at.product(shared.gate_up, at.feedforward_input(), "normed")


def of_shared_gate(at: NumberPlace) -> Derivation:
    shared_gate = _mixture(at).shared_gate
    assert shared_gate is not None
    return at.product(shared_gate, at.feedforward_input(), "normed")


def of_up(at: NumberPlace) -> Derivation:
    return at.product(at.part("feedforward", PlainMLP).up, at.feedforward_input(), "normed")


def of_activation(at: NumberPlace) -> Derivation:
    return _activated(at, at.row_of("gate_up"), at.part("feedforward", GatedMLP).activation, at.column)


def of_expert_activation(at: NumberPlace) -> Derivation:
    number, expert, column = _expert_of(at, at.stage("expert_activation"))
    gate_up = at.row_of("expert_gate_up").unflatten(-1, (len(_chosen(at)), -1))[number]
    return _activated(at, gate_up, _mixture(at).activation, column, f"expert {expert}: ")


def of_shared_activation(at: NumberPlace) -> Derivation:
    return _activated(at, at.row_of("shared_gate_up"), _mixture(at).activation, at.column, "shared expert: ")


def of_activated(at: NumberPlace) -> Derivation:
    up, activation = at.row_of("up")[at.column].double(), at.part("feedforward", PlainMLP).activation
    formula = f"the activation of {float(up):.4g}"
    share = float(activation(up)) / float(up) if float(up) else 1.0
    return at.explain(formula, ("value", "share of it"), (DerivationTerm(f"column {at.column}", (float(up), share)),))


def of_feedforward(at: NumberPlace) -> Derivation:
    part = at.block.feedforward
    if isinstance(part, MixtureOfExperts):
        return _of_experts(at, part)
    assert isinstance(part, GatedMLP | PlainMLP)
    return at.product(part.down, at.row_of("activation" if isinstance(part, GatedMLP) else "activated"), "neuron")


def _of_experts(at: NumberPlace, part: MixtureOfExperts) -> Derivation:
    """Derive an output as a sum over the neurons of the chosen experts and the shared expert."""
    terms: list[DerivationTerm] = []
    chosen, column = _chosen(at), at.column
    rows = at.row_of("expert_activation").unflatten(-1, (len(chosen), -1))
    for expert, neurons in zip(chosen, rows, strict=True):
        weight = 1.0 if part.weighs_input else float(at.row_of("router")[expert])
        matrix = part.matrix("down", expert)[column]
        terms += product_terms(f"expert {expert}, neuron", torch.full_like(neurons, weight).double(), neurons, matrix)
        if part.down_bias is not None:
            terms.append(DerivationTerm(f"expert {expert}, bias", (weight, float(part.down_bias[expert, column]), 1.0)))
    if part.shared is not None:
        neurons = at.row_of("shared_activation")
        gate = float(torch.sigmoid(at.row_of("shared_gate").double())) if part.shared_gate is not None else 1.0
        terms += product_terms("shared, neuron", torch.full_like(neurons, gate).double(), neurons,
                               matrix_row(part.shared.down, column))  # fmt: skip
    others = "" if part.shared is None else ", and of the shared one"
    return at.explain(f"the neurons of experts {', '.join(map(str, chosen))}{others}, by the router's numbers",
                      ("router", "neuron", "weight"), terms)  # fmt: skip


def _activated(
    at: NumberPlace, gate_up: Tensor, activation: ActivationSpec, column: int, whose: str = ""
) -> Derivation:
    """Derive a gated activation from the row [2 intermediate] that it reads."""
    gate, up = gate_up.double().chunk(2)
    is_clamped = activation.kind == "clamped"  # this kind adds 1 to the up projection
    plain = torch.zeros_like(gate) if is_clamped else torch.ones_like(gate)
    active = float(apply_gate(torch.cat([gate, plain])[None], activation, Backend.EAGER)[0, column])
    factor = float(up[column].clamp(-activation.limit, activation.limit) + 1 if is_clamped else up[column])
    kind = "g sigmoid(αg)" if is_clamped else f"{activation.kind}(gate)"
    name = "up + 1" if is_clamped else "up"
    return at.explain(f"{whose}{kind} times {name}; the gate is {float(gate[column]):.4g}", (kind, name),
                      (DerivationTerm(f"column {column}", (active, factor)),))  # fmt: skip


def _router_factors(router: Router, logits: Tensor, chosen: list[int], number: int) -> dict[str, float]:
    """Return the factors, by name, of the weight of the chosen expert at index `number`."""
    spec, expert = router.spec, chosen[number]
    if spec.score == "sparsemixer":
        left = logits.clone()
        left[chosen[:number]] = -torch.inf
        best = left.max()
        near = left.masked_fill((best - logits) / torch.maximum(logits.abs(), best) > 2 * spec.jitter, -torch.inf)
        return _softmax_factors(near, expert, "logit")
    scores, factors = logits, {"logit": float(logits[expert])}
    if spec.score == "softmax":
        scores, factors = logits.softmax(-1), _softmax_factors(logits, expert, "logit")
    elif spec.score == "sigmoid":
        scores = logits.sigmoid()
        factors = {"sigmoid(logit)": float(scores[expert])}
    weights = scores[chosen]
    if spec.softmax_chosen:
        factors = _softmax_factors(weights, number, "logit" if spec.score == "logit" else "score")
        weights = weights.softmax(-1)
    if spec.renormalize:
        factors["1 / the chosen's sum"] = 1 / (float(weights.sum()) + 1e-20)
    return factors


def _softmax_factors(scores: Tensor, place: int, name: str) -> dict[str, float]:
    best = float(scores.max())
    total = float((scores - best).exp().sum())
    return {f"exp({name} − largest)": math.exp(float(scores[place]) - best), "1 / sum": 1 / total}


def _mixture(at: NumberPlace) -> MixtureOfExperts:
    return at.part("feedforward", MixtureOfExperts)


def _chosen(at: NumberPlace) -> list[int]:
    """Return the experts of this token, in the router's order."""
    return at.found.chosen_experts[at.in_layer][at.row].tolist()


def _expert_of(at: NumberPlace, stage: Tensor) -> tuple[int, int, int]:
    """Return the index of the choice to which this column belongs, the expert, and the column within the expert."""
    chosen = _chosen(at)
    number, column = divmod(at.column, stage.shape[-1] // len(chosen))
    return number, chosen[number], column


def _bias(value: Tensor, factors: int) -> DerivationTerm:
    return DerivationTerm("bias", (float(value), *[1.0] * (factors - 1)))
