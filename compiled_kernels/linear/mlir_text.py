"""Products of a few rows with a weight matrix as MLIR text: each weight is read once, for all rows, at memory's pace.

The weight's rows are walked in blocks; a block's sums stay in registers, one vector for each pair of weight row and
token. Dense bfloat16 weights and codes meet bfloat16 tokens in dot products of pairs where the processor has them, and
in float32 otherwise; codes are exact in either. A group of columns is summed apart:

    out = sum over groups of  scale * sum(code * x) + minimum * sum(x)

where the sum of x of a group is made once for a block of rows.
"""

from __future__ import annotations

from compiled_kernels.linear.mlir_codes import CODE_BITS, code_unit, code_vectors
from compiled_kernels.linear.mlir_shape import MAX_ROWS_TOGETHER, Product
from compiled_kernels.linear_w8a8.mlir_rows import dot, row_scale, scaled
from compiled_kernels.mlir_text import Lines, Named, declare_arguments, number, vector

__all__ = ["Product", "product_text"]


def multiply(lines: Lines, product: Product, sums: str, weight: str, x: str) -> str:
    return (
        lines.dot_pairs(sums, weight, x)
        if product.uses_bf16_pairs
        else lines.fma(weight, x, sums, product.values_per_vector)
    )


def x_vector(lines: Lines, product: Product, token: str, column: str) -> str:
    loaded = lines.load("%x", f"{token}, {column}", product.x_type, product.values_per_vector, product.x_dtype)
    return loaded if product.uses_bf16_pairs else lines.extend(loaded, product.values_per_vector, product.x_dtype)


def fetch(lines: Lines, product: Product, row: str, column: str) -> None:
    """Ask for what the next block of rows reads there: the end of a short row is no end to the memory."""
    if product.prefetch_rows:
        later = lines.let(f"arith.addi {row}, {lines.index(product.prefetch_rows)} : index")
        lines.emit(f"memref.prefetch %w0[{later}, {column}], read, locality<3>, data : {product.weight_types[0]}")


def weight_vector(lines: Lines, product: Product, row: str) -> str:
    """Emit columns from %k of a weight's row that is dense, or of 8 bits with one scale."""
    if product.weight_dtype in CODE_BITS:
        return _codes(lines, product, row, "%k", True)[0]
    fetch(lines, product, row, "%k")
    loaded = lines.load("%w0", f"{row}, %k", product.weight_types[0], product.values_per_vector, product.weight_dtype)
    if product.uses_bf16_pairs:
        return loaded
    return lines.extend(loaded, product.values_per_vector, product.weight_dtype)


def halves_joined(product: Product) -> bool:
    """Return whether a group of 4-bit codes is one vector of pairs, its low halves and its high halves side by side."""
    return product.uses_bf16_pairs and product.in_halves and product.quant_group == 32


def _codes(lines: Lines, product: Product, row: str, byte: str, fetched: bool) -> list[str]:
    """Emit a vector of bytes of a weight's row from `byte` on, as numbers; what comes after it too, if `fetched`."""
    if fetched:
        fetch(lines, product, row, byte)
    count, element = product.values_per_vector, "bf16" if product.uses_bf16_pairs else "f32"
    loaded = lines.load("%w0", f"{row}, {byte}", product.weight_types[0], count, "i8")
    return code_vectors(lines, product.weight_dtype, loaded, count, element, halves_joined(product))


def product_text(product: Product) -> str:
    """Emit @name(x [rows, width], weight, scales, bias (see `weight_types`), out [rows, out] f32, begin, end[, rows]):
    the output columns from begin to end, both multiples of `block`."""
    weights = (Named(f"w{i}", kind) for i, kind in enumerate(product.weight_types))
    arguments = declare_arguments([Named("x", product.x_type), *weights, Named("out", product.out_type)])
    lines = Lines()
    step = lines.index(product.block)
    lines.emit(f"scf.for %o = %begin to %end step {step} {{")
    if product.any_rows:
        _runs(lines, product)
    else:
        for first in range(0, product.rows, MAX_ROWS_TOGETHER):
            tokens = [lines.index(number) for number in range(first, min(first + MAX_ROWS_TOGETHER, product.rows))]
            _block(lines, product, tokens, str(first))
    lines.emit("}")
    bounds = "%begin: index, %end: index" + (", %rows: index" if product.any_rows else "")
    head = f"func.func private @{product.name}({arguments}, {bounds}) attributes {{no_inline}}"
    return f"{head} {{\n{lines.text()}\nreturn\n}}"


def _runs(lines: Lines, product: Product) -> None:
    """Emit all of %rows tokens, a run of `rows` at a time; the last run begins early enough to be whole."""
    zero, together = lines.index(0), lines.index(product.rows)
    last = lines.let(f"arith.subi %rows, {together} : index")
    lines.emit(f"scf.for %run = {zero} to %rows step {together} {{")
    first = lines.let(f"arith.minui %run, {last} : index")
    tokens = [lines.let(f"arith.addi {first}, {lines.index(i)} : index") for i in range(product.rows)]
    _block(lines, product, tokens, "run")
    lines.emit("}")


def _block(lines: Lines, product: Product, tokens: list[str], run: str) -> None:
    """Emit the block of weight rows that begins with %o, with these tokens; `run` makes its names differ from those
    of others.

    Sums are in the order of (row, token), here and below.
    """
    lanes, kind = product.lanes, "i32" if product.w8a8 else "f32"
    zero = lines.constant("0" if product.w8a8 else "0.0", lanes, kind)
    rows = [lines.let(f"arith.addi %o, {lines.index(i)} : index") for i in range(product.block)]
    names = [f"%s{i}_{run}" for i in range(len(rows) * len(tokens))]
    start, end = lines.index(0), lines.index(product.in_features - product.last_group)
    step = lines.index(product.quant_group or product.values_per_vector)
    over = f"%k = {start} to {end} step {step}"
    found = lines.begin_loop(f"%sums{run}", over, names, [zero] * len(names), lanes, kind)
    if product.quant_group:
        moved = _group(lines, product, rows, tokens, names, "%k", product.quant_group)
    else:
        moved = (_integers if product.w8a8 else _columns)(lines, product, rows, tokens, names)
    lines.end_loop(moved, lanes, kind)
    if product.last_group:
        found = _group(lines, product, rows, tokens, found, end, product.last_group)
    totals = _integer_totals(lines, product, tokens, found) if product.w8a8 else _totals(lines, found, lanes)
    _store(lines, product, rows, tokens, totals)


def _columns(lines: Lines, product: Product, rows: list[str], tokens: list[str], sums: list[str]) -> list[str]:
    """Emit the step in which one vector of columns joins the sums."""
    weights = [weight_vector(lines, product, row) for row in rows]
    x, carried = [x_vector(lines, product, token, "%k") for token in tokens], iter(sums)
    return [multiply(lines, product, next(carried), weight, each) for weight in weights for each in x]


def _integers(lines: Lines, product: Product, rows: list[str], tokens: list[str], sums: list[str]) -> list[str]:
    """One vector of columns joins the sums, as integers."""
    int8, weights = product.int8_rows, []
    for row in rows:
        fetch(lines, product, row, "%k")
        loaded = lines.load("%w0", f"{row}, %k", product.weight_types[0], product.values_per_vector, "i8")
        weights.append(_as_words(lines, loaded, int8.values, product.lanes))
    word = lines.let(f"arith.divui %k, {lines.index(int8.values)} : index")
    x = [lines.load("%x", f"{token}, {word}", product.x_type, product.lanes, "i32") for token in tokens]
    carried = iter(sums)
    return [dot(lines, int8, next(carried), weight, each) for weight in weights for each in x]


def _as_words(lines: Lines, octets: str, values: int, lanes: int) -> str:
    """Bytes of a weight's row as words of so many values, as `dot` takes them."""
    given, kind = vector(values * lanes, "i8"), vector(lanes, "i32")
    if values == 1:
        return lines.let(f"arith.extsi {octets} : {given} to {kind}")
    if values == 2:
        wide = vector(2 * lanes, "i16")
        return lines.let(f"vector.bitcast {lines.let(f'arith.extsi {octets} : {given} to {wide}')} : {wide} to {kind}")
    above = lines.let(f"arith.xori {octets}, {lines.constant('-128', 4 * lanes, 'i8')} : {given}")
    return lines.let(f"vector.bitcast {above} : {given} to {kind}")


def _integer_totals(lines: Lines, product: Product, tokens: list[str], vectors: list[str]) -> list[str]:
    """Each vector's sum across its lanes times its token's scale, as float32."""
    kind, totals = vector(product.lanes, "i32"), []
    scales = [row_scale(lines, product.int8_rows, Named("x", product.x_type), token) for token in tokens]
    for place, found in enumerate(vectors):
        whole = lines.let(f"vector.reduction <add>, {found} : {kind} into i32")
        totals.append(scaled(lines, whole, *scales[place % len(tokens)], 0))
    return totals


def _group(
    lines: Lines, product: Product, rows: list[str], tokens: list[str], sums: list[str], start: str, columns: int
) -> list[str]:
    """Emit the step in which a group of `columns` columns from `start` on joins the sums: its products are summed
    apart, then scaled; its minimum is multiplied with the sum of its x."""
    halves = 2 if product.in_halves else 1
    byte_at = lines.let(f"arith.divui {start}, {lines.index(halves)} : index")
    group_at = lines.let(f"arith.divui {start}, {lines.index(product.quant_group)} : index")
    runs = range(0, columns // halves, product.values_per_vector)  # of bytes
    x = [_group_x(lines, product, token, start, runs) for token in tokens]
    x_sums = [_x_sum(lines, product, each) for each in x] if product.minima else []
    moved, carried = [], iter(sums)
    for row in rows:
        weights: list[str] = []
        for at in runs:
            byte = lines.let(f"arith.addi {byte_at}, {lines.index(at)} : index")
            weights += _codes(lines, product, row, byte, at == 0)
        scale = _of_group(lines, product, 1, row, group_at)
        minimum = _of_group(lines, product, 2, row, group_at) if product.minima else ""
        for place, each in enumerate(x):
            part = lines.constant("0.0", product.lanes)
            for weight, values in zip(weights, each, strict=True):
                part = multiply(lines, product, part, weight, values)
            found = lines.fma(part, scale, next(carried), product.lanes)
            moved.append(lines.fma(x_sums[place], minimum, found, product.lanes) if product.minima else found)
    return moved


def _of_group(lines: Lines, product: Product, place: int, row: str, group: str) -> str:
    """Emit the scale (`place` 1) or minimum (2) of a row's group, broadcast."""
    kind, element = product.weight_types[place], product.scales if place == 1 else product.minima
    stored = lines.let(f"memref.load %w{place}[{row}, {group}] : {kind}")
    wide = stored if element == "f32" else lines.let(f"arith.extf {stored} : {element} to f32")
    return lines.splat(wide, product.lanes)


def _x_sum(lines: Lines, product: Product, vectors: list[str]) -> str:
    """Emit the sum of vectors of x, in a vector as long as those of sums."""
    if product.uses_bf16_pairs:
        found, ones = lines.constant("0.0", product.lanes), lines.constant("1.0", 32, "bf16")
        for each in vectors:
            found = lines.dot_pairs(found, ones, each)
        return found
    found, *others = vectors
    for each in others:
        found = lines.let(f"arith.addf {found}, {each} : {vector(product.lanes)}")
    return found


def _group_x(lines: Lines, product: Product, token: str, start: str, runs: range) -> list[str]:
    """Emit a group's columns of x in the order of `_codes`: a byte's low half belongs to a column of the group's first
    half, its high half to one of the second."""
    if halves_joined(product):
        return [lines.load("%x", f"{token}, {start}", product.x_type, 32, product.x_dtype)]
    sides = (0, product.quant_group // 2) if product.in_halves else (0,)
    places = [at + side for at in runs for side in sides]
    columns = [lines.let(f"arith.addi {start}, {lines.index(place)} : index") for place in places]
    return [x_vector(lines, product, token, column) for column in columns]


def _totals(lines: Lines, vectors: list[str], lanes: int) -> list[str]:
    """Emit each vector's sum across its lanes."""
    if len(vectors) != lanes or lanes == 1:
        return [lines.hsum(vector, lanes) for vector in vectors]
    folded = lines.hsums(vectors, lanes)
    return [lines.let(f"vector.extract {folded}[{i}] : f32 from vector<{lanes}xf32>") for i in range(lanes)]


def _store(lines: Lines, product: Product, rows: list[str], tokens: list[str], totals: list[str]) -> None:
    """Emit out[token, row] = total * scale + bias (+ what it held)."""
    left, unit = iter(totals), code_unit(product.weight_dtype)
    for row in rows:
        scale = lines.let(f"arith.constant {number(unit)} : f32") if unit != 1 else None
        if product.scales_rows:
            stored = lines.let(f"memref.load %w1[{row}] : {product.weight_types[1]}")
            scale = lines.let(f"arith.mulf {stored}, {scale} : f32") if scale else stored
        bias = _bias(lines, product, row) if product.bias else None
        for token in tokens:
            value = next(left)
            if scale:
                value = lines.let(f"arith.mulf {value}, {scale} : f32")
            if bias:
                value = lines.let(f"arith.addf {value}, {bias} : f32")
            if product.accumulate:
                before = lines.let(f"memref.load %out[{token}, {row}] : {product.out_type}")
                value = lines.let(f"arith.addf {before}, {value} : f32")
            lines.emit(f"memref.store {value}, %out[{token}, {row}] : {product.out_type}")


def _bias(lines: Lines, product: Product, row: str) -> str:
    place = len(product.weight_types) - 1
    stored = lines.let(f"memref.load %w{place}[{row}] : {product.weight_types[place]}")
    return stored if product.x_dtype == "f32" else lines.let(f"arith.extf {stored} : {product.x_dtype} to f32")
