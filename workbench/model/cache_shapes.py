"""The cache that the layers of a model need for each token, from its shape alone."""

from __future__ import annotations

from workbench.cache.format import CacheFormat
from workbench.cache.shapes import KVCacheSpec, build_cache_specs
from workbench.model.latent_spec import MLASpec
from workbench.model.spec import ModelSpec


def cache_shapes(spec: ModelSpec, format: CacheFormat | None = None) -> tuple[KVCacheSpec, ...]:
    """Return the cache shape of each layer, dense unless a format says otherwise."""
    attentions = (kind.attention for kind in spec.layers)
    return build_cache_specs(
        (
            (a.num_kv_heads, a.head_dim, a.window, a.sinks, a.kv_lora_rank if isinstance(a, MLASpec) else None)
            for a in attentions
        ),
        format,
    )
