"""Describe the layout of cache pages, so that two engines can compare layouts before they hand pages over."""

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
    """One tensor of a cache group: the shape and dtype of a page."""

    group: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def page_bytes(self) -> int:
        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize


@dataclass(frozen=True)
class PageLayout:
    """The byte layout of a cache's pages. Two engines may hand pages over if their layouts are equal."""

    model: str  # a digest of its architecture and of some weights
    page_size: int
    groups: tuple[str, ...]  # windows, sinks, residuals, by cache group
    tensors: tuple[PageTensor, ...]  # in the order of layers

    @classmethod
    def describe(cls, store: KVStore, model: str) -> PageLayout:
        """Return the page layout of `store`, whose tensors may be on the meta device."""
        tensors = []
        for layer in store.layers:
            for group in range(len(store.groups)):
                for tensor in layer.page_tensors(group):
                    if not tensor.is_contiguous():
                        raise WorkbenchError("shared pages: a tensor of the cache is not contiguous")
                    tensors.append(PageTensor(group, tuple(tensor.shape[1:]), str(tensor.dtype).removeprefix("torch.")))
        return cls(model, store.page_size, tuple(map(str, store.groups)), tuple(tensors))

    def memory_bytes(self, totals: tuple[int, ...]) -> int:
        """Return the size in bytes of a memory with `totals` pages, given by cache group; it equals the `shared_bytes`
        of its store.
        """
        return max(sum(aligned(each.page_bytes * (totals[each.group] + 1)) for each in self.tensors), ALIGNMENT)

    def bytes_of(self, pages: tuple[tuple[int, ...], ...]) -> int:
        """Return the size in bytes of `pages`, given by cache group, over all layers; null pages count as 0."""
        counts = [sum(page != NULL_PAGE for page in each) for each in pages]
        return sum(each.page_bytes * counts[each.group] for each in self.tensors)

    def differences(self, other: PageLayout) -> list[str]:
        """Return one line for each difference from another layout; if there is none, engines may hand pages over."""
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
                break  # a different format differs in every layer: report it once
        return found

    def check_equal(self, other: PageLayout, mine: str = "one engine", theirs: str = "the other") -> None:
        """Raise WorkbenchError, with the differences, unless the layouts are equal."""
        if found := self.differences(other):
            raise WorkbenchError(
                f"pages of {mine} are no pages of {theirs}: {'; '.join(found)}; give both the same model and cache"
            )


def _words(tensor: PageTensor) -> str:
    return f"{list(tensor.shape)} {tensor.dtype} (group {tensor.group})"


def why_not_shareable(model: Transformer, config: EngineConfig) -> str | None:
    """Return why sequences cannot be handed over to another engine; None if they can."""
    if config.cache.evict is not None:
        return "with cache.evict: only the engine that evicts tokens knows the rest; leave out cache.evict"
    if any(shape.codec is not None and shape.codec.needs_calibration for shape in model.cache_shapes(config.cache)):
        message = "each engine would calibrate a codec of its own; leave out cache.codec"
        return f"with a codec that is calibrated: {message}"
    if isinstance(model, TensorParallelTransformer):
        return "with parallel.tensor: each rank holds pages of its own; leave out parallel.tensor"
    if model.device.type != "cpu":
        message = "a transport of GPU pages (NIXL, NCCL, CUDA IPC) is not implemented; set model.device: cpu"
        return f"on {model.device}: {message}"
    return None


def describe_layout(model: Transformer, config: EngineConfig) -> PageLayout:
    """Return the layout of the cache pages of `config` for `model`, to be compared with another engine's layout."""
    if why := why_not_shareable(model, config):
        raise WorkbenchError(f"separate pools of prefill and decode {why}")
    store = build_store(model, config, (1,) * len(cache_num_pages(model, config)), "meta")
    return PageLayout.describe(store, _model_digest(model))


def _model_digest(model: Transformer) -> str:
    """Return a digest of the architecture and of some token embeddings, which differ between checkpoints."""
    ids = torch.arange(min(DIGEST_TOKENS, model.spec.vocab_size), device=model.device)
    with torch.inference_mode():
        rows = model.embed(ids, torch.arange(len(ids), device=model.device)).float().cpu()
    digest = hashlib.sha256(model.spec.model_dump_json().encode())
    digest.update(rows.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]
