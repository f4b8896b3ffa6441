"""Figures of `kv_groups.yaml`: grouped-query attention and the cache formula."""

from __future__ import annotations

from workbench.engine.config import CacheConfig
from workbench.experiment.verdict import VariantRows, variant_row
from workbench.memory.capacity import meta_kv_store, page_bytes
from workbench.memory.report import report_for
from workbench.model.shapes import named_shape

GROUPS = {"4 groups": 4, "2 groups": 2, "1 group, mean": 1}
LLAMA = "llama-3-70b"
TOKENS, SOURCES, NEAR = 128_000, {"A": 40, "E": 30}, 0.1  # GB


def saving(rows: VariantRows) -> dict[str, float]:
    """Return how far bytes a token are off the number of key/value heads, at most; the query heads of Llama 3 70B for
    each of its key/value heads; and the KL of a trained model's heads pooled and left so."""
    sizes = {groups: variant_row(rows, name)["bytes_per_token"] for name, groups in GROUPS.items()}
    shape = named_shape(LLAMA).layers[0].attention
    return {
        "bytes_deviation": max(abs(size / sizes[1] / groups - 1) for groups, size in sizes.items()),
        "query_heads_per_kv_head": shape.num_heads / shape.num_kv_heads,
        "kl_of_pooled_heads": variant_row(rows, "1 group, mean")["kl_mean"],
    }


def formula(rows: VariantRows) -> dict[str, float]:
    """Return how far the allocated pages' bytes a token are off 2 x layers x kv_heads x head_dim x bytes, at most: 6
    layers, heads of 64, float32."""
    found = (variant_row(rows, name)["stored_bytes_per_token"] / (2 * 6 * n * 64 * 4) for name, n in GROUPS.items())
    return {"largest_deviation": max(abs(ratio - 1) for ratio in found)}


def llama(tokens: int = TOKENS) -> dict[str, float | str]:
    """Return whether 327,680 bytes a token, and the bytes of a cache on torch's meta device, are the formula's; how
    many sources are within 10% of the cache's GB, and which; and sizes in GB."""
    report = report_for(f"shape:{LLAMA}", context=tokens, dtype="float16")
    store = meta_kv_store(named_shape(LLAMA), CacheConfig(), "float16")
    laid_out = tokens * sum(page_bytes(store)) / store.page_size
    size = report["cache_bytes"] / 1e9
    right = [source for source, figure in SOURCES.items() if abs(size / figure - 1) <= NEAR]
    return {
        "exact": report["cache_bytes_per_token"] == 327_680 and report["cache_bytes"] == laid_out,
        "right_sources": len(right),
        "right": ", ".join(right),
        "bytes_per_token": report["cache_bytes_per_token"],
        "cache_gb": size,
        "weight_gb": report["weight_bytes"] / 1e9,
    }
