"""Report runs, comparisons and sweeps, in a terminal and as HTML. This package may not import claims, widgets, the lab
or the command line."""
