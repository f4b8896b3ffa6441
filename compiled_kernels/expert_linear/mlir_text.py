"""Products of rows with one expert's weight each as MLIR text: rows are grouped by expert, and of an expert that no row
names nothing is read.

    sort: rows in the order of their experts (a counting sort by one thread; the others wait)
    for each expert that has rows: this thread's columns of its weight
      up to 6 rows    @{name}_few   each panel is read once, at memory's pace (see blocked/few.py)
      more            @{name}_many  blocks of the weight in cache, tiles of 6 rows (see blocked/many.py)

All experts' weights are one weight whose columns follow one another, so an expert is a run of its panels. A row's sums
are in the same order in both, and depend on no other row.
"""

from __future__ import annotations

from dataclasses import dataclass

from compiled_kernels.blocked.few import FewRows, Operands, panel_rows, weight_names
from compiled_kernels.blocked.layout import PANEL, PANEL_PAIR
from compiled_kernels.blocked.many import ORDER_TYPE, ManyRows, listed_arguments, many_text, store_sums
from compiled_kernels.blocked.shape import TILE_ROWS, rows_type
from compiled_kernels.builder.functions import function, loop, text_of, when
from compiled_kernels.builder.values import Value, index
from compiled_kernels.mlir_text import SIZE_BOUND, THREADS, Named, Target, call, declare_arguments, memref

LAST_TILES = (1, 2, 4, TILE_ROWS)  # rows of an expert's last tile, each with code of its own


@dataclass(frozen=True)
class ListedRows(FewRows):
    """A product of rows that a list names (see `listed_arguments`), with some panels of a stack of weights. `columns` are those
    of one weight; row i of out is made of row i // `reads` of x. `rows` are those of out."""

    reads: int = 1

    @property
    def x_type(self) -> str:
        return rows_type(self.in_features, self.x_dtype, self.rows // self.reads)

    @property
    def out_type(self) -> str:
        return rows_type(self.columns, self.out_dtype, self.rows)

    @property
    def order_type(self) -> str:
        return memref((self.rows,), "i64")

    @property
    def arguments(self) -> list[Named]:
        """Return the arguments of the product's function; the last ones are `places`."""
        weights = (Named(f"w{i}", kind) for i, kind in enumerate(self.weight_types))
        order, *_ = listed_arguments(self.order_type)
        return [Named("x", self.x_type), *weights, Named("out", self.out_type), order, *self.places]

    @property
    def places(self) -> list[Named]:
        """Return the arguments that say which columns, and which of the list's rows, are an expert's."""
        return [*listed_arguments(self.order_type)[1:], Named("begin", "index"), Named("end", "index")]


@dataclass(frozen=True)
class ExpertProduct:
    """x [row, width] of type `x_dtype` times one of `experts` weights [out, width] in panels, of `weight_dtype` (and
    `quant_group`) as `Panels` has it, into `out` of `out_dtype`; x comes as `many.multiplied_dtype`."""

    name: str
    experts: int
    in_features: int
    out_features: int
    weight_dtype: str
    x_dtype: str
    target: Target
    out_dtype: str = "f32"
    quant_group: int = 0

    @property
    def many(self) -> ManyRows:
        to = {"columns": self.out_features, "out_dtype": self.out_dtype, "quant_group": self.quant_group}
        return ManyRows(f"{self.name}_many", *self._stack, **to, listed=True)

    @property
    def few(self) -> ListedRows:
        width, out, weight, _, target = self._stack
        to = {"columns": self.out_features, "out_dtype": self.out_dtype, "quant_group": self.quant_group}
        entering = self.many.multiplied_dtype
        return ListedRows(f"{self.name}_few", width, out, weight, entering, target, rows=SIZE_BOUND, **to)

    @property
    def arguments(self) -> list[Named]:
        """Return the arguments of the kernel: x, the weights, out, each row's expert, room for the order of
        the rows and for where each expert's rows end, and the number of rows."""
        return [
            Named("x", self.many.x_type),
            *(Named(f"w{i}", kind) for i, kind in enumerate(self.many.weight_types)),
            Named("out", self.many.out_type),
            Named("expert", ORDER_TYPE),
            Named("order", ORDER_TYPE),
            Named("ends", self.ends_type),
            Named("sizes", memref((1,), "i64")),
        ]

    @property
    def ends_type(self) -> str:
        return memref((self.experts,), "i64")

    @property
    def _stack(self) -> tuple[int, int, str, str, Target]:
        return self.in_features, self.experts * self.out_features, self.weight_dtype, self.x_dtype, self.target


def expert_text(product: ExpertProduct) -> str:
    """Emit @{name}(see `arguments`): every thread takes a share of each expert's columns."""
    few, many = product.few, product.many
    entry = f"""func.func @{product.name}({declare_arguments(product.arguments)}) {{
  %zero = arith.constant 0 : index
  %thread, %threads = call @thread() : () -> (index, index)
  %rows64 = memref.load %sizes[%zero] : memref<1xi64>
  %rows = arith.index_cast %rows64 : i64 to index
  %alone = arith.cmpi eq, %thread, %zero : index
  scf.if %alone {{
    func.{call(f"{product.name}_sort", _sorted(product))}
  }}
  call @GOMP_barrier() : () -> ()
  {call(f"{product.name}_experts", _walked(product))}
  return
}}"""
    texts = THREADS, sort_text(product.name, product.experts), few_text(few), many_text(many, store_sums)
    return "\n".join((*texts, _experts_text(product), entry))


def _sorted(product: ExpertProduct) -> list[Named]:
    return [
        Named("expert", ORDER_TYPE),
        Named("order", ORDER_TYPE),
        Named("ends", product.ends_type),
        Named("rows", "index"),
    ]


def _walked(product: ExpertProduct) -> list[Named]:
    given = [each for each in product.arguments if each.name not in ("expert", "sizes")]
    return [*given, *(Named(name, "index") for name in ("thread", "threads", "rows"))]


def _experts_text(product: ExpertProduct) -> str:
    """Emit @{name}_experts(x, weights, out, order, ends, thread, threads, rows)."""
    few, many = product.few, product.many
    body = f"""%own_pair = arith.muli %e, %pairs : index
      %first_pair = arith.addi %own_pair, %mine : index
      %pair_end = arith.addi %own_pair, %mine_end : index
      %count = arith.subi %end, %begin : index
      %is_few = arith.cmpi ule, %count, %tile : index
      scf.if %is_few {{
        func.{call(few.name, few.arguments)}
      }} else {{
        func.{call(many.name, [*few.arguments, Named("rows", "index")])}
      }}"""
    return f"""func.func private @{product.name}_experts({declare_arguments(_walked(product))}) {{
  %zero = arith.constant 0 : index
  %one = arith.constant 1 : index
  %tile = arith.constant {TILE_ROWS} : index
  %pairs = arith.constant {product.out_features // PANEL_PAIR} : index
  %mine, %mine_end = call @share(%pairs, %one, %thread, %threads) : (index, index, index, index) -> (index, index)
  {each_named_expert(product.experts, product.out_features, product.ends_type, body)}
  return
}}"""


def each_named_expert(experts: int, columns: int, ends: str, body: str) -> str:
    """Emit a loop over the experts that rows name, around `body`: an expert's rows are those from %begin to %end of the
    list, and its first column in the stack is %skipped_columns. `ends` is the memref type of %ends."""
    return f"""%experts = arith.constant {experts} : index
  %columns = arith.constant {columns} : index
  %all_rows = scf.for %e = %zero to %experts step %one iter_args(%begin = %zero) -> (index) {{
    %end64 = memref.load %ends[%e] : {ends}
    %end = arith.index_cast %end64 : i64 to index
    %named = arith.cmpi ult, %begin, %end : index
    scf.if %named {{
      %skipped_columns = arith.muli %e, %columns : index
      {body}
    }}
    scf.yield %end : index
  }}"""


def sort_text(name: str, experts: int, order: str = ORDER_TYPE) -> str:
    """Emit @{name}_sort(expert, order, ends, rows): `order` is the rows in the order of their experts, stable, and
    `ends` [expert] where each expert's rows end in it."""
    ends = memref((experts,), "i64")
    return f"""func.func private @{name}_sort(%expert: {order}, %order: {order}, %ends: {ends}, %rows: index) {{
  %zero = arith.constant 0 : index
  %one = arith.constant 1 : index
  %none = arith.constant 0 : i64
  %single = arith.constant 1 : i64
  %experts = arith.constant {experts} : index
  scf.for %e = %zero to %experts step %one {{
    memref.store %none, %ends[%e] : {ends}
  }}
  scf.for %i = %zero to %rows step %one {{
    %e64 = memref.load %expert[%i] : {order}
    %e = arith.index_cast %e64 : i64 to index
    %before = memref.load %ends[%e] : {ends}
    %after = arith.addi %before, %single : i64
    memref.store %after, %ends[%e] : {ends}
  }}
  %all = scf.for %e = %zero to %experts step %one iter_args(%begin = %none) -> (i64) {{
    %count = memref.load %ends[%e] : {ends}
    %next = arith.addi %begin, %count : i64
    memref.store %begin, %ends[%e] : {ends}
    scf.yield %next : i64
  }}
  scf.for %i = %zero to %rows step %one {{
    %e64 = memref.load %expert[%i] : {order}
    %e = arith.index_cast %e64 : i64 to index
    %place64 = memref.load %ends[%e] : {ends}
    %place = arith.index_cast %place64 : i64 to index
    %i64 = arith.index_cast %i : index to i64
    memref.store %i64, %order[%place] : {order}
    %after = arith.addi %place64, %single : i64
    memref.store %after, %ends[%e] : {ends}
  }}
  return
}}"""


def few_text(product: ListedRows) -> str:
    """Return @name(see `arguments`): rows `begin` to `end` of the list, panel by panel: tiles of `TILE_ROWS`, then one
    of what is left, where the last row may be computed more than once."""
    return text_of(lambda: few(product))


def few(product: ListedRows) -> None:
    with function(product.name, product.arguments, inline=False) as given:
        begin, end = given["begin"], given["end"]
        left = (end - begin) % TILE_ROWS
        whole, last = end - left, end - 1
        columns = [given[name] * PANEL_PAIR for name in ("first_pair", "pair_end")]
        operands = Operands(given["x"], [given[each.name] for each in weight_names(product)], given["out"])

        def tile(column: Value, places: list[Value]) -> None:
            """Make the rows at these places of the list times a panel."""
            rows = [given["order"][place].to("index") for place in places]
            read = rows if product.reads == 1 else [row // product.reads for row in rows]
            panel_rows(product, operands, column, read, rows, column - given["skipped_columns"])

        with loop(*columns, PANEL) as panel:
            with loop(begin, whole, TILE_ROWS) as turn:
                tile(panel.index, [turn.index + i for i in range(TILE_ROWS)])
            fewer = 0
            for size in LAST_TILES:
                with when(index(fewer).below(left) & left.below(size + 1)):
                    tile(panel.index, [(whole + i).least(last) for i in range(size)])
                fewer = size
