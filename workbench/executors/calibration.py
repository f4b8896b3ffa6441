"""Calibrate cache codecs: run the model once over a text, and pass each layer's keys and values to its codec.

The result depends only on model, codec and text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from einops import rearrange
from torch import Tensor

from workbench.batch import TokenBatch
from workbench.errors import WorkbenchError
from workbench.executors.reference import eager_copy
from workbench.kv_cache.codec import LoadedCodec, stored_layout
from workbench.kv_cache.format import CodecCalibration, KVCacheSpec
from workbench.kv_cache.layer import CacheLayer
from workbench.model.layers import TransformerBlock
from workbench.model.mixer import Angles
from workbench.model.transformer import Transformer
from workbench.progress import report_if_slow, to_stderr
from workbench.prompt.tokenization.tokenizer import Tokenizer

CALIBRATION_TEXT = Path(__file__).resolve().parent.parent / "demo" / "calibration.txt"
TOKENS_PER_WINDOW = 1024  # tokens of the text that are computed in one window


def calibrate_codecs(
    model: Transformer,
    specs: tuple[KVCacheSpec, ...],
    settings: CodecCalibration,
    tokenizer: Tokenizer | None,
    report: Callable[[str], None] = to_stderr,
) -> tuple[KVCacheSpec, ...]:
    """Return the cache specs with calibrated codecs, one for each layer; codecs without calibration stay unchanged.
    `report` receives a line if it takes long.

    Raises:
        WorkbenchError: the text cannot be read or is empty; a codec fails, or its stored sizes depend on the text.
    """
    if not any(spec.codec is not None and spec.codec.needs_calibration for spec in specs):
        return specs
    with report_if_slow("calibrating the codecs of the cache", report):
        sample = keys_and_values(model, calibration_windows(model, settings, tokenizer))
        return tuple(
            spec
            if spec.codec is None or not spec.codec.needs_calibration
            else replace(spec, codec=_calibrated(spec, spec.codec, layer, *sample[layer]))
            for layer, spec in enumerate(specs)
        )


def _calibrated(spec: KVCacheSpec, codec: LoadedCodec, layer: int, keys: Tensor, values: Tensor) -> LoadedCodec:
    found = codec.calibrate(layer, keys, values)
    sizes = spec.num_kv_heads, spec.head_dim, torch.float32
    if (stored := stored_layout(found, *sizes)) != (expected := stored_layout(codec, *sizes)):
        message = f"layer {layer} stores {stored}, on random numbers {expected}: sizes must not depend on the sample"
        raise WorkbenchError(f"{codec.name}: calibrate: {message}")
    return found


def calibration_windows(
    model: Transformer, settings: CodecCalibration, tokenizer: Tokenizer | None
) -> list[tuple[int, ...]]:
    """Return the token ids of the calibration text, in windows that fit in the model's context. Without a tokenizer the
    text's bytes below the vocabulary size are the tokens. Raises WorkbenchError if there are no tokens.
    """
    path = CALIBRATION_TEXT if settings.text is None else Path(settings.text)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        message = f"{path} cannot be read as text ({type(error).__name__})"
        raise WorkbenchError(f"cache.calibration.text: {message}") from None
    if tokenizer is None:
        ids = tuple(byte % model.spec.vocab_size for byte in text.encode()[: settings.tokens])
    else:
        ids = tuple(tokenizer.encode(text))[: settings.tokens]
    if not ids:
        raise WorkbenchError(f"cache.calibration.text: {path} is empty")
    size = min(TOKENS_PER_WINDOW, model.spec.max_position_embeddings)
    return [ids[start : start + size] for start in range(0, len(ids), size)]


@torch.inference_mode()
def keys_and_values(model: Transformer, windows: Sequence[Sequence[int]]) -> list[tuple[Tensor, Tensor]]:
    """Return the keys and the values of each layer over all windows, [token, kv_head, head_dim] in float32 each,
    computed in float32 on the backend eager. They are empty for a layer without its own keys and values.
    """
    dtype = torch.promote_types(model.dtype, torch.float32)

    def run(
        block: TransformerBlock, x: Tensor, cos: Angles, sin: Angles, batch: TokenBatch, cache: CacheLayer
    ) -> Tensor:
        copied = eager_copy(block, None if dtype == model.dtype else dtype)
        return copied(x.to(dtype), cos, sin, batch, cache)

    found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in model.blocks]
    for ids in windows:
        batch, store = model.whole_text(ids, dtype)
        model.hidden_states(batch, store, run)
        for layer, shape, mine in zip(store.layers, store.specs, found, strict=True):
            if shape.num_kv_heads:
                pages = layer.held([*range(1, store.num_pages[layer.group] + 1)], len(ids))
                rows = (rearrange(each, "page kv_head offset dim -> (page offset) kv_head dim") for each in pages)
                k, v = (each[: len(ids)].float() for each in rows)
                mine.append((k, v))
    nothing = torch.empty(0)
    return [
        (torch.cat([k for k, _ in mine]), torch.cat([v for _, v in mine])) if mine else (nothing, nothing)
        for mine in found
    ]
