"""Numbers as they enter a product's multiplications: bfloat16 in pairs, or float32."""

from __future__ import annotations

import torch

from compiled_kernels.linear.mlir_shape import Product
from compiled_kernels.mlir_text import Lines


def multiply(lines: Lines, product: Product, sums: str, weight: str, x: str) -> str:
    return lines.dot_pairs(sums, weight, x) if product.uses_bf16_pairs else lines.fma(weight, x, sums, product.values_per_vector)


def x_vector(lines: Lines, product: Product, token: str, column: str) -> str:
    loaded = lines.load("%x", f"{token}, {column}", product.x_type, product.values_per_vector, product.x_dtype)
    return loaded if product.uses_bf16_pairs else lines.extend(loaded, product.values_per_vector, product.x_dtype)


def fetch(lines: Lines, product: Product, row: str, column: str) -> None:
    """Ask for what the next block of rows reads there: the end of a short row is no end to the memory."""
    if product.prefetch_rows:
        later = lines.let(f"arith.addi {row}, {lines.index(product.prefetch_rows)} : index")
        lines.emit(f"memref.prefetch %w0[{later}, {column}], read, locality<3>, data : {product.weight_types[0]}")


def weight_vector(lines: Lines, product: Product, row: str) -> str:
    """Emit columns from %k of a weight's row that is stored as f32, bf16 or i8."""
    fetch(lines, product, row, "%k")
    loaded = lines.load("%w0", f"{row}, %k", product.weight_types[0], product.values_per_vector, product.weight_dtype)
    if not product.uses_bf16_pairs:
        return lines.extend(loaded, product.values_per_vector, product.weight_dtype)
    if product.weight_dtype == "bf16":
        return loaded
    return lines.truncate(lines.extend(loaded, 32, "i8"), 32, "bf16")


def halves_joined(product: Product) -> bool:
    """Return whether an INT4 group is one vector of pairs, its low halves and its high halves side by side."""
    return product.uses_bf16_pairs and product.quant_group == 32


def int4_vectors(lines: Lines, product: Product, row: str, byte: str) -> list[str]:
    """Emit bytes of a weight's row from `byte` on, as the values of their low and of their high halves."""
    packed = lines.load("%w0", f"{row}, {byte}", product.weight_types[0], product.values_per_vector, "i8")
    kind = f"vector<{product.values_per_vector}xi8>"
    low = lines.let(f"arith.andi {packed}, {lines.constant('15', product.values_per_vector, 'i8')} : {kind}")
    high = lines.let(f"arith.shrui {packed}, {lines.constant('4', product.values_per_vector, 'i8')} : {kind}")
    if not product.uses_bf16_pairs:
        eight = lines.constant("8", product.values_per_vector, "i8")
        centred = (lines.let(f"arith.subi {half}, {eight} : {kind}") for half in (low, high))
        return [lines.extend(half, product.values_per_vector, "i8") for half in centred]
    if halves_joined(product):
        return [_looked_up(lines, lines.let(f"vector.shuffle {low}, {high} {list(range(32))} : {kind}, {kind}"))]
    return [_looked_up(lines, low), _looked_up(lines, high)]


def _looked_up(lines: Lines, codes: str) -> str:
    """Emit 32 codes 0..15 as bfloat16 values -8..7, by a table in a register (AVX512BW: VPERMW)."""
    table = torch.arange(-8, 8, dtype=torch.bfloat16).view(torch.int16).tolist() * 2
    words = lines.let(f"arith.extui {codes} : vector<32xi8> to vector<32xi16>")
    values = lines.constant(str(table), 32, "i16")
    found = lines.let(
        f'llvm.call_intrinsic "llvm.x86.avx512.permvar.hi.512"({values}, {words}) : '
        "(vector<32xi16>, vector<32xi16>) -> vector<32xi16>"
    )
    return lines.let(f"vector.bitcast {found} : vector<32xi16> to vector<32xbf16>")
