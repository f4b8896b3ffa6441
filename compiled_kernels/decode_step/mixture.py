"""The mixture of experts of a decode step as MLIR text (Shazeer et al., 2017).

    router | choose, sort by expert | each named expert's gate and up | gate | each named expert's down | weigh, add |

Every thread chooses for itself, in place of waiting for another, and takes its share of every expert's columns. An
expert's weights are read once for all rows that chose it; those of an expert that no row chose are not read. A row's
sums are in one order, alone or beside other rows of its experts.
"""

from __future__ import annotations

from dataclasses import dataclass

from compiled_kernels.blocked.layout import PANEL_PAIR
from compiled_kernels.decode_step.layer_kernel import LayerKernel, weight_arguments_of
from compiled_kernels.decode_step.shape import MixtureShape
from compiled_kernels.expert_linear.mlir_text import ListedRows, each_named_expert, few_text, sort_text
from compiled_kernels.mlir_text import (
    Lines,
    Named,
    call,
    declare_arguments,
    largest_divisor,
    memref,
    number,
    thread_share,
    vector,
)

LEAST = "0xFF800000"  # minus infinity, as MLIR spells it


@dataclass(frozen=True)
class Mixture:
    """The mixture of a kind of layer: names and types of what its functions pass on."""

    layer: LayerKernel

    @property
    def shape(self) -> MixtureShape:
        assert self.layer.shape.experts is not None
        return self.layer.shape.experts

    @property
    def name(self) -> str:
        return self.layer.name

    @property
    def x(self) -> Named:
        """Return what experts read: the rows' norm, in their own type."""
        return Named(
            "normed" if self.layer.expert_dtype == self.layer.step.dtype else "wide_normed",
            self.layer.expert_gate_up.x_type,
        )

    @property
    def chosen(self) -> list[Named]:
        """Return each thread's own: the expert of each row of the feed-forward, those rows by expert, where each
        expert's end, and the rows' weights."""
        rows, order = self.layer.feedforward_rows, self.layer.expert_down.order_type
        ends = Named("ends", memref((self.shape.num_experts,), "i64"))
        return [Named("expert", order), Named("order", order), ends, Named("weights", memref((rows,), "f32"))]

    @property
    def buffers(self) -> list[Named]:
        wide = [self.x] if self.x.name != "normed" else []
        return [*wide, *self.chosen]


def mixture_functions(layer: LayerKernel) -> list[str]:
    """Emit the functions that `mixture_text` calls."""
    of = Mixture(layer)
    products = [few_text(layer.expert_gate_up), few_text(layer.expert_down)]
    sort = sort_text(of.name, of.shape.num_experts, layer.expert_down.order_type)
    return [
        *products,
        sort,
        _choose_text(of),
        _walk_text(of, layer.expert_gate_up),
        _walk_text(of, layer.expert_down),
        _weigh_text(of),
    ]


def mixture_text(layer: LayerKernel, multiply: str) -> str:
    """Emit x += the mixture of the rows' norm, %normed; `multiply` is the call of the router's product."""
    of, step = Mixture(layer), layer.step
    hidden = layer.shape.intermediate_size
    expert, order, ends, weights = of.chosen
    gate_up, down = (
        weight_arguments_of(name, product)
        for name, product in (("gate_up", layer.expert_gate_up), ("down", layer.expert_down))
    )
    gated = [layer.gate_up_out, layer.gated, Named("gate_begin", "index"), Named("gate_end", "index")]
    share = [Named("gate_begin", "index"), Named("gate_end", "index")]
    beside = [Named("up_begin", "index"), Named("up_end", "index")]
    own = [Named("down_begin", "index"), Named("down_end", "index")]
    return "\n".join(
        (
            thread_share("router", of.shape.num_experts, layer.router.block),
            _widened(of),
            multiply,
            "call @GOMP_barrier() : () -> ()",
            call(f"{of.name}_choose", [layer.router_logits, expert, weights]),
            _shown(of),
            f"%chosen_rows = arith.constant {layer.feedforward_rows} : index",
            call(f"{of.name}_sort", [expert, order, ends, Named("chosen_rows", "index")]),
            thread_share("gate", hidden, PANEL_PAIR),
            f"%hidden = arith.constant {hidden} : index",
            "%up_begin = arith.addi %gate_begin, %hidden : index",
            "%up_end = arith.addi %gate_end, %hidden : index",
            call(f"{of.name}_gate_up_experts", [of.x, *gate_up, layer.gate_up_out, order, ends, *share, *beside]),
            call(f"{of.name}_gate", gated),
            "call @GOMP_barrier() : () -> ()",
            thread_share("down", step.hidden_size, PANEL_PAIR),
            call(f"{of.name}_down_experts", [layer.gated, *down, layer.expert_out, order, ends, *own]),
            call(f"{of.name}_weigh", [layer.expert_out, weights, layer.x, *own]),
            "call @GOMP_barrier() : () -> ()",
        )
    )


def _shown(of: Mixture) -> str:
    """Emit %chosen = the experts of each row, by the first thread."""
    (chosen,), expert = of.layer.chosen, of.chosen[0]
    return f"""%shows = arith.cmpi eq, %thread, %zero : index
scf.if %shows {{
  %first_row = arith.constant 0 : index
  %next_row = arith.constant 1 : index
  %all_rows = arith.constant {of.layer.feedforward_rows} : index
  scf.for %shown = %first_row to %all_rows step %next_row {{
    %number = memref.load %{expert.name}[%shown] : {expert.type}
    memref.store %number, %{chosen.name}[%shown] : {chosen.type}
  }}
}}"""


def _widened(of: Mixture) -> str:
    """Emit %wide_normed = %normed as float32, where experts read such: once for all experts of a row."""
    if of.x.name == "normed":
        return ""
    step, lines = of.layer.step, Lines("wn")
    lanes, given = (
        largest_divisor(step.hidden_size, step.target.lanes),
        memref((step.rows, step.hidden_size), step.dtype),
    )
    bounds = [lines.index(bound) for bound in (0, step.rows, 1, step.hidden_size, lanes)]
    lines.emit(f"scf.for %wn_row = {bounds[0]} to {bounds[1]} step {bounds[2]} {{")
    lines.emit(f"scf.for %wn_at = {bounds[0]} to {bounds[3]} step {bounds[4]} {{")
    value = lines.extend(lines.load("%normed", "%wn_row, %wn_at", given, lanes, step.dtype), lanes, step.dtype)
    lines.store(value, "%wide_normed", "%wn_row, %wn_at", of.x.type, lanes)
    lines.emit("}\n}")
    return lines.text()


def _walk_text(of: Mixture, product: ListedRows) -> str:
    """Emit @{product}_experts(x, weights and scales, out, order, ends, first, last, ...): of every expert that a row chose, the
    columns of out from `first` to `last`, for each such pair of bounds."""
    runs = 2 if product.reads > 1 or product.name.endswith("gate_up") else 1
    bounds = [Named(f"{name}{run}", "index") for run in range(runs) for name in ("first", "last")]
    given, ends = product.arguments[: -len(product.places)], of.chosen[2]
    calls = "\n".join(_expert_call(product, f"{run}") for run in range(runs))
    return f"""func.func private @{product.name}_experts({declare_arguments([*given, ends, *bounds])}) {{
%zero = arith.constant 0 : index
%one = arith.constant 1 : index
%pair_columns = arith.constant {PANEL_PAIR} : index
{each_named_expert(of.shape.num_experts, product.columns, ends.type, calls)}
return
}}"""


def _expert_call(product: ListedRows, run: str) -> str:
    """Emit the product of an expert's rows with its columns from %first to %last of this run."""
    renamed = {"first_pair": f"first_pair{run}", "pair_end": f"pair_end{run}"}
    given = [Named(renamed.get(name, name), kind) for name, kind in product.arguments]
    return f"""%begin_column{run} = arith.addi %skipped_columns, %first{run} : index
    %end_column{run} = arith.addi %skipped_columns, %last{run} : index
    %first_pair{run} = arith.divui %begin_column{run}, %pair_columns : index
    %pair_end{run} = arith.divui %end_column{run}, %pair_columns : index
    func.{call(product.name, given)}"""


def _choose_text(of: Mixture) -> str:
    """Emit @{name}_choose(logits [row, expert], expert [row x chosen], weights [row x chosen]): of each row the experts
    with the largest scores, the first of equal ones, and their weights."""
    shape, logits = of.shape, of.layer.router_logits.type
    chosen, weights, scores = of.chosen[0].type, of.chosen[3].type, memref((shape.num_experts,), "f32")
    normed = {"softmax": _softmax("scores", scores, "%none", "%experts"), "sigmoid": _sigmoid(scores), "logit": ""}[
        shape.score
    ]
    after = _softmax("weights", weights, "%first_place", "%last_place") if shape.softmax_chosen else ""
    after += _divided(weights) if shape.renormalize else ""
    after += _times(weights, shape.factor) if shape.factor != 1 else ""
    given = [Named("logits", logits), Named("expert", chosen), Named("weights", weights)]
    return f"""func.func private @{of.name}_choose({declare_arguments(given)}) {{
%none = arith.constant 0 : index
%one = arith.constant 1 : index
%rows = arith.constant {of.layer.step.rows} : index
%experts = arith.constant {shape.num_experts} : index
%per_row = arith.constant {shape.per_row} : index
%least = arith.constant {LEAST} : f32
%nothing = arith.constant 0.0 : f32
%unit = arith.constant 1.0 : f32
%scores = memref.alloca() : {scores}
%left = memref.alloca() : {scores}
scf.for %row = %none to %rows step %one {{
  %first_place = arith.muli %row, %per_row : index
  %last_place = arith.addi %first_place, %per_row : index
  scf.for %e = %none to %experts step %one {{
    %logit = memref.load %logits[%row, %e] : {logits}
    memref.store %logit, %scores[%e] : {scores}
  }}
  {normed}
  scf.for %e = %none to %experts step %one {{
    %score = memref.load %scores[%e] : {scores}
    memref.store %score, %left[%e] : {scores}
  }}
  scf.for %place = %first_place to %last_place step %one {{
    %most, %best = scf.for %e = %none to %experts step %one iter_args(%peak = %least, %at = %none) -> (f32, index) {{
      %score = memref.load %left[%e] : {scores}
      %better = arith.cmpf ogt, %score, %peak : f32
      %next_peak = arith.select %better, %score, %peak : f32
      %next_at = arith.select %better, %e, %at : index
      scf.yield %next_peak, %next_at : f32, index
    }}
    %number = arith.index_cast %best : index to i64
    memref.store %number, %expert[%place] : {chosen}
    %weight = memref.load %scores[%best] : {scores}
    memref.store %weight, %weights[%place] : {weights}
    memref.store %least, %left[%best] : {scores}
  }}
  {after}
}}
return
}}"""


def _softmax(name: str, kind: str, begin: str, end: str) -> str:
    """Emit %name[begin..end] = its softmax."""
    return f"""%{name}_peak = scf.for %i = {begin} to {end} step %one iter_args(%peak = %least) -> (f32) {{
    %value = memref.load %{name}[%i] : {kind}
    %next = arith.maximumf %value, %peak : f32
    scf.yield %next : f32
  }}
  %{name}_total = scf.for %i = {begin} to {end} step %one iter_args(%sum = %nothing) -> (f32) {{
    %value = memref.load %{name}[%i] : {kind}
    %below = arith.subf %value, %{name}_peak : f32
    %power = math.exp %below : f32
    memref.store %power, %{name}[%i] : {kind}
    %next = arith.addf %sum, %power : f32
    scf.yield %next : f32
  }}
  scf.for %i = {begin} to {end} step %one {{
    %value = memref.load %{name}[%i] : {kind}
    %part = arith.divf %value, %{name}_total : f32
    memref.store %part, %{name}[%i] : {kind}
  }}
"""


def _sigmoid(kind: str) -> str:
    return f"""scf.for %i = %none to %experts step %one {{
    %value = memref.load %scores[%i] : {kind}
    %below = arith.negf %value : f32
    %power = math.exp %below : f32
    %whole = arith.addf %power, %unit : f32
    %part = arith.divf %unit, %whole : f32
    memref.store %part, %scores[%i] : {kind}
  }}
"""


def _divided(kind: str) -> str:
    """Emit the row's weights divided by their sum, as the router of the model does it."""
    return f"""%small = arith.constant {number(1e-20)} : f32
  %all = scf.for %i = %first_place to %last_place step %one iter_args(%sum = %nothing) -> (f32) {{
    %value = memref.load %weights[%i] : {kind}
    %next = arith.addf %sum, %value : f32
    scf.yield %next : f32
  }}
  %divisor = arith.addf %all, %small : f32
  scf.for %i = %first_place to %last_place step %one {{
    %value = memref.load %weights[%i] : {kind}
    %part = arith.divf %value, %divisor : f32
    memref.store %part, %weights[%i] : {kind}
  }}
"""


def _times(kind: str, factor: float) -> str:
    return f"""%factor = arith.constant {number(factor)} : f32
  scf.for %i = %first_place to %last_place step %one {{
    %value = memref.load %weights[%i] : {kind}
    %scaled = arith.mulf %value, %factor : f32
    memref.store %scaled, %weights[%i] : {kind}
  }}
"""


def _weigh_text(of: Mixture) -> str:
    """Emit @{name}_weigh(out [row x chosen, column], weights [row x chosen], x [row, column], begin, end): x += the
    weighted sum of each row's experts, of the columns from begin to end."""
    layer = of.layer
    lanes, x, out, weights = (
        largest_divisor(layer.step.hidden_size, layer.step.target.lanes),
        layer.x,
        layer.expert_out,
        of.chosen[3],
    )
    given = [Named("out", out.type), weights, x, Named("begin", "index"), Named("end", "index")]
    return f"""func.func private @{of.name}_weigh({declare_arguments(given)}) {{
%none = arith.constant 0 : index
%one = arith.constant 1 : index
%rows = arith.constant {layer.step.rows} : index
%per_row = arith.constant {of.shape.per_row} : index
%step = arith.constant {lanes} : index
%nothing = arith.constant dense<0.0> : {vector(lanes)}
scf.for %row = %none to %rows step %one {{
  %first = arith.muli %row, %per_row : index
  %last = arith.addi %first, %per_row : index
  scf.for %at = %begin to %end step %step {{
    %total = scf.for %place = %first to %last step %one iter_args(%sum = %nothing) -> ({vector(lanes)}) {{
      %weight = memref.load %weights[%place] : {weights.type}
      %factor = vector.broadcast %weight : f32 to {vector(lanes)}
      %value = vector.load %out[%place, %at] : {out.type}, {vector(lanes)}
      %next = vector.fma %factor, %value, %sum : {vector(lanes)}
      scf.yield %next : {vector(lanes)}
    }}
    %before = vector.load %x[%row, %at] : {x.type}, {vector(lanes)}
    %moved = arith.addf %before, %total : {vector(lanes)}
    vector.store %moved, %x[%row, %at] : {x.type}, {vector(lanes)}
  }}
}}
return
}}"""
