"""Build MLIR through its dialects: values that know their type, functions, loops, and operations on vectors.

A kernel is a function on static memrefs, built for a level of the instruction set (`Target`): its vectors are as long
as the level's registers, and it keeps no more sums than fit into them. An instruction that no dialect names (bfloat16
dot products, table look-ups) is called as an LLVM intrinsic if the level has it; otherwise the same function emits
plain vector arithmetic.
"""
