"""Build the mixture of experts of a decode step (Shazeer et al., 2017).

    router | choose, sort by expert | each named expert's gate and up | gate | each named expert's down | weigh, add |

Every thread chooses the experts itself rather than wait for another, and computes its share of every expert's columns.
An expert's weights are read once for all rows that chose it, and not at all if no row did. A row's sums have the same
order whether or not other rows chose the same experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

from compiled_kernels.blocked.layout import PANEL_PAIR
from compiled_kernels.builder.functions import Given, alloca, call, loop, when
from compiled_kernels.builder.target import Named, largest_divisor, memref
from compiled_kernels.builder.threads import share, wait
from compiled_kernels.builder.values import Value, constant, exp, fma, index, negative
from compiled_kernels.builder.vectors import copy
from compiled_kernels.decode_step.elementwise import gate
from compiled_kernels.decode_step.layer_kernel import LayerKernel, multiply
from compiled_kernels.expert_linear.listed_rows import ListedRows, each_named_expert, few, sort_rows


def mixture_buffers(layer: LayerKernel) -> list[Named]:
    """Return the buffers that each thread has: the experts' input if its type differs from the norm's output, the
    expert of each feed-forward row, these rows sorted by expert, the end of each expert's rows, and the weights of
    rows."""
    order, ends = layer.expert_down.order_type, memref((layer.experts.num_experts,), "i64")
    weights = memref((layer.feedforward_rows,), "f32")
    wide = [Named("wide_normed", layer.expert_gate_up.x_type)] * (_x(layer) != "normed")
    kinds = {"expert": order, "order": order, "ends": ends, "weights": weights}
    return [*wide, *(Named(name, kind) for name, kind in kinds.items())]


def _x(layer: LayerKernel) -> str:
    return "normed" if layer.expert_dtype == layer.step.dtype else "wide_normed"


def mixture_functions(layer: LayerKernel) -> None:
    """Build the functions that `mixture` calls."""
    few(layer.expert_gate_up)
    few(layer.expert_down)


def mixture(layer: LayerKernel, given: Given) -> None:
    """Emit x += the output of the mixture of experts for `normed`, the normalized rows."""
    step, hidden, experts, x = layer.step, layer.shape.intermediate_size, layer.experts.num_experts, _x(layer)
    if x != "normed":  # once for all experts of a row
        lanes = largest_divisor(step.hidden_size, step.target.lanes)
        with loop(0, step.rows) as row:
            copy(given["normed"], (row.index, 0), given[x], (row.index, 0), step.hidden_size, lanes)
    columns = share(given, experts, layer.router.block)
    multiply(layer.router, "router", given, x, layer.router_logits.name, columns)
    wait()
    _choose(layer, given)
    with when(given["thread"].equals(0)), loop(0, layer.feedforward_rows) as turn:
        given["chosen"][turn.index] = given["expert"][turn.index]
    sort_rows(given, layer.feedforward_rows, experts)
    own = share(given, hidden, PANEL_PAIR)
    both = own, [each + hidden for each in own]
    _multiply(layer, layer.expert_gate_up, given, x, layer.gate_up_out, *both)
    gate(layer, given, *own)
    wait()
    own = share(given, step.hidden_size, PANEL_PAIR)
    _multiply(layer, layer.expert_down, given, layer.gated.name, layer.expert_out, own)
    _weigh(layer, given, *own)
    wait()


def _multiply(
    layer: LayerKernel, product: ListedRows, given: Given, x: str, out: Named, *bounds: Sequence[Value]
) -> None:
    """Multiply rows by their experts' weights, the columns from one bound to the other, for each of these `bounds`."""
    weights = [given[name] for name, _ in layer.stored(product)]
    with each_named_expert(layer.experts.num_experts, given["ends"]) as (expert, begin, end):
        skipped = expert * product.columns
        for each in bounds:
            pairs = [(skipped + column) // PANEL_PAIR for column in each]
            call(product.name, [given[x], *weights, given[out.name], given["order"], *pairs, skipped, begin, end])


def _choose(layer: LayerKernel, given: Given) -> None:
    """Choose for each row the experts with the largest scores, the first of equal ones, and their `weights`."""
    shape, weights, logits = layer.experts, given["weights"], given[layer.router_logits.name]
    scores, left = (alloca(memref((shape.num_experts,), "f32")) for _ in range(2))
    lowest, none = constant(-inf, "f32"), index(0)
    with loop(0, layer.step.rows) as row:
        with loop(0, shape.num_experts) as turn:
            scores[turn.index] = logits[row.index, turn.index]
        if shape.score == "softmax":
            _softmax(scores, none, index(shape.num_experts))
        elif shape.score == "sigmoid":
            _each(scores, none, index(shape.num_experts), lambda x: x.like(1.0) / (exp(negative(x)) + 1.0))
        with loop(0, shape.num_experts) as turn:
            left[turn.index] = scores[turn.index]
        own = row.index * shape.per_row, row.index * shape.per_row + shape.per_row
        with loop(*own) as place:
            with loop(0, shape.num_experts, 1, [lowest, none]) as turn:
                score, (peak, at) = left[turn.index], turn.carried
                better = score.compared("ogt", peak)
                turn.carry([better.select(score, peak), better.select(turn.index, at)])
            best = turn.results[1]
            given["expert"][place.index] = best.to("i64")
            weights[place.index] = scores[best]
            left[best] = lowest
        if shape.softmax_chosen:
            _softmax(weights, *own)
        if shape.renormalize:  # as the router of the model does it
            divisor = _sum(weights, *own) + 1e-20
            _each(weights, *own, lambda x: x / divisor)
        if shape.factor != 1:
            _each(weights, *own, lambda x: x * shape.factor)


def _softmax(numbers: Value, begin: Value, end: Value) -> None:
    with loop(begin, end, 1, [constant(-inf, "f32")]) as turn:
        turn.carry([numbers[turn.index].maximum(turn.carried[0])])
    peak = turn.results[0]
    _each(numbers, begin, end, lambda x: exp(x - peak))
    whole = _sum(numbers, begin, end)
    _each(numbers, begin, end, lambda x: x / whole)


def _sum(numbers: Value, begin: Value, end: Value) -> Value:
    with loop(begin, end, 1, [constant(0.0, "f32")]) as turn:
        turn.carry([turn.carried[0] + numbers[turn.index]])
    return turn.results[0]


def _each(numbers: Value, begin: Value, end: Value, make: Callable[[Value], Value]) -> None:
    with loop(begin, end) as turn:
        numbers[turn.index] = make(numbers[turn.index])


def _weigh(layer: LayerKernel, given: Given, begin: Value, end: Value) -> None:
    """Emit x += the weighted sum of each row's experts, for the columns from begin to end."""
    x, per_row = given["x"], layer.experts.per_row
    lanes = largest_divisor(layer.step.hidden_size, layer.step.target.lanes)
    with loop(0, layer.step.rows) as row, loop(begin, end, lanes) as turn:
        first = row.index * per_row
        with loop(first, first + per_row, 1, [constant(0.0, "f32", lanes)]) as place:
            factor = given["weights"][place.index].broadcast(lanes)
            value = given[layer.expert_out.name].load(lanes, place.index, turn.index)
            place.carry([fma(factor, value, place.carried[0])])
        x.store(x.load(lanes, row.index, turn.index) + place.results[0], row.index, turn.index)
