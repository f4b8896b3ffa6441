"""Describe the pages of a cache, so that two engines can compare theirs before they hand pages over."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from workbench.cluster.apart.shared_memory import ALIGNMENT, aligned
from workbench.engine.cache import build_store, cache_num_pages
from workbench.engine.config import EngineConfig
from workbench.errors import WorkbenchError
from workbench.kv_cache.pages import NULL_PAGE
from workbench.kv_cache.store import KVStore
from workbench.model.transformer import Transformer
from workbench.tensor_parallel.transformer import TensorParallelTransformer

DIGEST_TOKENS = 64


class PageTensor(NamedTuple):
    """One tensor of a cache group: the shape of a page and its type."""

    group: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def page_bytes(self) -> int:
        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize


@dataclass(frozen=True)
class PageLayout:
    """The contents of a cache's pages, byte by byte. Two engines hand pages over if theirs are equal."""

    model: str  # a digest of its architecture and of some weights
    page_size: int
    groups: tuple[str, ...]  # windows, sinks, residuals, by cache group
    tensors: tuple[PageTensor, ...]  # in the order of layers

    @classmethod
    def describe(cls, store: KVStore, model: str) -> PageLayout:
        """Describe `store`, whose tensors may be on the meta device."""
        tensors = []
        for layer in store.layers:
            for group in range(len(store.groups)):
                for tensor in layer.page_tensors(group):
                    if not tensor.is_contiguous():
                        raise WorkbenchError("shared pages: a tensor of the cache is not contiguous")
                    tensors.append(PageTensor(group, tuple(tensor.shape[1:]), str(tensor.dtype).removeprefix("torch.")))
        return cls(model, store.page_size, tuple(map(str, store.groups)), tuple(tensors))

    def memory_bytes(self, totals: tuple[int, ...]) -> int:
        """Return the bytes of a memory of so many pages, by cache group, as `shared_bytes` of their store."""
        return max(sum(aligned(each.page_bytes * (totals[each.group] + 1)) for each in self.tensors), ALIGNMENT)

    def bytes_of(self, pages: tuple[tuple[int, ...], ...]) -> int:
        """Return the bytes of these pages, by cache group, in all layers; null pages have none."""
        counts = [sum(page != NULL_PAGE for page in each) for each in pages]
        return sum(each.page_bytes * counts[each.group] for each in self.tensors)

    def differences(self, other: PageLayout) -> list[str]:
        """Return what differs, one line each: empty where pages may be handed over."""
        found = []
        if self.model != other.model:
            found.append("the models or their weights differ")
        if self.page_size != other.page_size:
            found.append(f"cache.page_size {self.page_size} and {other.page_size}")
        if len(self.groups) != len(other.groups):
            found.append(f"{len(self.groups)} and {len(other.groups)} cache groups")
        pairs = zip(self.groups, other.groups, strict=False)
        found += [f"cache group {t}: {mine} and {theirs}" for t, (mine, theirs) in enumerate(pairs) if mine != theirs]
        if len(self.tensors) != len(other.tensors):
            found.append(f"{len(self.tensors)} and {len(other.tensors)} tensors")
        for number, (mine, theirs) in enumerate(zip(self.tensors, other.tensors, strict=False)):
            if mine != theirs:
                found.append(f"tensor {number}: pages {_words(mine)} and {_words(theirs)}")
                break  # one format differs in all its layers
        return found

    def check_equal(self, other: PageLayout, mine: str = "one engine", theirs: str = "the other") -> None:
        """Refuse to hand over pages of another layout (WorkbenchError, with what differs)."""
        if found := self.differences(other):
            raise WorkbenchError(
                f"pages of {mine} are no pages of {theirs}: {'; '.join(found)}; give both the same model and cache"
            )


def _words(tensor: PageTensor) -> str:
    return f"{list(tensor.shape)} {tensor.dtype} (group {tensor.group})"


def why_not_shareable(model: Transformer, config: EngineConfig) -> str | None:
    """Return why sequences of a cache cannot go over to another engine; None where they can."""
    if config.cache.evict is not None:
        return "with cache.evict: which tokens remain is known to the engine that chose them; leave out cache.evict"
    if any(shape.codec is not None and shape.codec.needs_calibration for shape in model.cache_shapes(config.cache)):
        message = "each engine would calibrate for itself, and none says how to the other; leave out cache.codec"
        return f"with a codec that is calibrated: {message}"
    if isinstance(model, TensorParallelTransformer):
        return "with parallel.tensor: its pages lie with its ranks; leave out parallel.tensor"
    if model.device.type != "cpu":
        message = "NIXL, NCCL or CUDA IPC would carry a GPU's pages, and is not built; set model.device: cpu"
        return f"on {model.device}: {message}"
    return None


def describe_layout(model: Transformer, config: EngineConfig) -> PageLayout:
    """Describe the pages of `config`'s cache for `model`, to be compared with another engine's."""
    if why := why_not_shareable(model, config):
        raise WorkbenchError(f"prefill and decode apart {why}")
    store = build_store(model, config, (1,) * len(cache_num_pages(model, config)), "meta")
    return PageLayout.describe(store, _model_digest(model))


def _model_digest(model: Transformer) -> str:
    """Return a digest of the architecture, and of the embeddings of some tokens, which another checkpoint changes."""
    ids = torch.arange(min(DIGEST_TOKENS, model.spec.vocab_size), device=model.device)
    with torch.inference_mode():
        rows = model.embed(ids, torch.arange(len(ids), device=model.device)).float().cpu()
    digest = hashlib.sha256(model.spec.model_dump_json().encode())
    digest.update(rows.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]
