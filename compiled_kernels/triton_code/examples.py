"""Define the examples that are compiled ahead of time: each operator's launch plans at the shapes of Llama 3.1 8B in
bfloat16.

The tensors lie on torch's meta device: a plan reads shapes, never numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compiled_kernels.attention import AttentionParameters, Spans
from compiled_kernels.masks import ALiBi, AndMask, Causal, Mask, SlidingWindow
from compiled_kernels.triton_code.launch import KernelLaunch

if TYPE_CHECKING:
    from compiled_kernels.linear.matrix_format import MatrixFormat

WIDTH, HIDDEN, HEADS, GROUPS, DIM, VOCAB = 4096, 14_336, 32, 8, 128, 128_256
SIZE = 16  # tokens a page
ROWS = {"decode": 1, "batch": 16, "prefill": 512}
Examples = dict[str, list[KernelLaunch]]


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def ints(*shape: int) -> Tensor:
    return meta(*shape, dtype=torch.int32)


def norm(name: str, added: Tensor | None) -> Examples:
    from compiled_kernels.rms_norm.triton import plan

    return {name: plan(meta(1, WIDTH), added, meta(WIDTH), 1e-5)[0]}


def rotary() -> Examples:
    from compiled_kernels.rotary.triton import plan

    angles = meta(16, DIM // 2, dtype=torch.float32)
    return {"queries": plan(meta(16, HEADS + 2 * GROUPS, DIM)[:, :HEADS], angles, angles)[0]}


def gated(*parameters: Any) -> Examples:
    from compiled_kernels.gated.triton import plan

    return {"gate": plan(meta(16, 2 * HIDDEN), *parameters)[0]}


def kv_write() -> Examples:
    from compiled_kernels.kv_write.triton import plan

    rows, slots = meta(16, HEADS + 2 * GROUPS, DIM)[:, -GROUPS:], meta(16, dtype=torch.int64)
    return {"write": plan(meta(64, GROUPS, SIZE, DIM), rows, slots)[0]}


def attention() -> Examples:
    from compiled_kernels.paged_attention.api import PagedKV
    from compiled_kernels.paged_attention.triton import plan

    def one(
        seqs: int, tokens: int, held: int, window: int = 0, sinks: int = 0, size: int = SIZE, softcap: float = 0.0,
        fixed: bool = False, rules: bool = False,
    ) -> list[KernelLaunch]:  # fmt: skip
        pages = meta(4096, GROUPS, size, DIM)
        sink_logits = meta(HEADS, dtype=torch.float32) if softcap else None
        mask, score = (AndMask(_mask(window, sinks), _blocks), ALiBi(HEADS)) if rules else (_mask(window, sinks), None)
        parameters = AttentionParameters(DIM**-0.5, mask, softcap, sink_logits, score)
        kv = PagedKV(pages, pages, ints(seqs, held))
        return plan(meta(tokens, HEADS, DIM), kv, _spans(seqs, tokens), parameters, batch_invariant=fixed)[0]

    return {
        "decode": one(1, 1, 256),
        "decode, pages of 64": one(1, 1, 64, size=64),
        "decode 64": one(64, 64, 256),
        "decode, window and sinks": one(16, 16, 256, window=1024, sinks=4),
        "decode, soft-cap and sink logits": one(1, 1, 256, softcap=30.0),
        "prefill": one(1, 512, 32),
        "prefill, pages of 64": one(1, 512, 8, size=64),
        "mixed": one(8, 512, 256),
        "decode, a mask and a score function": one(16, 16, 256, rules=True),
        "mixed, a window, a mask and a score function": one(8, 512, 256, window=1024, sinks=4, rules=True),
        "mixed, one order of sums": one(8, 512, 256, fixed=True),
    }


def _blocks(query: Tensor, key: Tensor) -> Tensor:
    """One block of 64 keys in four."""
    return (query // 64 - key // 64) % 4 == 0


def _mask(window: int, sinks: int = 0) -> Mask:
    return SlidingWindow(window, sinks) if window else Causal()


def _spans(seqs: int, tokens: int) -> Spans:
    return Spans(ints(seqs + 1), ints(seqs), tokens == seqs)


def quantized_attention() -> Examples:
    from compiled_kernels.quantized_attention.api import QuantizedKV
    from compiled_kernels.quantized_attention.pages import QuantizationRule
    from compiled_kernels.quantized_attention.quantize import QuantFormat, QuantizedTensor, storage_shapes
    from compiled_kernels.quantized_attention.triton import plan

    size, run = 64, 64

    def one(
        kind: QuantFormat, seqs: int, tokens: int, held: int, window: int = 0, rules: bool = False
    ) -> list[KernelLaunch]:
        before = 4096, GROUPS
        keys, values = (
            QuantizedTensor(*(meta(*shape, dtype=dtype) for shape, dtype in storage_shapes(kind, before, *sides)))
            for sides in ((DIM, size, run), (size, DIM, DIM))
        )
        recent, table = meta(4096, GROUPS, size, DIM), ints(seqs, held)
        kv = QuantizedKV(keys, values, recent, recent, table, table, QuantizationRule(run, 64))
        mask, score = (AndMask(_mask(window), _blocks), ALiBi(HEADS)) if rules else (_mask(window), None)
        parameters = AttentionParameters(DIM**-0.5, mask, score=score)
        return plan(meta(tokens, HEADS, DIM), kv, _spans(seqs, tokens), parameters)[0]

    return {
        "decode int8": one("int8", 1, 1, 64),
        "decode int4": one("int4", 1, 1, 64),
        "decode fp8": one("fp8", 1, 1, 64),
        "decode 64 int4": one("int4", 64, 64, 64),
        "decode int8, window": one("int8", 16, 16, 64, window=1024),
        "prefill int4": one("int4", 1, 512, 16),
        "decode int4, a mask and a score function": one("int4", 16, 16, 64, rules=True),
    }


def fixed_product() -> Examples:
    from compiled_kernels.linear.matrix_format import DENSE_MATRIX, INT8_MATRIX, MatrixFormat
    from compiled_kernels.linear.triton import plan

    formats = {
        "dense": DENSE_MATRIX, "int8": INT8_MATRIX, "int4": MatrixFormat("int4", 64, torch.float16),
        "int4, minima": MatrixFormat("int4", 128, torch.float16, torch.float32),
    }  # fmt: skip
    return {
        f"{name}, one order of sums": plan(meta(16, WIDTH), *_stored(format), batch_invariant=True)[0]
        for name, format in formats.items()
    }


def _stored(format: MatrixFormat) -> tuple[Any, ...]:
    """Return a product's arguments for a square matrix in this format, without a bias."""
    stored = {"weight": ((WIDTH, WIDTH), torch.bfloat16)} if format.is_dense else format.storage(WIDTH, WIDTH)
    parts = [meta(*shape, dtype=dtype) for shape, dtype in stored.values()]
    return *parts, *[None] * (4 - len(parts)), format.codes, format.group


def quantized() -> Examples:
    """Return the examples of products with quantized matrices: INT8, matrices in groups, K-quants and Q8_0 with every
    kernel; other formats in words with one row and with many rows."""
    from compiled_kernels.linear.matrix_format import INT8_MATRIX, WORDS, MatrixFormat
    from compiled_kernels.linear.triton import plan

    formats = {
        "int8 by row": INT8_MATRIX,
        "int4": MatrixFormat("int4", 64, torch.float16),
        "int4, minima": MatrixFormat("int4", 128, torch.float16, torch.float32),
        "int8": MatrixFormat("int8", 32, torch.float16),
        "int8, minima": MatrixFormat("int8", 128, torch.float16, torch.float32),
        "fp8 by block": MatrixFormat("fp8", 128),
        "fp8 by row": MatrixFormat("fp8"),
        **{name: MatrixFormat.named(name) for name in WORDS},
    }
    return {
        f"{when} {name}": plan(meta(rows, WIDTH), *_stored(format))[0]
        for name, format in formats.items()
        for when, rows in ROWS.items()
        if when != "batch" or format.words is None or name in ("q4_k", "q6_k", "q8_0")
    }


def experts() -> Examples:
    """Return the examples of products by experts at the shape of OLMoE 1B 7B: 64 experts, of which a token uses 8."""
    from compiled_kernels.expert_linear.triton import plan
    from compiled_kernels.linear.matrix_format import INT8_MATRIX, MatrixFormat

    weights = meta(64, 2048, 2048)
    rows = {"decode": 8, "prefill": 4096}
    found = {
        name: plan(meta(each, 2048), meta(each, dtype=torch.int64), weights, None)[0] for name, each in rows.items()
    }
    biased = plan(meta(8, 2880), meta(8, dtype=torch.int64), meta(32, 5760, 2880), meta(32, 5760))[0]
    formats = {
        "int8": INT8_MATRIX, "int8 in groups": MatrixFormat("int8", 32, torch.float16),
        "int4": MatrixFormat("int4", 64, torch.float16), "mxfp4": MatrixFormat.named("mxfp4"),
        "q4_k": MatrixFormat.named("q4_k"),
    }  # fmt: skip
    for kind, format in formats.items():
        weight, *beside = (meta(64, *shape, dtype=dtype) for shape, dtype in format.storage(2048, 2048).values())
        scales, minima = (*beside, None)[:2]
        rows = meta(8, 2048), meta(8, dtype=torch.int64)
        found[f"decode, {kind}"] = plan(*rows, weight, None, scales, minima, format.codes)[0]
    return found | {"decode with biases": biased}


def top() -> Examples:
    from compiled_kernels.top_logprobs.triton import plan

    logits = meta(16, VOCAB, dtype=torch.float32)
    return {"greedy": plan(logits, 1)[0], "top 20": plan(logits, 20)[0]}


EXAMPLES: dict[str, Callable[[], Examples]] = {
    "rms_norm": lambda: norm("norm", None),
    "add_rms_norm": lambda: norm("add and norm", meta(1, WIDTH)),
    "rotary": rotary,
    "gated_silu": gated,
    "gated_gelu": lambda: gated("gated_gelu"),
    "gated_clamped": lambda: gated("gated_clamped", 1.702, 7.0),
    "linear": fixed_product,
    "linear_quantized": quantized,
    "expert_linear": experts,
    "kv_write": kv_write,
    "paged_attention": attention,
    "quantized_attention": quantized_attention,
    "top_logprobs": top,
}
