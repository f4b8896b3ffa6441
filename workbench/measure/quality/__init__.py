"""Measure quality and cost of cache formats and attention variants. This package may import whatever
`workbench.measure` may, and no sweeps, reports or claims."""
