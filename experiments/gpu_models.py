"""Measure a whole model on a GPU: the backend triton through the runner, alternating with transformers in one
process."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch

from experiments.gpu_timing import DEVICE, REHEARSED, Row, ceilings, elapsed, or_error, spread

MODEL = "shape:tiny" if REHEARSED else "shape:llama-3.1-8b"
PROMPT, OUTPUT, LONG_PROMPT = (8, 2, 32) if REHEARSED else (128, 64, 2048)
TURNS = 1 if REHEARSED else 3  # of each engine, in turn
Turn = Callable[[int], Row]  # one run, by its number: tokens, seconds and further figures


def models(weights: str, beside: bool, quick: bool) -> Iterator[Row]:
    """Yield rows of decode and prefill with the weight format `weights`; with `beside`, also of transformers in
    bfloat16."""
    works = [("decode", batch) for batch in batches(quick)] + [("prefill", 1)]
    engines: dict[str, Callable[[str, int], Turn]] = {"workbench": WorkbenchEngine(weights, quick).work}
    if beside:
        try:
            engines["transformers"] = TransformersEngine().work
        except Exception as error:
            yield {"part": "model", "engine": "transformers", "error": f"{type(error).__name__}: {error}"}
    limits = ceilings(10)
    for work, batch in works:
        described = {"part": "model", "work": work, "batch": batch}
        yield from or_error(described, _in_turn, engines, work, batch, weights, limits)


def _in_turn(
    engines: dict[str, Callable[[str, int], Turn]], work: str, batch: int, weights: str, limits: Row
) -> Iterator[Row]:
    """Yield a row an engine: medians of `TURNS` runs, after one that captures and compiles.

    An engine that breaks leaves the others their rows.
    """
    turns: dict[str, Turn] = {}
    found: dict[str, list[Row]] = {}
    broken: dict[str, str] = {}
    for number in range(1 + TURNS):
        for name, engine in engines.items():
            if name in broken:
                continue
            try:
                turns[name] = turns.get(name) or engine(work, batch)
                row = turns[name](number)
            except Exception as error:
                broken[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                continue
            if number:
                found.setdefault(name, []).append(row)
    for name in engines:
        described = {"engine": name, "weights": weights if name == "workbench" else "dense"}
        yield {**described, **({"error": broken[name]} if name in broken else rated(found[name], limits))}


def rated(runs: list[Row], limits: Row) -> Row:
    """Return the median and range of an engine's rates over its runs, and the fractions of the card's ceilings if bytes
    and FLOPs are known.
    """
    rates = [run["tokens"] / run["wall_seconds"] for run in runs]
    row: Row = {"tokens_per_s": statistics.median(rates), "spread": [min(rates), max(rates)], "runs": len(runs)}
    if "bytes" in runs[0]:
        read = statistics.median(run["bytes"] / run["wall_seconds"] for run in runs)
        row["share_of_read"] = read / limits["read_bytes_per_s"]
        flops = statistics.median(run["flops"] / run["wall_seconds"] for run in runs)
        row["share_of_matrix"] = flops / limits["matrix_flops_per_s"]
        row["forward_share"] = statistics.median(run["forward_seconds"] / run["wall_seconds"] for run in runs)
        row["step_seconds"] = spread([step for run in runs for step in run["step_seconds"]])
    return row


class WorkbenchEngine:
    """The workbench's engine with the backend triton, through the runner's public interface."""

    def __init__(self, weights: str, quick: bool):
        import workbench

        most = max(batches(quick))
        self.runner = workbench.load(
            MODEL, device=DEVICE, backend="triton", weights=weights, max_num_seqs=most,
            max_num_batched_tokens=LONG_PROMPT, page_size=16,
            pages=most * (PROMPT + 4 * OUTPUT) // 16 + LONG_PROMPT // 16,
        )  # fmt: skip

    def work(self, work: str, batch: int) -> Turn:
        from workbench.bench.model import BenchCase, run_repetition

        bench_work = (
            BenchCase("decode", batch, 0, PROMPT, OUTPUT)
            if work == "decode"
            else BenchCase("prefill", 1, 0, LONG_PROMPT)
        )

        def turn(number: int) -> Row:
            return vars(run_repetition(self.runner, bench_work, number))

        return turn


class TransformersEngine:
    """The same model shape in transformers, in bfloat16, through its `generate` with default settings."""

    def __init__(self) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        from workbench.model.shapes import named_shape

        spec = named_shape(MODEL.removeprefix("shape:"))
        kind, self.vocab = spec.layers[0], spec.vocab_size
        config = LlamaConfig(
            vocab_size=spec.vocab_size, hidden_size=spec.hidden_size, intermediate_size=kind.intermediate_size,
            num_hidden_layers=len(spec.layers), num_attention_heads=kind.attention.num_heads,
            num_key_value_heads=kind.attention.num_kv_heads,
            max_position_embeddings=8192, eos_token_id=None, bos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device(DEVICE), torch.no_grad():
                self.model: Any = LlamaForCausalLM(config).eval()
        finally:
            torch.set_default_dtype(before)

    def work(self, work: str, batch: int) -> Turn:
        def decode(number: int) -> Row:
            first, whole = self._seconds(batch, PROMPT, 1), self._seconds(batch, PROMPT, OUTPUT)
            return {"tokens": batch * (OUTPUT - 1), "wall_seconds": whole - first}

        def prefill(number: int) -> Row:
            return {"tokens": LONG_PROMPT, "wall_seconds": self._seconds(1, LONG_PROMPT, 1)}

        return decode if work == "decode" else prefill

    def _seconds(self, batch: int, prompt: int, output: int) -> float:
        ids = torch.randint(1, self.vocab, (batch, prompt), device=DEVICE)
        lengths = {"max_new_tokens": output, "min_new_tokens": output}
        return elapsed(
            lambda: self.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **lengths)
        )


def batches(quick: bool) -> tuple[int, ...]:
    return (1, 2) if REHEARSED else (1, 16) if quick else (1, 4, 16, 64, 256)
