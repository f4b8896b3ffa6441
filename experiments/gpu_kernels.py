"""Check each Triton kernel on a GPU against its specification, then time it beside torch and the card's ceilings."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_kernels import Backend, cases
from compiled_kernels.agreement import disagreement
from compiled_kernels.capabilities import known_gap
from compiled_kernels.cases import Case, CaseCost, Suite, suite_of
from compiled_kernels.check import check, to_device
from compiled_kernels.linear.cases import INT4
from compiled_kernels.linear.matrix_format import INT8_MATRIX, MatrixFormat
from compiled_kernels.linear.quantize import dequantize_matrix
from compiled_kernels.paged_attention import cases as attention_cases
from compiled_kernels.triton_code import artifacts
from compiled_kernels.triton_code.examples import EXAMPLES
from experiments.gpu_timing import DEVICE, REHEARSED, Form, Row, ceilings, or_error, spread, timed

# (output features, input features) of Llama 3.1 8B: QKV, output, gate and up, down.
MATRICES = [(256, 256)] if REHEARSED else [(6144, 4096), (4096, 4096), (28_672, 4096), (4096, 14_336)]
IN_WORDS = "q4_k", "q6_k", "q8_0"
CONTEXTS = [(1, 64), (2, 64)] if REHEARSED else [(1, 4096), (1, 32_768), (16, 4096), (64, 4096)]
PROMPTS, VOCAB = ((64,), 1000) if REHEARSED else ((512, 2048), 128_256)


def checked(operator: str) -> Iterator[Row]:
    """Yield a row for every case of one operator, checked on the device against the specification in float64 (part
    a)."""
    for row in check((Backend.TRITON,), operator):
        yield asdict(row)


def compiled() -> Iterator[Row]:
    """Yield a row for every kernel of every operator, compiled for sm_90, which needs neither a GPU nor the
    interpreter."""
    for operator in EXAMPLES:
        yield from or_error({"part": "ptx", "operator": operator}, _figures, operator)


def _figures(operator: str) -> Iterator[Row]:
    for one in artifacts(operator):
        yield {"case": one.name, "registers": one.registers, "spill_bytes": one.spill_bytes}


def kernels(quick: bool) -> Iterator[Row]:
    """Yield the times of marked cases and of Llama 3.1 8B's cases, each with the time of torch's own operators and the
    fraction of the card's ceilings (part b)."""
    repetitions = 10 if quick else 50
    limits = ceilings(repetitions)
    yield {"part": "ceilings", **limits}
    for suite, case in (*llama_cases(quick), *timed_cases(quick)):
        yield from or_error({"part": "kernels", "operator": suite.operator, "case": case.name}, measured, suite, case,
                             limits, repetitions)  # fmt: skip


def measured(suite: Suite, case: Case, limits: Row, repetitions: int) -> Iterator[Row]:
    inputs = to_device(suite.make_inputs(case), DEVICE)
    if wrong := disagreement(suite, case, inputs, Backend.TRITON):
        raise RuntimeError(f"not timed, since it is not correct: {wrong}")
    call = suite.benchmark_call or suite.call
    forms: dict[str, Form] = {"triton": lambda: call(*inputs, backend=Backend.TRITON)}
    if (torchs := torch_form(suite.operator, inputs)) is not None:
        forms["torch"] = torchs
    for name, seconds in timed(forms, repetitions).items():
        figures = spread(seconds)
        work, median = case.cost, figures["seconds"]
        rates = {"bytes_per_s": work.bytes / median, "flops_per_s": work.flops / median}
        shares = {
            "share_of_read": rates["bytes_per_s"] / limits["read_bytes_per_s"],
            "share_of_matrix": rates["flops_per_s"] / limits["matrix_flops_per_s"],
        }
        yield {"form": name, **figures, **rates, **shares}


def timed_cases(quick: bool) -> Iterator[tuple[Suite, Case]]:
    for suite in cases.suites():
        for case in suite.cases:
            ours = suite.operator != "linear" and not known_gap(suite.operator, Backend.TRITON, case.name)
            if case.timed and case.arguments["dtype"] == torch.bfloat16 and ours and not quick:
                yield suite, case


def llama_cases(quick: bool) -> Iterator[tuple[Suite, Case]]:
    """Yield cases of products, attention and token selection at the shapes of Llama 3.1 8B."""
    for format in (INT8_MATRIX, INT4, *map(MatrixFormat.named, IN_WORDS)):
        words = format.words is not None
        rows = (1, 512) if quick else (1, 16, 512) if words else (1, 4, 16, 64, 512, 2048)
        for tokens, (out, width) in itertools.product(rows, MATRICES[:2] if words else MATRICES):
            shape = {"tokens": tokens, "width": width, "out": out}
            arguments = {**shape, "dtype": torch.bfloat16, "bias": False, "format": format}
            work = CaseCost(format.nbytes(out, width) + 2 * tokens * (width + out), 2 * tokens * width * out)
            yield suite_of("linear_quantized"), Case(f"{tokens}x{width}x{out} {format}", arguments, work)
    heads: dict[str, Any] = {"num_kv_heads": 8, "queries_per_kv": 4, "dim": 128}
    attention = suite_of("paged_attention")
    for seqs, context in CONTEXTS[:2] if quick else CONTEXTS:
        for size in (16, 64):
            name = f"decode {seqs} at {context}, pages of {size}"
            shape = heads | {"size": size}
            yield attention, attention_cases.case(name, (context,) * seqs, (1,) * seqs, torch.bfloat16, **shape)
    for tokens in PROMPTS:
        yield attention, attention_cases.case(f"prefill {tokens}, 8B", (tokens,), (tokens,), torch.bfloat16, **heads)
    arguments = {"samples": 16, "vocab": VOCAB, "count": 5, "dtype": torch.float32}
    yield suite_of("top_logprobs"), Case("16 rows, top 5", arguments, CaseCost(16 * VOCAB * 4, 4 * 16 * VOCAB))


def torch_form(operator: str, inputs: tuple) -> Form | None:
    """Return a function that computes the same result with torch's own operators (dense weights, contiguous keys); None
    if there is none."""
    x, *rest = inputs
    if operator == "rms_norm":
        return lambda: F.rms_norm(x, (x.shape[1],), rest[0], rest[1])
    if operator == "add_rms_norm":
        return lambda: F.rms_norm(x + rest[0], (x.shape[1],), rest[1], rest[2])
    if operator == "linear_quantized":
        *stored, bias, codes, group, _ = rest
        numbers = dequantize_matrix(MatrixFormat.of(codes, group, *stored[1:]), *stored).to(x.dtype)
        return lambda: F.linear(x, numbers, bias)
    if operator == "top_logprobs":
        return lambda: torch.log_softmax(x, dim=-1).topk(rest[0])
    return dense_attention(inputs) if operator == "paged_attention" else None


def dense_attention(inputs: tuple) -> Form | None:
    """Return a function that runs scaled_dot_product_attention, for contexts of one length and either whole prompts or
    single tokens;

    None for other inputs.
    """
    q, (keys, values, table, *_), (starts, lengths, *_), parameters = inputs
    seqs, context, span = len(lengths), int(lengths[0]), int(starts[1])
    if not bool((lengths == context).all()) or len(q) != seqs * span or span not in (1, context):
        return None

    def in_order(pages: Tensor) -> Tensor:
        held = pages[table.long()].transpose(1, 2)  # [seq, kv_head, page, offset, head_dim]
        return held.flatten(2, 3)[:, :, :context].contiguous()

    k, v = in_order(keys), in_order(values)
    grouped = q.view(seqs, span, *q.shape[1:]).transpose(1, 2)
    causal = span > 1
    return lambda: F.scaled_dot_product_attention(
        grouped, k, v, is_causal=causal, scale=parameters.scale, enable_gqa=True
    )
