"""Figures of `determinism.yaml`: greedy answers in the same batch, in varying batches, and with batch_invariant on."""

from __future__ import annotations

from workbench.experiment.verdict import VariantRows


def answers(rows: VariantRows) -> dict[str, float]:
    """Return the largest number of different answers over the types, with no mode for it: in bits in the same batch, in
    bits and in tokens in varying batches; whether each answer is the same, in bits, in tokens, and in bits where
    batch_invariant is on; outputs by variant; and the price of that mode. Other hardware is not tried."""
    off = [row for row in rows if not row["batch_invariant"]]
    on = [row for row in rows if row["batch_invariant"]]
    prices = {f"{name}, {row['variant']}": row[name] for row in on for name in row if name.startswith("price_")}
    return {
        "bits_in_same_batch": max(row["same_bits"] for row in off),
        "bits_in_varying_batches": max(row["varying_bits"] for row in off),
        "outputs_in_varying_batches": max(row["varying_outputs"] for row in off),
        "same_bits": all(row["same_bits"] == row["varying_bits"] == 1 for row in off),
        "same_tokens": all(row["same_outputs"] == row["varying_outputs"] == 1 for row in off),
        "same_bits_if_invariant": bool(on) and all(row["same_bits"] == row["varying_bits"] == 1 for row in on),
        **{f"outputs in varying batches, {row['variant']}": row["varying_outputs"] for row in rows},
        **prices,
    }
