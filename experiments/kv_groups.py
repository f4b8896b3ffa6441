"""Judge grouped-query attention and the cache formula by the rules of `kv_groups.yaml`, written before the run."""

from __future__ import annotations

from collections.abc import Mapping

from workbench.engine.config import CacheConfig
from workbench.experiment.verdict import RuleChange, VariantRows, Verdict, variant_row
from workbench.memory.capacity import meta_kv_store, page_bytes
from workbench.memory.report import report_for
from workbench.model.shapes import named_shape

GROUPS = {"4 groups": 4, "2 groups": 2, "1 group, mean": 1}
LLAMA = "llama-3-70b"
SAME = 0.02  # relative
TOKENS, SOURCES, NEAR = 128_000, {"A": 40, "E": 30}, 0.1  # GB
CHANGED = (
    RuleChange(
        what=(
            "each source is held against the same count within 10%; before, only 'A is right and E is not' led to "
            "with limits, and every other count of the right bytes a token to holds"
        ),
        when="2026-11-21",
        after="the count itself (41.9 GB), which the first rule already knew",
        why="the first rule could not find a source wrong that it had not expected",
    ),
)


def judge(rows: VariantRows) -> list[Verdict]:
    return [saving(rows), formula(rows), llama(llama_sizes())]


def saving(rows: VariantRows) -> Verdict:
    sizes = {groups: variant_row(rows, name)["bytes_per_token"] for name, groups in GROUPS.items()}
    right = all(abs(size / sizes[1] / groups - 1) <= SAME for groups, size in sizes.items())
    shape = named_shape(LLAMA).layers[0].attention
    ratio = shape.num_heads / shape.num_kv_heads
    lost = variant_row(rows, "1 group, mean")["kl_mean"]
    return Verdict(
        claim="kv-gqa",
        says="8 KV heads for 64 query heads shrink the cache 8 times",
        rule=f"measured bytes a token go with the number of key/value heads within {SAME:.0%}, and 64 / 8 is 8",
        outcome="holds" if right and ratio == 8 else "refuted",
        reason=(
            f"{', '.join(f'{groups}: {size:,.0f}' for groups, size in sizes.items())} bytes a token; {LLAMA} has "
            f"{ratio:g} query heads a key/value head; a trained model's heads pooled and left so: KL {lost:.2g}"
        ),
        figures={"times smaller": ratio, "KL of heads pooled without training": lost},
    )


def formula(rows: VariantRows) -> Verdict:
    """Judge the cache formula 2 x layers x kv_heads x head_dim x bytes against the measured model: 6 layers, heads of
    64, float32."""
    off = {}
    for name, groups in GROUPS.items():
        off[name] = variant_row(rows, name)["stored_bytes_per_token"] / (2 * 6 * groups * 64 * 4) - 1
    worst = max(off.values(), key=abs)
    return Verdict(
        claim="kv-formula",
        says="bytes = 2 x layers x kv_heads x head_dim x tokens x bytes per value",
        rule="bytes of the allocated pages a token are the formula's exactly",
        outcome="holds" if worst == 0 else "refuted",
        reason=f"largest deviation {worst:.2%} over {', '.join(off)}",
        figures={"largest deviation": worst},
    )


def llama_sizes(tokens: int = TOKENS) -> dict[str, float]:
    """Return the cache and weight sizes by the formula, and the size of a cache on torch's meta device, which has the
    same tensors without memory.
    """
    report = report_for(f"shape:{LLAMA}", context=tokens, dtype="float16")
    store = meta_kv_store(named_shape(LLAMA), CacheConfig(), "float16")
    sizes = {name: report[name] for name in ("cache_bytes_per_token", "cache_bytes", "weight_bytes")}
    return sizes | {"laid_out_bytes": tokens * sum(page_bytes(store)) / store.page_size}


def llama(found: Mapping[str, float]) -> Verdict:
    exact = found["cache_bytes_per_token"] == 327_680 and found["cache_bytes"] == found["laid_out_bytes"]
    size, weights = found["cache_bytes"] / 1e9, found["weight_bytes"] / 1e9
    right = [source for source, figure in SOURCES.items() if abs(size / figure - 1) <= NEAR]
    return Verdict(
        claim="kv-llama70b",
        says="Llama 3 70B in FP16: 327,680 bytes a token; at 128K tokens about 40 GB (A) or 30 GB (E); weights 140 GB",
        rule=f"exact count; a source is right within {NEAR:.0%}: both: holds, one: with limits, none: refuted",
        outcome="refuted" if not exact or not right else "holds" if len(right) == len(SOURCES) else "holds-with-limits",
        reason=(
            f"{found['cache_bytes_per_token']:,.0f} bytes a token, {size:.1f} GB at {TOKENS:,}: right is "
            f"{' and '.join(right) or 'none'}; weights {weights:.1f} GB"
        ),
        limits=f"the figure of {' and '.join(right)} is right",
        figures={"bytes a token": found["cache_bytes_per_token"], "GB of 128,000": size, "GB of weights": weights},
        changed=CHANGED,
    )
