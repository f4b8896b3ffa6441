"""Run several decode steps in one call: the next token of each step is the one with the largest logit, or a token that
is known in advance.

embed -> step -> choose -> embed -> step -> choose ...

In a loop that samples (`weighs`), tokens may be drawn and a row may end early (see draw.py); when all rows have ended,
the remaining steps are skipped.
"""

from __future__ import annotations

from contextlib import nullcontext
from math import inf, lcm

from compiled_kernels.builder.functions import Given, call, function, loop, text_of, when
from compiled_kernels.builder.target import Named, indices, largest_divisor, memref
from compiled_kernels.builder.threads import entry, wait
from compiled_kernels.builder.values import constant
from compiled_kernels.builder.vectors import copy
from compiled_kernels.decode_step.draw import MAX_THREADS, draw, end_row, exponentials, sampling_buffers
from compiled_kernels.decode_step.layer_kernel import head_product, rotary_arguments
from compiled_kernels.decode_step.shape import StepShape
from compiled_kernels.decode_step.text import arguments, make_step, step_functions


def steps_text(shape: StepShape, max_steps: int, context: int, weighs: bool = False) -> str:
    """Return the module of the function @decode_steps(see `steps_arguments`), which runs `count` steps, at most
    `max_steps`.
    """
    arguments = steps_arguments(shape, max_steps, context, weighs)
    return text_of(lambda: _loop(shape, arguments, weighs))


def _loop(shape: StepShape, arguments: list[Named], weighs: bool) -> None:
    step_functions(shape)
    shared = [*arguments, *indices("at", "thread", "threads")]
    for name, make in (("embed", _embed), ("one_step", _step), ("choose", _choose)):
        with function(name, shared, inline=False) as given:
            make(shape, given, weighs)
    with entry("decode_steps", arguments) as given:
        first = given["thread"].equals(0)
        with loop(0, given["count"][0].to("index")) as turn:
            passed = [(given | {"at": turn.index})[name] for name, _ in shared]
            with when(first):
                call("embed", passed)
            wait()
            # All threads look whether a row is left behind the bar that the first reaches only when it has chosen; it
            # chooses again behind the next.
            with when(given["left"][0].compared("ne", 0)) if weighs else nullcontext():
                call("one_step", passed)
                wait()
                with when(first):
                    call("choose", passed)


def steps_arguments(shape: StepShape, max_steps: int, context: int, weighs: bool = False) -> list[Named]:
    return [*loop_buffers(shape, max_steps, weighs), *loop_inputs(shape, context), *arguments(shape)]


def loop_buffers(shape: StepShape, max_steps: int, weighs: bool = False) -> list[Named]:
    """Return the buffers of a loop: the number of steps `count`; the next token `ids`; for each step the next tokens if
    they are `known` in advance (otherwise -1), and the `chosen` tokens; and the largest logit of each thread's share.
    """
    rows = shape.rows
    return [
        Named("count", memref((1,), "i32")),
        Named("ids", memref((rows,), "i32")),
        Named("known", memref((max_steps, rows), "i32")),
        Named("chosen", memref((max_steps, rows), "i32")),
        Named("peaks", memref((rows, MAX_THREADS), "f32")),
        Named("places", memref((rows, MAX_THREADS), "i32")),
        *(sampling_buffers(shape, max_steps) if weighs else []),
    ]


def loop_inputs(shape: StepShape, context: int) -> list[Named]:
    """Return the arguments for the embedding and for the angles of all positions."""
    found = [Named("embedding", memref((shape.vocab_size, shape.hidden_size), shape.dtype))]
    for index, dim in shape.rotary_dims.items():
        found += [Named(f"all_{name}_{index}", memref((context, dim // 2), "f32")) for name in ("cos", "sin")]
    return found


def _lanes(shape: StepShape) -> int:
    return largest_divisor(shape.vocab_size, shape.target.lanes)


def _unit(shape: StepShape) -> int:
    last = head_product(shape)
    assert last is not None
    return lcm(last.block, _lanes(shape))


def _embed(shape: StepShape, given: Given, weighs: bool) -> None:
    """Emit x and the angles of every row, from its token id and its length."""
    rotary = shape.rotary_dims.items()
    angles = [(name, dim // 2) for number, dim in rotary for name, _ in rotary_arguments(shape, dim, f"_{number}")]
    with loop(0, shape.rows) as turn:
        row = turn.index
        number, position = given["ids"][row].to("index"), given["lengths"][row].to("index") - 1
        sources = [("embedding", number, "x", shape.hidden_size)]
        for source, place, target, width in sources + [(f"all_{name}", position, name, half) for name, half in angles]:
            copy(given[source], (place, 0), given[target], (row, 0), width, largest_divisor(width, shape.target.lanes))


def _step(shape: StepShape, given: Given, weighs: bool) -> None:
    """Emit a step, and find the largest logit of each row in this thread's share, and its first place."""
    own, lanes = make_step(shape, given, _unit(shape)), _lanes(shape)
    lowest, nowhere = constant(-inf, "f32", lanes), constant(0, "i32", lanes)
    with loop(0, shape.rows) as row:
        with loop(own[0], own[1], lanes, [lowest, nowhere]) as turn:
            value, (peak, place) = given["logits"].load(lanes, row.index, turn.index), turn.carried
            here = turn.index.to("i32").broadcast(lanes) + constant(range(lanes), "i32")
            above = value.compared("ogt", peak)
            turn.carry([above.select(value, peak), above.select(here, place)])
        best, where = turn.results
        top = best.reduce("maximumf")
        those = best.compared("oeq", top.broadcast(lanes)).select(where, where.like(2**31 - 1))
        given["peaks"][row.index, given["thread"]] = top
        given["places"][row.index, given["thread"]] = those.reduce("minsi")
        if weighs:
            exponentials(given, row.index, own, lanes)


def _choose(shape: StepShape, given: Given, weighs: bool) -> None:
    """Emit every row's next token, and advance its position by one."""
    if weighs:
        given["left"][0] = constant(0, "i32")
    with loop(0, shape.rows) as turn:
        row, place = turn.index, (given["at"], turn.index)
        with loop(0, given["threads"], 1, [constant(-inf, "f32"), constant(0, "i32")]) as thread:
            value, there = (given[name][row, thread.index] for name in ("peaks", "places"))
            above = value.compared("ogt", thread.carried[0])
            found = zip((value, there), thread.carried, strict=True)
            thread.carry([above.select(new, old) for new, old in found])
        peak, token = thread.results
        whole = None
        if weighs:
            whole, token = draw(shape, given, row, (peak, token), _unit(shape))
        known = given["known"][place]
        is_open = known.compared("slt", 0)
        token = is_open.select(token, known)
        given["chosen"][place] = given["ids"][row] = token
        given["lengths"][row] = given["lengths"][row] + 1
        if whole:
            end_row(given, row, whole, is_open)
