"""Define the common interface of attention and recurrences, which mix the tokens of a text within a layer."""

from __future__ import annotations

from typing import Generic, TypeVar

from torch import Tensor, nn

import compiled_kernels
from compiled_kernels import Backend
from compiled_kernels.attention import AttentionParameters
from compiled_kernels.attention_rules import known_rules
from workbench.batch import TokenBatch
from workbench.kv_cache.layer import CacheLayer
from workbench.model.attention_spec import AttentionSpec, MLASpec
from workbench.model.custom import build_mask, build_score, build_selection

Angles = Tensor | None  # [token, dim / 2]; None without rotary
HeadsSpec = TypeVar("HeadsSpec", AttentionSpec, MLASpec)


class Mixer(nn.Module):
    """A module that mixes each token with the earlier tokens in the layer's cache:

    x -> project -> values to cache, and queries -> write_and_read -> mixed -> o_proj -> [token, hidden]
    """

    backend: Backend

    def project(self, x: Tensor, cos: Angles, sin: Angles) -> tuple[Tensor, ...]:
        """Project x [token, hidden] to the values that are cached and to the queries."""
        raise NotImplementedError

    def write_and_read(
        self, projected: tuple[Tensor, ...], batch: TokenBatch, cache: CacheLayer, backend: Backend | None = None
    ) -> Tensor:
        """Write the projected values to the cache, then read it with the queries: [token, ...]. Default backend: the
        module's.
        """
        raise NotImplementedError

    def o_proj(self, mixed: Tensor) -> Tensor:
        """Project the mixed values back: [token, ...] -> [token, hidden]."""
        raise NotImplementedError


class AttentionMixer(Mixer, Generic[HeadsSpec]):
    """Attention to the cache with the spec's mask, score function and scale; subclasses define the projections."""

    sink_logits: Tensor | None

    def __init__(self, spec: HeadsSpec, score_columns: int, backend: Backend):
        super().__init__()
        self.spec = spec
        self.backend = backend
        self.scale = score_columns**-0.5 if spec.scale is None else spec.scale
        self.mask, self.score = build_mask(spec), build_score(spec)
        self.rules, self.selection = known_rules(self.mask, self.score), build_selection(spec)

    def qkv_proj(self, x: Tensor, cos: Angles, sin: Angles) -> tuple[Tensor, Tensor, Tensor]:
        """Project x [token, hidden] to queries, and to keys and values in the form that the cache stores."""
        raise NotImplementedError

    def project(self, x: Tensor, cos: Angles, sin: Angles) -> tuple[Tensor, ...]:
        return self.qkv_proj(x, cos, sin)

    def apply_rotary(self, x: Tensor, cos: Angles, sin: Angles) -> Tensor:
        """Rotate x [token, head, dim] by the angles of its tokens."""
        return x if cos is None or sin is None else compiled_kernels.rotary(x, cos, sin, self.backend)

    def write_and_read(
        self, projected: tuple[Tensor, ...], batch: TokenBatch, cache: CacheLayer, backend: Backend | None = None
    ) -> Tensor:
        q, k, v = projected
        cache.write(k, v, batch, backend or self.backend)
        return self.attend(q, batch, cache, backend)

    def attend(self, q: Tensor, batch: TokenBatch, cache: CacheLayer, backend: Backend | None = None) -> Tensor:
        """Attend to all positions written to the cache so far: [token, head, head_dim or value columns]. Default
        backend: the module's.
        """
        rules = self.spec.softcap, self.sink_logits, self.score, self.rules, self.selection
        return cache.attend(q, batch, AttentionParameters(self.scale, self.mask, *rules), backend or self.backend)
