"""Figures of `kv_precision.yaml`: size, loss and number of sequences of quantized caches, against bfloat16's."""

from __future__ import annotations

from workbench.experiment.verdict import VariantRows, variant_row


def size_and_quality(rows: VariantRows) -> dict[str, float]:
    """Return, for INT8 and INT4, the share of bfloat16's bytes where tokens stay (scales and minima counted), the share
    with the end of the cache in full precision, and the mean KL above bfloat16's in nats a token."""
    dense, figures = variant_row(rows, "bfloat16"), {}
    for name in ("int8", "int4"):
        row = variant_row(rows, name)
        figures |= {
            f"{name}_stored": row["stored_bytes_per_token"] / dense["stored_bytes_per_token"],
            f"{name}_bytes": row["bytes_per_token"] / dense["bytes_per_token"],
            f"{name}_kl": row["kl_mean"] - dense["kl_mean"],
        }
    return figures | {"tokens": variant_row(rows, "int8")["kv_tokens"]}


def concurrency(rows: VariantRows) -> dict[str, float]:
    """Return how many times bfloat16's sequences the scheduler runs at once in the same memory, the end of the cache in
    full precision included."""
    dense, int8, int4 = (variant_row(rows, name)["sequences"] for name in ("bfloat16", "int8", "int4"))
    tokens = variant_row(rows, "bfloat16")["sequence_tokens"]
    return {"int8_times": int8 / dense, "int4_times": int4 / dense, "tokens": tokens}
