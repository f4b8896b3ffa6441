"""Judge quantized caches by the rules of `kv_precision.yaml`, written before the run."""

from __future__ import annotations

from workbench.experiment.verdict import VariantRows, Verdict, variant_row

HALF, QUARTER = 0.55, 0.29  # of bfloat16's bytes, scales and minima counted
MINIMAL_KL = {"int8": 1e-3, "int4": 1e-2}  # nats a token above the cache in bfloat16
DOUBLE, FOURFOLD = 1.8, 3.4  # times the sequences


def judge(rows: VariantRows) -> list[Verdict]:
    return [size_and_quality(rows), concurrency(rows)]


def size_and_quality(rows: VariantRows) -> Verdict:
    dense = variant_row(rows, "bfloat16")
    stored, whole, lost = {}, {}, {}
    for name in ("int8", "int4"):
        row = variant_row(rows, name)
        stored[name] = row["stored_bytes_per_token"] / dense["stored_bytes_per_token"]
        whole[name] = row["bytes_per_token"] / dense["bytes_per_token"]
        lost[name] = row["kl_mean"] - dense["kl_mean"]
    small = stored["int8"] <= HALF and stored["int4"] <= QUARTER
    good = {name: lost[name] <= MINIMAL_KL[name] for name in lost}
    residual = whole["int8"] > HALF or whole["int4"] > QUARTER
    if not small or not good["int8"]:
        outcome = "refuted"
    elif residual or not good["int4"]:
        outcome = "holds-with-limits"
    else:
        outcome = "holds"
    tokens = round(variant_row(rows, "int8")["kv_tokens"])
    return Verdict(
        claim="kv-quant-size",
        says="INT8 halves and INT4 quarters the cache, with minimal loss of quality",
        rule=(
            f"bytes where tokens stay at most {HALF} and {QUARTER} of bfloat16's, KL mean at most "
            f"{MINIMAL_KL['int8']:g} (INT8) and {MINIMAL_KL['int4']:g} (INT4) above it: holds; refuted where sizes or "
            "INT8 miss; with limits where INT4 misses, or the cache with its end in full precision is larger than that"
        ),
        outcome=outcome,
        reason=(
            f"stored {stored['int8']:.3f} and {stored['int4']:.3f} of bfloat16, in all at {tokens:,} tokens "
            f"{whole['int8']:.3f} and {whole['int4']:.3f}; KL {lost['int8']:+.1e} and {lost['int4']:+.1e}"
        ),
        limits=(
            f"where tokens stay; with its end in full precision the cache is {whole['int8']:.2f} and "
            f"{whole['int4']:.2f} of bfloat16's at {tokens:,} tokens"
            + ("" if good["int4"] else f"; INT4 costs a KL of {lost['int4']:.1g}")
        ),
        figures={
            "INT8's share of the bytes": stored["int8"],
            "INT4's": stored["int4"],
            "INT8's KL, nats a token": lost["int8"],
            "INT4's KL": lost["int4"],
        },
    )


def concurrency(rows: VariantRows) -> Verdict:
    dense, int8, int4 = (variant_row(rows, name)["sequences"] for name in ("bfloat16", "int8", "int4"))
    twice, four = int8 / dense, int4 / dense
    if twice >= DOUBLE and four >= FOURFOLD:
        outcome = "holds"
    elif twice >= DOUBLE or four >= DOUBLE:
        outcome = "holds-with-limits"
    else:
        outcome = "refuted"
    tokens = variant_row(rows, "bfloat16")["sequence_tokens"]
    return Verdict(
        claim="kv-quant-concurrency",
        says="Halving the precision roughly doubles the concurrent sessions",
        rule=(
            f"sequences that the scheduler runs at once in the same memory, the end in full precision included: INT8 "
            f"at least {DOUBLE} and INT4 at least {FOURFOLD} times bfloat16's: holds; one of them {DOUBLE}: limits"
        ),
        outcome=outcome,
        reason=f"at {tokens:,} tokens {dense}, {int8} and {int4} sequences: {twice:.2f} and {four:.2f} times",
        limits="the cache's end stays in full precision, and the shorter the texts the more of the cache that is",
        figures={"times the sequences, INT8": twice, "times the sequences, INT4": four},
    )
