"""Kinds of models whose rows have the same bits in every batch, and one request's rows among others."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from tests.engine.scribe import Rows, asked, served
from tests.engine.tiny import layer, mixture_of, spec_of, weights_of
from tests.engine.weight_formats import FORMATS
from workbench.executors.packing import DECODE_BUCKETS
from workbench.kv_cache.format import CacheFormat
from workbench.model.quantized import WeightFormat
from workbench.model.shapes import named_shape
from workbench.model.spec import ModelSpec, RouterSpec
from workbench.model.transformer import Transformer
from workbench.request import Request

WIDE = named_shape("tiny")  # wide enough for dot products of bfloat16 pairs
ODD = spec_of(
    layer(6, 2, bias=True), layer(3, 1, 6, sliding_window=9, num_sink_tokens=2, softcap=1.5, qk_norm=True), tied=False
)
SUNK = spec_of(layer(4, 2, sink_logits=True), layer(4, 2, sliding_window=5, position="none")).model_copy(
    update={"final_logit_softcapping": 3.0, "embedding_scale": 2.5}
)
CAPPED = spec_of(layer(4, 2, dim=16), layer(2, 1, dim=16, sliding_window=7))
PACKED = CacheFormat(keys="int4", values="int8", quant_group=8, columns=8, residual_length=9, num_sink_tokens=3)
KINDS: dict[str, tuple[ModelSpec, torch.dtype, WeightFormat, CacheFormat]] = {
    "odd float32": (ODD, torch.float32, WeightFormat(), CacheFormat()),
    "sunk float32": (SUNK, torch.float32, WeightFormat(), CacheFormat()),
    "wide float32": (WIDE, torch.float32, WeightFormat(), CacheFormat()),
    "wide bfloat16": (WIDE, torch.bfloat16, WeightFormat(), CacheFormat()),
    "mixture float32": (mixture_of(5, 2), torch.float32, WeightFormat(), CacheFormat()),
    "mixture bfloat16": (mixture_of(16, 3, RouterSpec(score="sigmoid", softmax_chosen=False, renormalize=True)),
                         torch.bfloat16, WeightFormat(), CacheFormat()),
    "int8 weights": (WIDE, torch.bfloat16, WeightFormat.parse("int8"), CacheFormat()),
    "int8 activations": (WIDE, torch.bfloat16, WeightFormat.parse("int8", activations="int8"), CacheFormat()),
    "int4 weights": (WIDE, torch.float32, WeightFormat.parse("int4", quant_group=32), CacheFormat()),
    "int4 weights with minima": (WIDE, torch.bfloat16, FORMATS["int4 with minima"], CacheFormat()),
    "fp8 weights": (WIDE, torch.float32, FORMATS["fp8 by block"], CacheFormat()),
    "int4 keys, int8 values": (CAPPED, torch.float32, WeightFormat(), PACKED),
    "fp8 cache": (
        CAPPED, torch.float32, WeightFormat(), CacheFormat(format="fp8", quant_group=8, columns=8, residual_length=5),
    ),
    "int4 cache": (
        WIDE, torch.bfloat16, WeightFormat.parse("int8"), CacheFormat(format="int4", quant_group=8, residual_length=1),
    ),
}  # fmt: skip
WHOLE = ("wide float32",)  # kinds that run with the buckets of a real runner
SIZE = 8  # tokens a page
ROW_BUCKETS = (1, 3, 8)  # buckets of rows, for the sake of fewer compilations: alone, in one block, in several


@cache
def model_of(kind: str) -> Transformer:
    spec, dtype, format, _ = KINDS[kind]
    model = Transformer.from_state(spec, weights_of(spec, dtype, 0), format=format)
    model.use_code_panels()
    return model


def together(kind: str, *turns: list[Request], **more) -> dict[str, Rows]:
    given: dict[str, Any] = {"page_size": SIZE, "pages": 120, "cache": KINDS[kind][3], "max_num_seqs": 9, **more}
    return served(model_of(kind), *turns, buckets=DECODE_BUCKETS if kind in WHOLE else ROW_BUCKETS, **given)


def subject(kind: str, shared: int = 0) -> Request:
    return asked("subject", 23 - shared, 6, KINDS[kind][0].vocab_size, shared)


@cache
def alone(kind: str) -> Rows:
    """The subject's rows, from its first token on, in one chunk and then token by token."""
    return together(kind, [subject(kind)], max_num_batched_tokens=64)["subject"]


def other_requests(kind: str, lengths: list[int]) -> list[Request]:
    vocab = KINDS[kind][0].vocab_size
    return [asked(f"other {i}", length, 1 + (5 * i + length) % 9, vocab) for i, length in enumerate(lengths)]
