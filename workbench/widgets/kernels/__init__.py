"""Show an operator through the stages of its compilers."""
