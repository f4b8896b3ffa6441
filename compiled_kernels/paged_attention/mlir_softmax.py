"""Define the arithmetic of attention for all kernels: the begin of a window, logits, the running softmax, and its final
division. The pages that a query reads are defined by its context (mlir_pages.py)."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

from compiled_kernels.builder.functions import loop
from compiled_kernels.builder.values import Value, constant, exp, fma, index
from compiled_kernels.builder.vectors import tanh, total
from compiled_kernels.paged_attention.mlir_shape import HeadShape, PagedHeads
from compiled_kernels.scalar_code.intervals import reach
from compiled_kernels.scalar_code.mlir import scalar_code
from compiled_kernels.scalar_code.program import Program

Place = tuple[Value | int, ...]


class Query(NamedTuple):
    """A query while its attention is computed.

    Attributes:
        position: its position.
        head: the number of its head among all heads.
        slot: its number among the queries processed together.
        place: the indices of its vector in the memory of queries.
        found: the memory of its running state, and the indices there: weighted values, one for each column, then the
            highest logit, then the sum of weights.
    """

    position: Value
    head: Value
    slot: int
    place: Place
    found: tuple[Value, Place]


class Keys(NamedTuple):
    """A vector of keys for one query: their scores, their positions, and whether each key is visible."""

    scores: Value
    positions: Value
    visible: Value


def first_seen(shape: HeadShape, length: Value) -> Value:
    """Return the first position in the window of the query that is the last of `length` positions."""
    return length - length.minimum(shape.sliding_window) if shape.sliding_window else index(0)


def logits(shape: PagedHeads, query: Query, keys: Keys) -> tuple[Value, Value]:
    """Return two vectors for a query's keys: whether each key is visible, and its logit, minus infinity if it is not. A
    key is visible if the query reads it, the mask shows it and the score function does not hide it."""
    inputs = {"query": query.position, "key": keys.positions, "head": query.head}
    score, visible = keys.scores * shape.scale, keys.visible
    none = score.like(-math.inf)
    if shape.softcap:
        score = tanh(score * (2 / shape.softcap)) * shape.softcap
    if shape.score:
        score = scalar_code(Program.parse(shape.score), {"score": score, **inputs}, shape.lanes)
        visible = visible & score.compared("une", none)
    if shape.mask:
        visible = visible & scalar_code(Program.parse(shape.mask), inputs, shape.lanes)
    return visible, visible.select(score, none)


def weigh(shape: PagedHeads, query: Query, keys: Sequence[Keys]) -> tuple[list[Value], Value]:
    """Update a query's running softmax by vectors of keys. Return the keys' weights, exp(logit - peak), where the peak
    is the highest logit so far, and the factor exp(earlier peak - peak) of the earlier sums. The factor is 1 if the
    peak did not change; before the first visible key the peak is minus infinity."""
    found = [logits(shape, query, each) for each in keys]
    memory, place = query.found
    peak_place, total_place = ((*place, at) for at in (shape.head_dim, shape.head_dim + 1))
    before = memory[peak_place]
    peak = before.maximum(functools.reduce(Value.maximum, (logit for _, logit in found)).reduce("maximumf"))
    memory[peak_place] = peak
    peaks, earlier = peak.broadcast(shape.lanes), before.broadcast(shape.lanes)
    zero = peaks.like(0.0)
    weights = [visible.select(exp(logit - peaks), zero) for visible, logit in found]
    factor = exp(earlier.equals(peaks).select(zero, earlier - peaks)).at(0)
    memory[total_place] = memory[total_place] * factor + total(functools.reduce(Value.__add__, weights))
    return weights, factor


def clear(shape: HeadShape, memory: Value, place: Place) -> None:
    """Reset the running state of a query to that before any key."""
    with loop(0, shape.head_dim + 2) as at:
        memory[*place, at.index] = constant(0.0, "f32")
    memory[*place, shape.head_dim] = constant(-math.inf, "f32")


def finish(
    shape: PagedHeads, memory: Value, places: Sequence[Place], sink: Value | None, out: Value, place: Place
) -> None:
    """Emit out[place] = the result of a query from its partial states, along the last index: each part is weighted by
    its share of the sum of weights, and the sum rounded. A query that has seen no key gives zeros."""
    dim, lanes = shape.head_dim, shape.columns
    peaks, totals = ([memory[*each, at] for each in places] for at in (dim, dim + 1))
    parts = [each.broadcast(lanes) for each in _shares(shape, peaks, totals, sink)]
    for column in range(0, dim, lanes):
        whole = constant(0.0, "f32", lanes)
        for each, part in zip(places, parts, strict=True):
            whole = fma(memory.load(lanes, *each, column), part, whole)
        out.store(whole, *place[:-1], place[-1] + column)


def _shares(shape: HeadShape, peaks: Sequence[Value], totals: Sequence[Value], sink: Value | None) -> list[Value]:
    """Return the factors that combine one query's partial sums, with these peaks and totals: weights are rescaled to a
    common peak and divided by their sum, which includes the sink logit; 0 for a query that has seen no key."""
    if not shape.normalized:
        return [exp(peak) for peak in peaks]
    ends = [*peaks, sink] if sink else peaks
    # replaces the peak of no keys, minus infinity, which would give NaN
    highest = functools.reduce(Value.maximum, ends, constant(-3.0e38, "f32"))
    factors = [exp(each - highest) for each in ends]
    whole = constant(0.0, "f32")
    for each, factor in zip(totals, factors, strict=False):
        whole = whole + each * factor
    whole = whole + factors[-1] if sink else whole
    whole = whole.equals(0.0).select(whole.like(1.0), whole)
    return [factor / whole for factor in factors[: len(totals)]]


def may_see(shape: HeadShape, queries: tuple[Value, Value], keys: tuple[Value, Value], group: Value) -> Value:
    """Return whether the mask may show any key of an interval (first, last) to any query of another, in the heads of
    one key/value head."""
    low = group * shape.queries_per_kv
    ends = {"query": queries, "key": keys, "head": (low, low + shape.queries_per_kv - 1)}
    inputs = {f"{name}_{end}": pair[at] for name, pair in ends.items() for at, end in enumerate(("low", "high"))}
    return scalar_code(reach(Program.parse(shape.mask)), inputs)
