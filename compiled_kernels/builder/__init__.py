"""MLIR made through its dialects: values that know their type, functions, loops, and vectors' own operations.

A kernel is a function on static memrefs, made for a level of the instruction set (`Target`): vectors are as long as its
registers, and no more sums are carried than fit them. Where the level has an instruction that no dialect names
(bfloat16 dot products, table look-ups), it is called as an LLVM intrinsic; without it the same function is plain vector
arithmetic.
"""
