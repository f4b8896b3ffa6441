"""Attention of a span of many tokens over its paged context as MLIR text.

First keys and values are laid out anew, in blocks of consecutive positions, so that one vector holds many keys (or many
columns of values) and one number of a query (or one weight) is spread over it: products need no sums across lanes.
Then tiles of queries walk the blocks they may see with a running softmax (FlashAttention, Dao et al. 2022). Where the
processor multiplies pairs of bfloat16, a vector's element is a pair: two columns of a key, two keys' values.

    @paged_attention:  @pack for each block of each group | for each tile:  @rows for each block, then @finish
"""

from __future__ import annotations

from compiled_kernels.paged_attention.mlir_span_finish import finish
from compiled_kernels.paged_attention.mlir_span_pack import pack
from compiled_kernels.paged_attention.mlir_span_rows import rows
from compiled_kernels.paged_attention.mlir_span_shape import BLOCK_POSITIONS, QUERIES_TOGETHER, SpanAttention

__all__ = ["BLOCK", "SpanAttention", "span_text"]


def span_text(shape: SpanAttention) -> str:
    """Emit @paged_attention(q [token, head, dim], k, v, table, (tokens, context), quantized keys, quantized values[,
    sink logits], out), run by all threads at once, with what it calls; @exp must be there."""
    return "\n".join((pack(shape), rows(shape), finish(shape), _entry(shape)))


def _entry(shape: SpanAttention) -> str:
    """Emit @paged_attention: packs blocks of groups in turn with the other threads, then tiles of groups."""
    t = shape.types
    sinks = f"%sinks: {t['sinks']}, " if shape.sink_logits else ""
    return f"""func.func @paged_attention(%q: {t["q"]}, %k: {t["pages"]}, %v: {t["pages"]}, %table: {t["table"]}, %sizes: {t["sizes"]},
    %keys: {t["keys"]}, %values: {t["values"]}, {sinks}%out: {t["q"]}) {{
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
%tokens64 = memref.load %sizes[%zero] : {t["sizes"]}
%context64 = memref.load %sizes[%one] : {t["sizes"]}
%tokens = arith.index_cast %tokens64 : i64 to index
%context = arith.index_cast %context64 : i64 to index
%before = arith.subi %context, %tokens : index
{_packs(shape)}
call @GOMP_barrier() : () -> ()
%sums = memref.alloca() {{alignment = 64 : i64}} : {t["sums"]}
%peaks = memref.alloca() {{alignment = 64 : i64}} : {t["peaks"]}
%totals = memref.alloca() {{alignment = 64 : i64}} : {t["peaks"]}
%weights = memref.alloca() {{alignment = 64 : i64}} : {t["weights"]}
%tiles = arith.ceildivui %tokens, %tile : index
%items = arith.muli %tiles, %groups : index
scf.for %item = %thread to %items step %threads {{
{_tile(shape)}
}}
return
}}"""


def _packs(shape: SpanAttention) -> str:
    """Emit all blocks of all groups, laid out anew."""
    t = shape.types
    return f"""%blocks = arith.ceildivui %context, %length : index
%packs = arith.muli %blocks, %groups : index
scf.for %item = %thread to %packs step %threads {{
  %group = arith.divui %item, %blocks : index
  %block = arith.remui %item, %blocks : index
  func.call @pack(%k, %v, %table, %keys, %values, %group, %block, %blocks, %context)
    : ({t["pages"]}, {t["pages"]}, {t["table"]}, {t["keys"]}, {t["values"]}, index, index, index, index) -> ()
}}"""


def _tile(shape: SpanAttention) -> str:
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
{_block(shape)}
  }}
  func.call @finish({sunk}%sums, %peaks, %totals, %out, %group, %token, %queries)
    : ({sunk_type}{t["sums"]}, {t["peaks"]}, {t["peaks"]}, {t["q"]}, index, index, index) -> ()"""


def _block(shape: SpanAttention) -> str:
    """Emit one block, for all queries of a tile, a few at a time; blocks that none of them sees are passed over."""
    t = shape.types
    return f"""    %start = arith.muli %block, %length : index
    %from = arith.muli %group, %blocks : index
    %at = arith.addi %from, %block : index
{_needed(shape)}
    scf.if %needed {{
      scf.for %slot = %zero to %queries step %step {{
        func.call @rows(%q, %keys, %values, %at, %start, %group, %token, %slot, %queries, %before, %sums, %peaks, %totals, %weights)
          : ({t["q"]}, {t["keys"]}, {t["values"]}, index, index, index, index, index, index, index, {t["sums"]}, {t["peaks"]}, {t["peaks"]}, {t["weights"]}) -> ()
      }}
    }}"""


def _needed(shape: SpanAttention) -> str:
    """Emit %needed: whether the block reaches into the window of the tile's first token, or holds sinks."""
    if not shape.window:
        return "    %needed = arith.constant true"
    return f"""    %earliest = arith.addi %before, %token : index
    %reach = arith.constant {shape.window} : index
    %up_to = arith.addi %earliest, %one : index
    %long = arith.cmpi ugt, %up_to, %reach : index
    %past = arith.subi %up_to, %reach : index
    %nearest = arith.select %long, %past, %zero : index
    %ends = arith.addi %start, %length : index
    %near = arith.cmpi ugt, %ends, %nearest : index
    %sink_end = arith.constant {shape.sinks} : index
    %sink = arith.cmpi ult, %start, %sink_end : index
    %needed = arith.ori %near, %sink : i1"""
