"""Show a running server: requests by state, rates, latencies, pages, limits, and the trace of a chosen request."""
