"""Attention of a span of many tokens over its paged context as MLIR text.

First keys and values are laid out anew, in blocks of consecutive positions. So one vector holds many keys (or many
columns of values), and one number of a query (or one weight) is spread over it: products need no sums across lanes.
Then tiles of queries walk the blocks they may see with a running softmax (FlashAttention, Dao et al. 2022). Where the
processor multiplies pairs of bfloat16, a vector's element is a pair: two columns of a key, two keys' values.

    @paged_attention:  @pack for each block of each KV head | for each tile:  @rows for each block, then @finish
"""

from __future__ import annotations

from dataclasses import replace

from compiled_kernels.mlir_text import Lines, largest_divisor, vector
from compiled_kernels.paged_attention.mlir_rules import Rules
from compiled_kernels.paged_attention.mlir_shape import BLOCK_POSITIONS, QUERIES_TOGETHER, SpanAttention
from compiled_kernels.paged_attention.mlir_span_tile import finish, rows


def pack(shape: SpanAttention) -> str:
    """Emit @pack(k, v, table, keys [at, dim, key], values [at, key, dim], group, block, blocks, context): the keys and
    values of one block of one group go to at = group * blocks + block; zeros beyond the context and for the null page, which replaces freed
    pages."""
    t = shape.types
    zero = "arith.constant 0 : i32" if shape.uses_bf16_pairs else "arith.constant 0.0 : f32"
    return f"""func.func private @pack(%k: {t["pages"]}, %v: {t["pages"]}, %table: {t["table"]}, %keys: {t["keys"]},
    %values: {t["values"]}, %group: index, %block: index, %blocks: index, %context: index) {{
%zero = arith.constant 0 : index
%one = arith.constant 1 : index
%size = arith.constant {shape.page_size} : index
%length = arith.constant {BLOCK_POSITIONS} : index
%each = arith.constant {shape.values_per_element} : index
%halves = arith.constant {BLOCK_POSITIONS // shape.values_per_element} : index
%elements = arith.constant {shape.head_dim // shape.values_per_element} : index
%dim = arith.constant {shape.head_dim} : index
%sixteen = arith.constant 16 : index
%nothing = {zero}
%mine = arith.muli %group, %blocks : index
%at = arith.addi %mine, %block : index
%start = arith.muli %block, %length : index
scf.for %half = %zero to %halves step %one {{
  scf.for %d = %zero to %dim step %one {{
    memref.store %nothing, %values[%at, %half, %d] : {t["values"]}
  }}
}}
scf.for %key = %zero to %length step %one {{
  %position = arith.addi %start, %key : index
  %known = arith.cmpi ult, %position, %context : index
  %there = scf.if %known -> (i1) {{
{_held(shape)}
    scf.yield %held : i1
  }} else {{
    scf.yield %known : i1
  }}
  scf.if %there {{
{_copied(shape)}
  }} else {{
    scf.for %d = %zero to %elements step %one {{
      memref.store %nothing, %keys[%at, %d, %key] : {t["keys"]}
    }}
  }}
}}
return
}}"""


def _held(shape: SpanAttention) -> str:
    """Emit %held: whether %position lies in a page and not in the null page."""
    return f"""    %slot = arith.divui %position, %size : index
    %found = memref.load %table[%slot] : {shape.types["table"]}
    %null = arith.constant 0 : i32
    %held = arith.cmpi ne, %found, %null : i32"""


def _copied(shape: SpanAttention) -> str:
    """Emit one key and its value, of %position; they are the `side` of the pair `half`."""
    return f"""    %place = arith.divui %position, %size : index
    %offset = arith.remui %position, %size : index
    %number = memref.load %table[%place] : {shape.types["table"]}
    %page = arith.index_cast %number : i32 to index
    %half = arith.divui %key, %each : index
    %side = arith.remui %key, %each : index
    %bits = arith.muli %side, %sixteen : index
    %shift = arith.index_cast %bits : index to i32
    {_key(shape)}
    {_value(shape)}"""


def _key(shape: SpanAttention) -> str:
    """Emit one key's elements, each into its own row of the block: an element of a pair is two columns."""
    t, lines = shape.types, Lines()
    read = largest_divisor(shape.head_dim, 32 if shape.uses_bf16_pairs else shape.lanes)
    elements_type = vector(read // shape.values_per_element, shape.element_type)
    for at in range(0, shape.head_dim, read):
        column = lines.index(at)
        loaded = lines.load("%k", f"%page, %group, %offset, {column}", t["pages"], read, shape.dtype)
        if shape.uses_bf16_pairs:
            elements = lines.let(f"vector.bitcast {loaded} : {vector(read, shape.dtype)} to {elements_type}")
        else:
            elements = lines.extend(loaded, read, shape.dtype)
        for i in range(read // shape.values_per_element):
            element = lines.let(f"vector.extract {elements}[{i}] : {shape.element_type} from {elements_type}")
            place = lines.index(at // shape.values_per_element + i)
            lines.emit(f"memref.store {element}, %keys[%at, {place}, %key] : {t['keys']}")
    return lines.text()


def _value(shape: SpanAttention) -> str:
    """Emit one value's row: an element of a pair is two keys' values, which come one after the other."""
    t, lanes, lines = shape.types, shape.columns, Lines("u")
    for at in range(0, shape.head_dim, lanes):
        column = lines.index(at)
        loaded = lines.load("%v", f"%page, %group, %offset, {column}", t["pages"], lanes, shape.dtype)
        value = (
            _joined(lines, shape, loaded, column) if shape.uses_bf16_pairs else lines.extend(loaded, lanes, shape.dtype)
        )
        lines.store(value, "%values", f"%at, %half, {column}", t["values"], lanes, shape.element_type)
    return lines.text()


def _joined(lines: Lines, shape: SpanAttention, loaded: str, column: str) -> str:
    """Emit the block's elements, with bfloat16 values in the half of each element that is %shift bits up."""
    lanes = shape.columns
    words, out = vector(lanes, "i16"), vector(lanes, shape.element_type)
    bits = lines.let(f"vector.bitcast {loaded} : {vector(lanes, shape.dtype)} to {words}")
    bits = lines.let(f"arith.extui {bits} : {words} to {out}")
    shift = lines.let(f"vector.broadcast %shift : i32 to {out}")
    bits = lines.let(f"arith.shli {bits}, {shift} : {out}")
    before = lines.load("%values", f"%at, %half, {column}", shape.types["values"], lanes, shape.element_type)
    return lines.let(f"arith.ori {before}, {bits} : {out}")


def span_text(shape: SpanAttention) -> str:
    """Emit @paged_attention(q [token, head, dim], k, v, table, (tokens, context, held)[, chosen], keys and values in the
    new layout[, sink logits], out), run by all threads at once, with what it calls."""
    rules = Rules(shape, "span")
    entry = _entry(shape, rules)
    return "\n".join((rules.text, pack(shape), rows(shape), finish(shape), entry))


def _entry(shape: SpanAttention, rules: Rules) -> str:
    """Emit @paged_attention: packs blocks of groups in turn with the other threads, then tiles of groups."""
    t = shape.types
    sinks = f"%sinks: {t['sinks']}, " if shape.sink_logits else ""
    chosen = f"%chosen: {t['chosen']}, " if shape.selected else ""
    return f"""func.func @paged_attention(%q: {t["q"]}, %k: {t["pages"]}, %v: {t["pages"]}, %table: {t["table"]}, %sizes: {t["sizes"]},
    {chosen}%keys: {t["keys"]}, %values: {t["values"]}, {sinks}%out: {t["q"]}) {{
%thread, %threads = call @thread() : () -> (index, index)
%zero = arith.constant 0 : index
%one = arith.constant 1 : index
%length = arith.constant {BLOCK_POSITIONS} : index
%groups = arith.constant {shape.num_kv_heads} : index
%share = arith.constant {shape.queries_per_kv} : index
%tile = arith.constant {shape.tile_tokens} : index
%step = arith.constant {QUERIES_TOGETHER} : index
%dim = arith.constant {shape.head_dim} : index
%slots = arith.constant {shape.tile_slots} : index
%none = arith.constant 0xFF800000 : f32
%nothing = arith.constant 0.0 : f32
%never = arith.constant false
%tokens64 = memref.load %sizes[%zero] : {t["sizes"]}
%context64 = memref.load %sizes[%one] : {t["sizes"]}
%tokens = arith.index_cast %tokens64 : i64 to index
%context = arith.index_cast %context64 : i64 to index
%before = arith.subi %context, %tokens : index
%two = arith.constant 2 : index
%held64 = memref.load %sizes[%two] : {t["sizes"]}
%held = arith.index_cast %held64 : i64 to index
{_packs(shape, rules)}
call @GOMP_barrier() : () -> ()
%sums = memref.alloca() {{alignment = 64 : i64}} : {t["sums"]}
%peaks = memref.alloca() {{alignment = 64 : i64}} : {t["peaks"]}
%totals = memref.alloca() {{alignment = 64 : i64}} : {t["peaks"]}
%weights = memref.alloca() {{alignment = 64 : i64}} : {t["weights"]}
%tiles = arith.ceildivui %tokens, %tile : index
%items = arith.muli %tiles, %groups : index
scf.for %item = %thread to %items step %threads {{
{_tile(shape, rules)}
}}
return
}}"""


def _packs(shape: SpanAttention, rules: Rules) -> str:
    """Emit all blocks of all groups, laid out anew, but for those that the mask hides from every query."""
    t, lines, packed = shape.types, Lines("p"), "%always"
    lines.emit("%always = arith.constant true")
    if shape.mask:
        first = lines.let("arith.muli %block, %length : index")
        after = lines.let(f"arith.addi {first}, %length : index")
        ends = (lines.let(f"arith.subi {each}, %one : index") for each in ("%context", after))
        last_query, last_key = ends
        packed = rules.needed(lines, ("%before", last_query), (first, last_key))
    return f"""%blocks = arith.ceildivui %context, %length : index
%packs = arith.muli %blocks, %groups : index
scf.for %item = %thread to %packs step %threads {{
  %group = arith.divui %item, %blocks : index
  %block = arith.remui %item, %blocks : index
{lines.text()}
  scf.if {packed} {{
    func.call @pack(%k, %v, %table, %keys, %values, %group, %block, %blocks, %context)
      : ({t["pages"]}, {t["pages"]}, {t["table"]}, {t["keys"]}, {t["values"]}, index, index, index, index) -> ()
  }}
}}"""


def _tile(shape: SpanAttention, rules: Rules) -> str:
    """Emit one tile: `queries` queries of `group`, whose first token is `token`, over every block up to their own."""
    t = shape.types
    sunk, sunk_type = ("%sinks, ", f"{t['sinks']}, ") if shape.sink_logits else ("", "")
    return f"""  %number = arith.divui %item, %groups : index
  %group = arith.remui %item, %groups : index
  %token = arith.muli %number, %tile : index
  %left = arith.subi %tokens, %token : index
  %mine = arith.minui %left, %tile : index
  %queries = arith.muli %mine, %share : index
  scf.for %slot = %zero to %slots step %one {{
    memref.store %none, %peaks[%slot] : {t["peaks"]}
    memref.store %nothing, %totals[%slot] : {t["peaks"]}
    scf.for %d = %zero to %dim step %one {{
      memref.store %nothing, %sums[%slot, %d] : {t["sums"]}
    }}
  }}
  %end = arith.addi %token, %mine : index
  %seen = arith.addi %before, %end : index
  %last = arith.ceildivui %seen, %length : index
  scf.for %block = %zero to %last step %one {{
{_block(shape, rules)}
  }}
  func.call @finish({sunk}%sums, %peaks, %totals, %out, %group, %token, %queries)
    : ({sunk_type}{t["sums"]}, {t["peaks"]}, {t["peaks"]}, {t["q"]}, index, index, index) -> ()"""


def _block(shape: SpanAttention, rules: Rules) -> str:
    """Emit one block, for all queries of a tile, a few at a time; blocks that none of them sees are passed over."""
    t = shape.types
    chosen, kinds = (", %chosen, %held", f", {t['chosen']}, index") if shape.selected else ("", "")
    return f"""    %start = arith.muli %block, %length : index
    %from = arith.muli %group, %blocks : index
    %at = arith.addi %from, %block : index
{_needed(shape, rules)}
    scf.if %needed {{
      scf.for %slot = %zero to %queries step %step {{
        func.call @rows(%q, %keys, %values, %at, %start, %group, %token, %slot, %queries, %before, %sums, %peaks, %totals, %weights{chosen})
          : ({t["q"]}, {t["keys"]}, {t["values"]}, index, index, index, index, index, index, index, {t["sums"]}, {t["peaks"]}, {t["peaks"]}, {t["weights"]}{kinds}) -> ()
      }}
    }}"""


def _needed(shape: SpanAttention, rules: Rules) -> str:
    """Emit %needed: whether the block reaches into the window of the tile's first token, or holds sinks; and whether
    the mask may show one of its keys to one of the tile's queries."""
    if shape.selected:
        without = _needed(replace(shape, selected=False), rules).replace("%needed =", "%in_reach =")
        return f"{without}\n{_chosen_by_any(shape)}"
    if not shape.mask:
        return _in_window(shape, "needed")
    lines = Lines("n")
    first = lines.let("arith.addi %before, %token : index")
    ends = (lines.let(f"arith.addi {each}, {many} : index") for each, many in ((first, "%mine"), ("%start", "%length")))
    last_query, last_key = (lines.let(f"arith.subi {each}, %one : index") for each in ends)
    shown = rules.needed(lines, (first, last_query), ("%start", last_key))
    return f"""{_in_window(shape, "near_enough")}
{lines.text()}
    %needed = arith.andi %near_enough, {shown} : i1"""


def _chosen_by_any(shape: SpanAttention) -> str:
    """Emit %needed: whether the block is in reach, and one of the tile's tokens has chosen a page that lies in it."""
    kind = shape.types["chosen"]
    return f"""    %page_size = arith.constant {shape.page_size} : index
    %first_page = arith.divui %start, %page_size : index
    %block_end = arith.addi %start, %length : index
    %known_end = arith.minui %block_end, %context : index
    %after_pages = arith.ceildivui %known_end, %page_size : index
    %needed = scf.for %t = %zero to %mine step %one iter_args(%any = %never) -> (i1) {{
      %row = arith.addi %token, %t : index
      %lines = arith.muli %row, %groups : index
      %line = arith.addi %lines, %group : index
      %places = arith.muli %line, %held : index
      %found = scf.for %page = %first_page to %after_pages step %one iter_args(%some = %any) -> (i1) {{
        %place = arith.addi %places, %page : index
        %read = memref.load %chosen[%place] : {kind}
        %none_read = arith.constant 0 : i8
        %is_read = arith.cmpi ne, %read, %none_read : i8
        %both = arith.andi %is_read, %in_reach : i1
        %either = arith.ori %some, %both : i1
        scf.yield %either : i1
      }}
      scf.yield %found : i1
    }}"""


def _in_window(shape: SpanAttention, name: str) -> str:
    if not shape.sliding_window:
        return f"    %{name} = arith.constant true"
    return f"""    %earliest = arith.addi %before, %token : index
    %reach = arith.constant {shape.sliding_window} : index
    %up_to = arith.addi %earliest, %one : index
    %long = arith.cmpi ugt, %up_to, %reach : index
    %past = arith.subi %up_to, %reach : index
    %nearest = arith.select %long, %past, %zero : index
    %ends = arith.addi %start, %length : index
    %near = arith.cmpi ugt, %ends, %nearest : index
    %sink_end = arith.constant {shape.num_sink_tokens} : index
    %sink = arith.cmpi ult, %start, %sink_end : index
    %{name} = arith.ori %near, %sink : i1"""
