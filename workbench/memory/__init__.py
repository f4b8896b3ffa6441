"""Memory of a model and its cache: reports, capacity, and measurements beside the formulas. It may not import runs,
measurements or reports."""
