"""Reports of runs, comparisons and sweeps, in a terminal and as HTML. It may not import claims, widgets, the lab or the
command line."""
