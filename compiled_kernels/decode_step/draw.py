"""Probabilities in a loop of steps: tokens drawn by them, and rows that end where they are low.

A text that `weighs` adds, in each step, the exponentials of a thread's share of each row's logits; the thread that
chooses then has the softmax's total, draws by inverting the distribution function (thread's share, vector, backend), and
ends a row before the first token of its own whose row's likeliest is less likely than the threshold. float32.
"""

from __future__ import annotations

from compiled_kernels.decode_step.shape import StepShape
from compiled_kernels.mlir_text import Lines, Named, memref, vector

MAX_THREADS = 256
ONE_NUMBER, ONE_COUNT = memref((1,), "f32"), memref((1,), "i32")


def sampling_buffers(shape: StepShape, most: int) -> list[Named]:
    """Given: the `threshold`; each row's `scale`, that its logits are multiplied by; for each step and row a number from
    [0, 1) to draw by, or one below 0 where the largest is taken (`uniforms`). Found: each step's logits, how many of a
    row's tokens are `kept` (given: how many are wanted), and how many rows are `left`."""
    rows = shape.rows
    return [
        Named("threshold", ONE_NUMBER),
        Named("scale", memref((rows,), "f32")),
        Named("uniforms", memref((most, rows), "f32")),
        Named("sums", memref((rows, MAX_THREADS), "f32")),
        Named("all_logits", memref((most, rows, shape.vocab_size), "f32")),
        Named("kept", memref((rows,), "i32")),
        Named("left", ONE_COUNT),
    ]


def exponentials(shape: StepShape, most: int, lanes: int) -> str:
    """The sum of exp((logit - the share's largest) * scale) of each row in this thread's share; 0 of an empty one. And
    a copy of the logits."""
    rows, lines, kind = shape.rows, Lines("e"), vector(lanes)
    logits, every = memref((rows, shape.vocab_size), "f32"), memref((most, rows, shape.vocab_size), "f32")
    by_thread = memref((rows, MAX_THREADS), "f32")
    value = lines.load("%logits", "%row, %v", logits, lanes, "f32")
    lines.store(value, "%all_logits", "%at, %row, %v", every, lanes)
    more = lines.let(f"arith.addf %so_far, {_power(lines, value, lanes)} : {kind}")
    summing = Lines("t")
    total = summing.hsum("%powers", lanes)
    return f"""%nothing_yet = arith.constant dense<0.0> : {kind}
scf.for %row = %zero to %rows_of_logits step %one {{
  %top = memref.load %peaks[%row, %thread] : {by_thread}
  %tops = vector.broadcast %top : f32 to {kind}
  %row_scale = memref.load %scale[%row] : {memref((rows,), "f32")}
  %scales = vector.broadcast %row_scale : f32 to {kind}
  %powers = scf.for %v = %vocab_begin to %vocab_end step %lanes iter_args(%so_far = %nothing_yet) -> ({kind}) {{
    {lines.text()}
    scf.yield {more} : {kind}
  }}
  {summing.text()}
  memref.store {total}, %sums[%row, %thread] : {by_thread}
}}"""


def _power(lines: Lines, value: str, lanes: int) -> str:
    """exp((value - %tops) * %scales)."""
    below = lines.let(f"arith.subf {value}, %tops : {vector(lanes)}")
    return lines.exp(lines.let(f"arith.mulf {below}, %scales : {vector(lanes)}"), lanes)


def _share_weight(lines: Lines, shape: StepShape) -> str:
    """The sum of a thread's share (%t) as a part of the row's whole, whose largest logit is %peak."""
    by_thread = memref((shape.rows, MAX_THREADS), "f32")
    own, found = (lines.let(f"memref.load %{name}[%row, %t] : {by_thread}") for name in ("peaks", "sums"))
    below = lines.let(f"arith.subf {own}, %peak : f32")
    power = lines.exp(lines.let(f"arith.mulf {below}, %row_scale : f32"), 0)
    return lines.let(f"arith.mulf {power}, {found} : f32")


def begin_weighing() -> str:
    """Emit the constants of `choose`, before its rows."""
    return f"""%at32 = arith.index_cast %at : index to i32
%nothing = arith.constant 0.0 : f32
%whole = arith.constant 1.0 : f32
%least = memref.load %threshold[%zero] : {ONE_NUMBER}
memref.store %zero32, %left[%zero] : {ONE_COUNT}"""


def draw(shape: StepShape, most: int, lanes: int, unit: int) -> str:
    """%total of the row's exponentials, and %taken: its largest token (%place), or one that is drawn."""
    adding, finding, walking, ending = Lines("a"), Lines("f"), Lines("w"), Lines("l")
    part, logits, kind = _share_weight(adding, shape), memref((shape.rows, shape.vocab_size), "f32"), vector(lanes)
    total = adding.let(f"arith.addf %so_far, {part} : f32")
    share = _crossed(finding, _share_weight(finding, shape), "%t")
    power = _power(walking, walking.load("%logits", "%row, %v", logits, lanes, "f32"), lanes)
    run = _crossed(walking, walking.hsum(power, lanes), "%v")
    below = ending.let(f"arith.subf {ending.let(f'memref.load %logits[%row, %c] : {logits}')}, %peak : f32")
    scaled = ending.let(f"arith.mulf {below}, %row_scale : f32")
    last = _crossed(ending, ending.exp(scaled, 0), "%c")
    state = "(f32, index, f32)"
    return f"""%row_scale = memref.load %scale[%row] : {memref((shape.rows,), "f32")}
  %total = scf.for %t = %zero to %threads step %one iter_args(%so_far = %nothing) -> (f32) {{
    {adding.text()}
    scf.yield {total} : f32
  }}
  %uniform = memref.load %uniforms[%at, %row] : {memref((most, shape.rows), "f32")}
  %draws = arith.cmpf oge, %uniform, %nothing : f32
  %taken = scf.if %draws -> (i32) {{
    %goal = arith.mulf %uniform, %total : f32
    %all, %share, %before_share = scf.for %t = %zero to %threads step %one
        iter_args(%sum = %nothing, %it = %zero, %before = %nothing) -> {state} {{
      {finding.text()}
      scf.yield {share} : f32, index, f32
    }}
    %vocab = arith.constant {shape.vocab_size} : index
    %unit = arith.constant {unit} : index
    %begin, %end = func.call @share(%vocab, %unit, %share, %threads) : (index, index, index, index) -> (index, index)
    %step = arith.constant {lanes} : index
    %tops = vector.broadcast %peak : f32 to {kind}
    %scales = vector.broadcast %row_scale : f32 to {kind}
    %all_vectors, %run, %before_run = scf.for %v = %begin to %end step %step
        iter_args(%sum = %before_share, %it = %begin, %before = %before_share) -> {state} {{
      {walking.text()}
      scf.yield {run} : f32, index, f32
    }}
    %run_end = arith.addi %run, %step : index
    %all_lanes, %token, %before_token = scf.for %c = %run to %run_end step %one
        iter_args(%sum = %before_run, %it = %run, %before = %before_run) -> {state} {{
      {ending.text()}
      scf.yield {last} : f32, index, f32
    }}
    %token32 = arith.index_cast %token : index to i32
    scf.yield %token32 : i32
  }} else {{
    scf.yield %place : i32
  }}"""


def _crossed(lines: Lines, weight: str, here: str) -> str:
    """Emit the values that a walk carries past `weight` at `here`: the sum so far, and the last place, with the sum before it, that
    weighs anything and before which the sum is not above %goal. The place at which the sum crosses it; where rounding
    lets none cross, the last that weighs anything."""
    after = lines.let(f"arith.addf %sum, {weight} : f32")
    early = lines.let("arith.cmpf ole, %sum, %goal : f32")
    weighs = lines.let(f"arith.cmpf ogt, {weight}, %nothing : f32")
    both = lines.let(f"arith.andi {early}, {weighs} : i1")
    place = lines.let(f"arith.select {both}, {here}, %it : index")
    before = lines.let(f"arith.select {both}, %sum, %before : f32")
    return f"{after}, {place}, {before}"


def end_rows(shape: StepShape) -> str:
    """End a row whose token is `open` and whose likeliest is below the threshold, or no number."""
    kept = memref((shape.rows,), "i32")
    return f"""%probability = arith.divf %whole, %total : f32
  %unlikely = arith.cmpf ult, %probability, %least : f32
  %tokens = memref.load %kept[%row] : {kept}
  %going = arith.cmpi sgt, %tokens, %at32 : i32
  %ends_here = arith.andi %unlikely, %open : i1
  %ends = arith.andi %ends_here, %going : i1
  %remain = arith.select %ends, %at32, %tokens : i32
  memref.store %remain, %kept[%row] : {kept}
  %goes_on = arith.cmpi sgt, %remain, %at32 : i32
  %one_more = arith.select %goes_on, %one32, %zero32 : i32
  %so_many = memref.load %left[%zero] : {ONE_COUNT}
  %now_left = arith.addi %so_many, %one_more : i32
  memref.store %now_left, %left[%zero] : {ONE_COUNT}"""
