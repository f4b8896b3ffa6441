"""Sampling inside a loop of decode steps: draw tokens by their probabilities, and end rows with low probabilities.

In a step that samples (`weighs`), each thread sums the exponentials of its share of each row's logits. One thread then
adds these sums to the softmax's total and draws a token by inverting the distribution function: first a thread's share,
then a vector of it, then a token. It ends a row before its first newly chosen token if the highest probability is below
the threshold. All numbers are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from compiled_kernels.builder.functions import Given, either, loop
from compiled_kernels.builder.target import Named, largest_divisor, memref
from compiled_kernels.builder.threads import share
from compiled_kernels.builder.values import Value, constant, exp, index
from compiled_kernels.builder.vectors import total
from compiled_kernels.decode_step.shape import StepShape

MAX_THREADS = 256


def sampling_buffers(shape: StepShape, most: int) -> list[Named]:
    """Return the buffers of sampling. Inputs: the `threshold`; the factor `scale` of each row's logits; `uniforms`, for
    each step and row a number from [0, 1) for the draw, or a negative number to take the largest logit. Outputs: the
    logits of each step; `kept`, the number of valid tokens of each row (on input: the number wanted); `left`, the
    number of rows that have not ended."""
    rows = shape.rows
    return [
        Named("threshold", memref((1,), "f32")),
        Named("scale", memref((rows,), "f32")),
        Named("uniforms", memref((most, rows), "f32")),
        Named("sums", memref((rows, MAX_THREADS), "f32")),
        Named("all_logits", memref((most, rows, shape.vocab_size), "f32")),
        Named("kept", memref((rows,), "i32")),
        Named("left", memref((1,), "i32")),
    ]


def exponentials(given: Given, row: Value, columns: Sequence[Value], lanes: int) -> None:
    """Emit the sum of exp((logit - largest) * scale) of the row over this thread's share of the columns, where
    `largest` is the share's largest logit (the sum of an empty share is 0), and copy the logits to `all_logits`."""
    top, scale = given["peaks"][row, given["thread"]].broadcast(lanes), given["scale"][row].broadcast(lanes)
    with loop(columns[0], columns[1], lanes, [constant(0.0, "f32", lanes)]) as turn:
        value = given["logits"].load(lanes, row, turn.index)
        given["all_logits"].store(value, given["at"], row, turn.index)
        turn.carry([turn.carried[0] + exp((value - top) * scale)])
    given["sums"][row, given["thread"]] = total(turn.results[0])


def draw(shape: StepShape, given: Given, row: Value, likeliest: tuple[Value, Value], unit: int) -> tuple[Value, Value]:
    """Return the total of the row's exponentials, and the next token: a sampled one, or the one of `likeliest` (the
    largest logit and its token). Threads' shares are multiples of `unit`."""
    (peak, token), scale, logits, zero = likeliest, given["scale"][row], given["logits"], constant(0.0, "f32")
    lanes = largest_divisor(shape.vocab_size, shape.target.lanes)

    def of_share(thread: Value) -> Value:
        return exp((given["peaks"][row, thread] - peak) * scale) * given["sums"][row, thread]

    def of_run(column: Value) -> Value:
        value = logits.load(lanes, row, column)
        return total(exp((value - peak.broadcast(lanes)) * scale.broadcast(lanes)))

    def of_token(column: Value) -> Value:
        return exp((logits[row, column] - peak) * scale)

    def drawn() -> Value:
        goal = uniform * whole
        thread, before = _crossing(goal, zero, (index(0), given["threads"], 1), of_share)
        begin, end = share(given | {"thread": thread}, shape.vocab_size, unit)
        run, before = _crossing(goal, before, (begin, end, lanes), of_run)
        found, _ = _crossing(goal, before, (run, run + lanes, 1), of_token)
        return found.to("i32")

    with loop(0, given["threads"], 1, [zero]) as turn:
        turn.carry([turn.carried[0] + of_share(turn.index)])
    whole, uniform = turn.results[0], given["uniforms"][given["at"], row]
    return whole, either(uniform.compared("oge", 0.0), drawn, lambda: token, "i32")


def _crossing(
    goal: Value, before: Value, places: tuple[Value, Value, int], weight: Callable[[Value], Value]
) -> list[Value]:
    """Return the place (begin, end, step) at which the running sum, initially `before`, exceeds `goal`, and the sum
    before that place. If rounding keeps the sum below `goal`, return the last place with a nonzero weight."""
    with loop(*places, [before, places[0], before]) as turn:
        (summed, *found), more = turn.carried, weight(turn.index)
        reached = summed.compared("ole", goal) & more.compared("ogt", 0.0)
        here = zip((turn.index, summed), found, strict=True)
        turn.carry([summed + more, *(reached.select(new, old) for new, old in here)])
    return turn.results[1:]


def end_row(given: Given, row: Value, whole: Value, is_open: Value) -> None:
    """End a row before a newly chosen token if the row's highest probability is below the threshold or NaN."""
    kept, left, at = given["kept"], given["left"], given["at"].to("i32")
    unlikely = (whole.like(1.0) / whole).compared("ult", given["threshold"][0])
    ends = unlikely & is_open & kept[row].compared("sgt", at)
    kept[row] = ends.select(at, kept[row])
    left[0] = left[0] + kept[row].compared("sgt", at).to("i32", signed=False)
