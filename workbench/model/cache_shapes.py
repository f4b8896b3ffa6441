"""The cache that the layers of a model need for each token, from its shape alone."""

from __future__ import annotations

from workbench.cache.format import CacheFormat
from workbench.cache.shapes import CacheShape, shapes_of
from workbench.model.latent_spec import LatentAttention
from workbench.model.spec import ModelSpec


def cache_shapes(spec: ModelSpec, format: CacheFormat | None = None) -> tuple[CacheShape, ...]:
    """Return the cache shape of each layer, dense unless a format says otherwise."""
    attentions = (kind.attention for kind in spec.layers)
    return shapes_of(
        (
            (a.groups, a.dim, a.window, a.sinks, a.latent if isinstance(a, LatentAttention) else None)
            for a in attentions
        ),
        format,
    )
