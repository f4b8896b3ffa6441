"""Programs compute a step's plan on a backend, and backends are selected here. It may not import speculation, the
engine or experiments."""
