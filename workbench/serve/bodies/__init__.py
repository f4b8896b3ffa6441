"""Bodies of requests: read within bounds, and validated field by field."""
