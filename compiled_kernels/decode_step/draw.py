"""Probabilities in a loop of steps: tokens drawn by them, and rows that end where they are low.

A loop that `weighs` adds, in each step, the exponentials of a thread's share of each row's logits; the thread that
chooses then has the softmax's total, draws by inverting the distribution function (thread's share, vector, token), and
ends a row before the first token of its own whose row's likeliest is less likely than the threshold. float32.
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
    """Return what is given: the `threshold`; each row's `scale`, that its logits are multiplied by; for each step and
    row a number from [0, 1) to draw by, or one below 0 where the largest is taken (`uniforms`). And what is found: each
    step's logits, how many of a row's tokens are `kept` (given: how many are wanted), how many rows are `left`."""
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
    """Make the sum of exp((logit - the share's largest) * scale) of the row in this thread's share of the columns; 0 of
    an empty one. And a copy of the logits."""
    top, scale = given["peaks"][row, given["thread"]].broadcast(lanes), given["scale"][row].broadcast(lanes)
    with loop(columns[0], columns[1], lanes, [constant(0.0, "f32", lanes)]) as turn:
        value = given["logits"].load(lanes, row, turn.index)
        given["all_logits"].store(value, given["at"], row, turn.index)
        turn.carry([turn.carried[0] + exp((value - top) * scale)])
    given["sums"][row, given["thread"]] = total(turn.results[0])


def draw(shape: StepShape, given: Given, row: Value, likeliest: tuple[Value, Value], unit: int) -> tuple[Value, Value]:
    """Return the total of the row's exponentials, and the `likeliest` token (its logit and number) or one that is
    drawn; threads' shares are in multiples of `unit`."""
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
    """Return the last of the places (begin, end, step), with the sum before it, that weighs anything and before which
    the sum, at first `before`, is not above `goal`: the place at which the sum crosses it; where rounding lets none
    cross, the last that weighs anything."""
    with loop(*places, [before, places[0], before]) as turn:
        (summed, *found), more = turn.carried, weight(turn.index)
        reached = summed.compared("ole", goal) & more.compared("ogt", 0.0)
        here = zip((turn.index, summed), found, strict=True)
        turn.carry([summed + more, *(reached.select(new, old) for new, old in here)])
    return turn.results[1:]


def end_row(given: Given, row: Value, whole: Value, is_open: Value) -> None:
    """End a row whose token is open and whose likeliest is below the threshold, or no number."""
    kept, left, at = given["kept"], given["left"], given["at"].to("i32")
    unlikely = (whole.like(1.0) / whole).compared("ult", given["threshold"][0])
    ends = unlikely & is_open & kept[row].compared("sgt", at)
    kept[row] = ends.select(at, kept[row])
    left[0] = left[0] + kept[row].compared("sgt", at).to("i32", signed=False)
