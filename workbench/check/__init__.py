"""Check a model before use: supported formats and backends, memory, speed, and agreement with transformers."""
