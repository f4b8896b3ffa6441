"""What `gpu_bench` measures: rows, JSON-ready, as they are found. One that could not be had says why."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_kernels import Lane, cases
from compiled_kernels.cases import Case, Suite, Work, disagreement, suite_of
from compiled_kernels.check import check, moved
from compiled_kernels.linear.quantize import dequantize_int4, dequantize_int8
from compiled_kernels.paged_attention import cases as attention_cases

Row = dict[str, Any]
Form = Callable[[], Any]
FLUSH_BYTES = 2**28  # written between repetitions: past the 50 MiB of an H100's second-level cache
READ_BYTES = 2**31
MATRIX = 8192
MODEL = "shape:llama-3.1-8b"
PROMPT, OUTPUT, LONG_PROMPT = 128, 64, 2048
# (rows out, width) of Llama 3.1 8B: QKV, output, gate and up, down.
MATRICES = [(6144, 4096), (4096, 4096), (28_672, 4096), (4096, 14_336)]
CONTEXTS = [(1, 4096), (1, 32_768), (16, 4096), (64, 4096)]


def checked(operator: str) -> Iterator[Row]:
    """(a) Every case of one operator on the device, against the specification in float64."""
    for row in check((Lane.TRITON,), operator):
        yield asdict(row)


def timed(forms: Mapping[str, Form], repetitions: int) -> dict[str, list[float]]:
    """Seconds of each form, run in turn; each is replayed as a CUDA graph with cold caches."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    graphs = {name: captured(form) for name, form in forms.items()}
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(repetitions):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            seconds[name].append(start.elapsed_time(end) / 1e3)
    return seconds


def captured(form: Form) -> Any:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            form()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        form()
    return graph


def spread(seconds: list[float]) -> Row:
    """Median and the 10th and 90th percentile."""
    ordered = sorted(seconds)
    last = len(ordered) - 1
    low, high = ordered[round(0.1 * last)], ordered[round(0.9 * last)]
    return {"seconds": statistics.median(ordered), "p10": low, "p90": high, "repetitions": len(ordered)}


def ceilings(repetitions: int) -> Row:
    """What this card does at best, in this process: bytes/s read and copied, FLOP/s of a bfloat16 product."""
    data = torch.ones(READ_BYTES // 4, device="cuda")
    half = data[: len(data) // 2]
    other = torch.empty_like(half)
    a, b = (torch.randn(MATRIX, MATRIX, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    found = timed({"read": data.sum, "copy": lambda: other.copy_(half), "matrix": lambda: a @ b}, repetitions)
    median = {name: statistics.median(values) for name, values in found.items()}
    return {
        "read_bytes_per_s": READ_BYTES / median["read"],
        "copy_bytes_per_s": READ_BYTES / median["copy"],  # half of them read, half written
        "matrix_flops_per_s": 2 * MATRIX**3 / median["matrix"],
    }


def kernels(quick: bool) -> Iterator[Row]:
    """(b) The timed cases, and those of Llama 3.1 8B, beside torch's own forms and the card's ceilings."""
    repetitions = 10 if quick else 50
    limits = ceilings(repetitions)
    yield {"part": "ceilings", **limits}
    for suite, case in (*llama_cases(quick), *timed_cases(quick)):
        yield from _or_error({"part": "kernels", "operator": suite.operator, "case": case.name}, measured, suite, case,
                             limits, repetitions)  # fmt: skip


def measured(suite: Suite, case: Case, limits: Row, repetitions: int) -> Iterator[Row]:
    inputs = moved(suite.make(case), "cuda")
    if wrong := disagreement(suite, case, inputs, Lane.TRITON):
        raise RuntimeError(f"not timed, since it is not correct: {wrong}")
    call = suite.timed_call or suite.call
    forms: dict[str, Form] = {"triton": lambda: call(*inputs, lane=Lane.TRITON)}
    if (torchs := torch_form(suite.operator, inputs)) is not None:
        forms["torch"] = torchs
    for name, seconds in timed(forms, repetitions).items():
        figures = spread(seconds)
        work, median = case.work, figures["seconds"]
        rates = {"bytes_per_s": work.bytes / median, "flops_per_s": work.flops / median}
        shares = {
            "share_of_read": rates["bytes_per_s"] / limits["read_bytes_per_s"],
            "share_of_matrix": rates["flops_per_s"] / limits["matrix_flops_per_s"],
        }
        yield {"form": name, **figures, **rates, **shares}


def timed_cases(quick: bool) -> Iterator[tuple[Suite, Case]]:
    for suite in cases.suites():
        for case in suite.cases:
            if case.timed and case.arguments["dtype"] == torch.bfloat16 and suite.operator != "linear" and not quick:
                yield suite, case


def llama_cases(quick: bool) -> Iterator[tuple[Suite, Case]]:
    """Products, attention and the choice of tokens at the shapes of Llama 3.1 8B."""
    for operator, bits, more in (("linear_int8", 8, {}), ("linear_int4", 4, {"group": 64})):
        for tokens in (1, 512) if quick else (1, 4, 16, 64, 512, 2048):
            for out, width in MATRICES:
                arguments = {"tokens": tokens, "width": width, "out": out, "dtype": torch.bfloat16, "bias": False}
                rows = 2 * tokens * (width + out)
                work = Work(out * width * bits // 8 + rows, 2 * tokens * width * out)
                yield suite_of(operator), Case(f"{tokens}x{width}x{out}", {**arguments, **more}, work)
    heads: dict[str, Any] = {"groups": 8, "share": 4, "dim": 128}
    attention = suite_of("paged_attention")
    for seqs, context in CONTEXTS[:2] if quick else CONTEXTS:
        for size in (16, 64):
            name = f"decode {seqs} at {context}, pages of {size}"
            shape = heads | {"size": size}
            yield attention, attention_cases.case(name, (context,) * seqs, (1,) * seqs, torch.bfloat16, **shape)
    for tokens in (512, 2048):
        yield attention, attention_cases.case(f"prefill {tokens}, 8B", (tokens,), (tokens,), torch.bfloat16, **heads)
    arguments = {"samples": 16, "vocab": 128_256, "count": 5, "dtype": torch.float32}
    yield suite_of("top_logprobs"), Case("16x128256 top 5", arguments, Work(16 * 128_256 * 4, 4 * 16 * 128_256))


def torch_form(operator: str, inputs: tuple) -> Form | None:
    """torch's own way to the same result; products with a dense weight, attention over keys that lie in order."""
    x, *rest = inputs
    if operator == "rms_norm":
        return lambda: F.rms_norm(x, (x.shape[1],), rest[0], rest[1])
    if operator == "add_rms_norm":
        return lambda: F.rms_norm(x + rest[0], (x.shape[1],), rest[1], rest[2])
    if operator in ("linear_int8", "linear_int4"):
        dense = (dequantize_int8 if operator == "linear_int8" else dequantize_int4)(rest[0], rest[1]).to(x.dtype)
        return lambda: F.linear(x, dense, rest[2])
    if operator == "top_logprobs":
        return lambda: torch.log_softmax(x, dim=-1).topk(rest[0])
    return dense_attention(inputs) if operator == "paged_attention" else None


def dense_attention(inputs: tuple) -> Form | None:
    """scaled_dot_product_attention for contexts of one length, whole prompts or single tokens; None for others."""
    q, keys, values, table, starts, lengths, scale = inputs[:7]
    seqs, context = len(lengths), int(lengths[0])
    span = int(starts[1])
    if not bool((lengths == context).all()) or len(q) != seqs * span or span not in (1, context):
        return None

    def in_order(pages: Tensor) -> Tensor:
        held = pages[table.long()].transpose(1, 2)  # [seq, group, page, offset, dim]
        return held.flatten(2, 3)[:, :, :context].contiguous()

    k, v = in_order(keys), in_order(values)
    grouped = q.view(seqs, span, *q.shape[1:]).transpose(1, 2)
    causal = span > 1
    return lambda: F.scaled_dot_product_attention(grouped, k, v, is_causal=causal, scale=scale, enable_gqa=True)


def ours(weights: str, quick: bool) -> Iterator[Row]:
    """(c) Decode and prefill of the whole model on lane triton, through the runner as a user drives it."""
    import workbench
    from workbench.study.bench_works import Work as ModelWork
    from workbench.study.bench_works import repetition

    works = [ModelWork("decode", batch, 0, PROMPT, OUTPUT) for batch in batches(quick)]
    works.append(ModelWork("prefill", 1, 0, LONG_PROMPT))
    most = max(work.batch for work in works)
    runner = workbench.load(
        MODEL, device="cuda", lane="triton", weights=weights, max_num_seqs=most, max_num_batched_tokens=LONG_PROMPT,
        page_size=16, pages=most * (PROMPT + 4 * OUTPUT) // 16 + LONG_PROMPT // 16,
    )  # fmt: skip
    limits = ceilings(10)
    for work in works:
        described = {"part": "model", "engine": "workbench", "weights": weights, "work": work.kind, "batch": work.batch}

        def one(work: ModelWork = work) -> Iterator[Row]:
            repetition(runner, work, 0)  # captures and compiles
            found = [repetition(runner, work, turn) for turn in (1, 2)]
            best = min(found, key=lambda figures: figures.wall_seconds)
            yield {
                "tokens_per_s": best.tokens / best.wall_seconds,
                "step_seconds": spread(list(best.step_seconds)),
                "forward_share": best.forward_seconds / best.wall_seconds,
                "share_of_read": best.bytes / best.wall_seconds / limits["read_bytes_per_s"],
                "share_of_matrix": best.flops / best.wall_seconds / limits["matrix_flops_per_s"],
            }

        yield from _or_error(described, one)


def theirs(quick: bool) -> Iterator[Row]:
    """(c) The same shape in transformers, bfloat16, as its `generate` runs it by default."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from workbench.model.shapes import named_shape

    spec = named_shape(MODEL.removeprefix("shape:"))
    kind = spec.layers[0]
    config = LlamaConfig(
        vocab_size=spec.vocab, hidden_size=spec.width, intermediate_size=kind.hidden,
        num_hidden_layers=len(spec.layers), num_attention_heads=kind.attention.heads,
        num_key_value_heads=kind.attention.groups,
        max_position_embeddings=8192, eos_token_id=None, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"), torch.no_grad():
        model: Any = LlamaForCausalLM(config).eval()

    def seconds(batch: int, prompt: int, output: int) -> float:
        ids = torch.randint(1, spec.vocab, (batch, prompt), device="cuda")
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=output, min_new_tokens=output, do_sample=False
        )
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    described = {"part": "model", "engine": "transformers", "weights": "dense"}
    for batch in batches(quick):

        def decode(batch: int = batch) -> Iterator[Row]:
            seconds(batch, PROMPT, 4)
            first = min(seconds(batch, PROMPT, 1) for _ in range(2))
            yield {"tokens_per_s": batch * (OUTPUT - 1) / (seconds(batch, PROMPT, OUTPUT) - first)}

        yield from _or_error({**described, "work": "decode", "batch": batch}, decode)

    def prefill() -> Iterator[Row]:
        seconds(1, LONG_PROMPT, 1)
        yield {"tokens_per_s": LONG_PROMPT / statistics.median(seconds(1, LONG_PROMPT, 1) for _ in range(3))}

    yield from _or_error({**described, "work": "prefill", "batch": 1}, prefill)


def batches(quick: bool) -> tuple[int, ...]:
    return (1, 16) if quick else (1, 4, 16, 64, 256)


def _or_error(described: Row, rows: Callable[..., Iterator[Row]], *arguments: Any) -> Iterator[Row]:
    """`rows`, each with its description; what breaks is a row, and the rest goes on."""
    try:
        for row in rows(*arguments):
            yield {**described, **row}
    except Exception as error:
        yield {**described, "error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
