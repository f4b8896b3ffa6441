"""MLIR made through its dialects: values that know their type, functions, loops, and vectors' own operations."""
