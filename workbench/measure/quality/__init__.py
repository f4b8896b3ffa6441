"""Quality and cost of cache formats and attention variants. It may import what `workbench.measure` may, and no sweeps,
reports or claims."""
