"""Read request bodies within bounds, and validate them field by field."""
