"""Multi-step decode in one call: each step takes the largest logit of the one before, or a token that is given.

embed -> step -> choose -> embed -> step -> choose ...

Where it `weighs`, tokens may be drawn, and a row may end early (see draw.py): the loop ends with the last of them.
"""

from __future__ import annotations

from math import lcm

from compiled_kernels.decode_step.draw import (
    MAX_THREADS,
    begin_weighing,
    draw,
    end_rows,
    exponentials,
    sampling_buffers,
)
from compiled_kernels.decode_step.layer_kernel import head_product, rotary_arguments
from compiled_kernels.decode_step.shape import StepShape
from compiled_kernels.decode_step.text import arguments, step_body, step_functions
from compiled_kernels.mlir_text import Lines, Named, call, declare_arguments, largest_divisor, memref, vector


def steps_text(shape: StepShape, max_steps: int, context: int, weighs: bool = False) -> str:
    """@decode_steps(see `steps_arguments`): as many steps as `count` says, at most `most`."""
    taken = steps_arguments(shape, max_steps, context, weighs)
    shared = [*taken, Named("at", "index"), Named("thread", "index"), Named("threads", "index")]
    entry = f"""func.func @decode_steps({declare_arguments(taken)}) {{
%thread, %threads = call @thread() : () -> (index, index)
%zero = arith.constant 0 : index
%one = arith.constant 1 : index
%wanted = memref.load %count[%zero] : {memref((1,), "i32")}
%steps = arith.index_cast %wanted : i32 to index
%first = arith.cmpi eq, %thread, %zero : index
{_loop(shared, weighs)}
return
}}"""
    step = f"""func.func private @one_step({declare_arguments(shared)}) attributes {{no_inline}} {{
{step_body(shape, _unit(shape))}
{_largest(shape)}
{exponentials(shape, max_steps, _lanes(shape)) if weighs else ""}
return
}}"""
    bodies = {"embed": _embed(shape, context), "choose": _choose(shape, max_steps, weighs)}
    embed, choose = (
        f"func.func private @{name}({declare_arguments(shared)}) attributes {{no_inline}} {{\n{body}\nreturn\n}}"
        for name, body in bodies.items()
    )
    return "\n".join([*step_functions(shape), embed, step, choose, entry])


def _loop(shared: list[Named], weighs: bool) -> str:
    """Each step by all threads, what lies between two by the first. Where rows end, all threads look whether one is
    left behind the barrier that the first reaches only when it has chosen; it chooses again behind the next."""
    if not weighs:
        return f"""scf.for %at = %zero to %steps step %one {{
  scf.if %first {{
    func.{call("embed", shared)}
  }}
  func.call @GOMP_barrier() : () -> ()
  func.{call("one_step", shared)}
  func.call @GOMP_barrier() : () -> ()
  scf.if %first {{
    func.{call("choose", shared)}
  }}
}}"""
    return f"""%none_left = arith.constant 0 : i32
scf.while (%at = %zero) : (index) -> index {{
  %more = arith.cmpi ult, %at, %steps : index
  %embeds = arith.andi %first, %more : i1
  scf.if %embeds {{
    func.{call("embed", shared)}
  }}
  func.call @GOMP_barrier() : () -> ()
  %rows_left = memref.load %left[%zero] : {memref((1,), "i32")}
  %some_left = arith.cmpi ne, %rows_left, %none_left : i32
  %goes_on = arith.andi %more, %some_left : i1
  scf.condition(%goes_on) %at : index
}} do {{
^bb0(%at: index):
  func.{call("one_step", shared)}
  func.call @GOMP_barrier() : () -> ()
  scf.if %first {{
    func.{call("choose", shared)}
  }}
  %after = arith.addi %at, %one : index
  scf.yield %after : index
}}"""


def steps_arguments(shape: StepShape, max_steps: int, context: int, weighs: bool = False) -> list[Named]:
    return [*loop_buffers(shape, max_steps, weighs), *loop_inputs(shape, context), *arguments(shape)]


def loop_buffers(shape: StepShape, max_steps: int, weighs: bool = False) -> list[Named]:
    """`count` of steps; `ids` computed next; for each step what comes after it, if that is `known` (otherwise -1), and
    what was `chosen`; and the largest logit of each thread's share."""
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
    """Return the embedding, and the angles of all positions."""
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


def _embed(shape: StepShape, context: int) -> str:
    """Emit x and the angles of every row, by its id and its length."""
    rows, width, kind = shape.rows, shape.hidden_size, shape.dtype
    lengths, ids = memref((rows,), "i32"), memref((rows,), "i32")
    copies = [_copied("embedding", memref((shape.vocab_size, width), kind), "id", "x", rows, width, kind, shape)]
    for index, dim in shape.rotary_dims.items():
        for name, _ in rotary_arguments(shape, dim):
            table = memref((context, dim // 2), "f32")
            copies.append(
                _copied(f"all_{name}_{index}", table, "position", f"{name}_{index}", rows, dim // 2, "f32", shape)
            )
    return f"""%zero = arith.constant 0 : index
%one = arith.constant 1 : index
%rows = arith.constant {rows} : index
scf.for %row = %zero to %rows step %one {{
  %id32 = memref.load %ids[%row] : {ids}
  %id = arith.index_cast %id32 : i32 to index
  %length32 = memref.load %lengths[%row] : {lengths}
  %length = arith.index_cast %length32 : i32 to index
  %position = arith.subi %length, %one : index
{chr(10).join(copies)}
}}"""


def _copied(
    source: str, kind: str, place: str, target: str, rows: int, width: int, element: str, shape: StepShape
) -> str:
    """Emit target[row, :] = source[place, :], as float32."""
    lanes, lines = largest_divisor(width, shape.target.lanes), Lines(f"{target}_")
    value = lines.extend(lines.load(f"%{source}", f"%{place}, %c", kind, lanes, element), lanes, element)
    lines.store(value, f"%{target}", "%row, %c", memref((rows, width), "f32"), lanes)
    return f"""  %end_{target} = arith.constant {width} : index
  %by_{target} = arith.constant {lanes} : index
  scf.for %c = %zero to %end_{target} step %by_{target} {{
{lines.text()}
  }}"""


def _largest(shape: StepShape) -> str:
    """Emit each row's largest logit in this thread's share, and its first place."""
    lanes, rows = _lanes(shape), shape.rows
    logits, kind, whole = memref((rows, shape.vocab_size), "f32"), vector(lanes), vector(lanes, "i32")
    peaks, places = memref((rows, MAX_THREADS), "f32"), memref((rows, MAX_THREADS), "i32")
    return f"""%zero = arith.constant 0 : index
%one = arith.constant 1 : index
%rows_of_logits = arith.constant {rows} : index
%lanes = arith.constant {lanes} : index
%lowest = arith.constant dense<0xFF800000> : {kind}
%nowhere = arith.constant dense<0> : {whole}
%steps = arith.constant dense<{list(range(lanes))}> : {whole}
%beyond = arith.constant dense<2147483647> : {whole}
scf.for %row = %zero to %rows_of_logits step %one {{
  %best, %where = scf.for %v = %vocab_begin to %vocab_end step %lanes
      iter_args(%peak = %lowest, %place = %nowhere) -> ({kind}, {whole}) {{
    %value = vector.load %logits[%row, %v] : {logits}, {kind}
    %v32 = arith.index_cast %v : index to i32
    %base = vector.broadcast %v32 : i32 to {whole}
    %here = arith.addi %base, %steps : {whole}
    %above = arith.cmpf ogt, %value, %peak : {kind}
    %higher = arith.select %above, %value, %peak : vector<{lanes}xi1>, {kind}
    %found = arith.select %above, %here, %place : vector<{lanes}xi1>, {whole}
    scf.yield %higher, %found : {kind}, {whole}
  }}
  %top = vector.reduction <maximumf>, %best : {kind} into f32
  %tops = vector.broadcast %top : f32 to {kind}
  %equal = arith.cmpf oeq, %best, %tops : {kind}
  %those = arith.select %equal, %where, %beyond : vector<{lanes}xi1>, {whole}
  %first = vector.reduction <minsi>, %those : {whole} into i32
  memref.store %top, %peaks[%row, %thread] : {peaks}
  memref.store %first, %places[%row, %thread] : {places}
}}"""


def _choose(shape: StepShape, most: int, weighs: bool) -> str:
    """Every row's next token, and one position more."""
    rows = shape.rows
    peaks, places = memref((rows, MAX_THREADS), "f32"), memref((rows, MAX_THREADS), "i32")
    lengths, ids, steps = memref((rows,), "i32"), memref((rows,), "i32"), memref((most, rows), "i32")
    return f"""%zero = arith.constant 0 : index
%one = arith.constant 1 : index
%one32 = arith.constant 1 : i32
%zero32 = arith.constant 0 : i32
%none = arith.constant 0xFF800000 : f32
%rows = arith.constant {rows} : index
{begin_weighing() if weighs else ""}
scf.for %row = %zero to %rows step %one {{
  %peak, %place = scf.for %t = %zero to %threads step %one iter_args(%best = %none, %where = %zero32) -> (f32, i32) {{
    %value = memref.load %peaks[%row, %t] : {peaks}
    %there = memref.load %places[%row, %t] : {places}
    %above = arith.cmpf ogt, %value, %best : f32
    %higher = arith.select %above, %value, %best : f32
    %found = arith.select %above, %there, %where : i32
    scf.yield %higher, %found : f32, i32
  }}
  {draw(shape, most, _lanes(shape), _unit(shape)) if weighs else ""}
  %given = memref.load %known[%at, %row] : {steps}
  %open = arith.cmpi slt, %given, %zero32 : i32
  %next = arith.select %open, {"%taken" if weighs else "%place"}, %given : i32
  memref.store %next, %chosen[%at, %row] : {steps}
  memref.store %next, %ids[%row] : {ids}
  %length = memref.load %lengths[%row] : {lengths}
  %longer = arith.addi %length, %one32 : i32
  memref.store %longer, %lengths[%row] : {lengths}
  {end_rows(shape) if weighs else ""}
}}"""
