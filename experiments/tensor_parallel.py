"""Measure the cost of tensor-parallel ranks on one host: `python -m experiments.tensor_parallel [--out
experiments/records] [--json]`.

Bytes and seconds of the exchanges of ranks are predicted, from the model's sizes and from exchanges of processes that
compute nothing, before a model is loaded; then greedy decode steps of batch 1 are measured on one process and on ranks,
by the modules (`eager`) over each transport and by compiled halves of layers (`mlir`) in shared memory, in turns. Ranks
have as many threads as one process has, divided by their number. Nothing is asserted of times: speed is for machines
with a core, or a card, to each rank. It takes about a minute.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer

from experiments.tensor_parallel_rank import exchange
from workbench.engine.config import EngineConfig, parse_dtype
from workbench.engine.loaded_model import describe_model
from workbench.engine.runner import Runner
from workbench.machine.environment import environment
from workbench.machine.processor import cpu_times, others_cpu_share
from workbench.memory.ranks import rank_memories
from workbench.model.spec import ModelSpec
from workbench.request import Request, SamplingParameters
from workbench.runs.folder import write_dated_record
from workbench.tensor_parallel.executor import TensorParallelStore, memory_of_ranks
from workbench.tensor_parallel.processes import RankProcesses
from workbench.tensor_parallel.ranks import Traffic, Transport
from workbench.tensor_parallel.transformer import TensorParallelTransformer
from workbench.trace.events import Stepped

EXCHANGES, DECODED, ROUNDS = 200, 33, 5
PROMPT = tuple(range(5, 13))
PAGES = 8
EXCHANGE_MODULE = "experiments.tensor_parallel_rank"
WAYS: dict[str, tuple[str, Transport]] = {  # backend and transport of ranks
    "eager, shared memory": ("eager", "shared_memory"),
    "eager, gloo": ("eager", "gloo"),
    "mlir, shared memory": ("mlir", "shared_memory"),
}
NUMBERS_OF_LARGEST = 2  # numbers of a row and rank in a greedy step: the largest logit and its token
ONE_PROCESS = "one process"
Row = dict[str, Any]


def main(
    model: str = "demo",
    ranks: int = 2,
    dtype: str = "bfloat16",
    as_json: Annotated[bool, typer.Option("--json")] = False,
    out: Annotated[Path | None, typer.Option(help="folder of the record")] = None,
) -> None:
    spec, _ = describe_model(model)
    predicted = {name: predict(spec, dtype, ranks, *way) for name, way in WAYS.items()}
    before = cpu_times()
    settings: dict[str, Any] = {"dtype": dtype, "pages": PAGES}
    runners = {
        f"{backend}, {ONE_PROCESS}": Runner(EngineConfig.build(model, backend=backend, **settings))
        for backend in dict.fromkeys(backend for backend, _ in WAYS.values())
    }
    for name, (backend, transport) in WAYS.items():
        given = {"backend": backend, "tensor": ranks, "transport": transport, **settings}
        runners[name] = Runner(EngineConfig.build(model, **given))
    measured, memory = measure(runners), memory_of(runners, dtype)
    for runner in runners.values():
        runner.close()
    machine = environment()
    record = {
        "experiment": "tensor_parallel", "date": machine["date"], "model": model,
        "ranks": ranks, "dtype": dtype,
        "threads": torch.get_num_threads(), "environment": machine, "others_cpu_share": others_cpu_share(before),
        "predicted": predicted, "measured": measured, "memory": memory,
    }  # fmt: skip
    if out is not None:
        print(f"record  {write_dated_record(record, out, 'tensor_parallel')}", file=sys.stderr)
    print(json.dumps(record, indent=1)) if as_json else show(record)


def show(record: Row) -> None:
    print(f"{record['model']} on {record['ranks']} ranks, {record['dtype']}; a greedy decode step of batch 1, medians")
    print(f"{'':48}{'predicted':>14}{'measured':>14}")
    for way, predicted in record["predicted"].items():
        for name, value in predicted.items():
            print(f"{way + ', ' + name:48}{value:14,.3f}{record['measured'][way][name]:14,.3f}")
    for rank, row in enumerate(record["memory"]["ranks"]):
        for name in ("weight_bytes", "cache_bytes"):
            print(f"{f'rank {rank}, ' + name:48}{row['predicted'][name]:14,}{row['measured'][name]:14,}")
    for name, row in record["measured"].items():
        print(f"step, {name:42}{'':14}{row['ms of a step']:14,.3f} ms")


def predict(spec: ModelSpec, dtype: str, ranks: int, backend: str, transport: Transport) -> dict[str, float]:
    """Predict the number, bytes and milliseconds of the exchanges of one greedy decode step: a sum of the embedding,
    two sums per layer, and the largest logits."""
    halves = "float32" if backend == "mlir" else dtype
    kinds = (
        (1, spec.hidden_size, dtype),
        (2 * len(spec.layers), spec.hidden_size, halves),
        (1, NUMBERS_OF_LARGEST, "float32"),
    )
    processes = RankProcesses(ranks, 60.0, EXCHANGE_MODULE, transport)
    try:
        seconds = [
            count * statistics.median(_seconds_of_exchange(processes, width, kind) for _ in range(ROUNDS))
            for count, width, kind in kinds
        ]
    finally:
        processes.close()
    return {
        "exchanges a step": sum(count for count, _, _ in kinds),
        "bytes a step and rank": sum(count * width * parse_dtype(kind).itemsize for count, width, kind in kinds),
        "ms of exchanges a step": 1000 * sum(seconds),
    }


def _seconds_of_exchange(processes: RankProcesses, width: int, dtype: str) -> float:
    content = width, dtype, EXCHANGES
    processes.ranks.traffic = Traffic()
    processes.ranks.lead("exchange", content, lambda: exchange(processes.ranks, content))
    return processes.ranks.traffic.seconds / EXCHANGES


def measure(runners: dict[str, Runner]) -> dict[str, dict[str, float]]:
    """Measure decode steps on each runner in turn; the seconds of exchanges are those of rank 0, its waiting
    included."""
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    costs: dict[str, list[Traffic]] = {name: [] for name in runners}
    for turn in range(ROUNDS + 1):
        for name, runner in runners.items():
            steps, traffic = _decode(runner, f"turn-{turn}")
            if turn:  # the first warms up
                seconds[name] += steps
                costs[name].append(traffic)
    found = {}
    for name in runners:
        found[name] = {"ms of a step": 1000 * statistics.median(seconds[name])}
        if name in WAYS:
            steps = DECODED - 1
            found[name] |= {
                "exchanges a step": statistics.median(each.exchanges for each in costs[name]) / steps,
                "bytes a step and rank": statistics.median(each.bytes for each in costs[name]) / steps,
                "ms of exchanges a step": 1000 * statistics.median(each.seconds for each in costs[name]) / steps,
            }
    return found


def _decode(runner: Runner, name: str) -> tuple[list[float], Traffic]:
    """Return the seconds of decode steps, and what their exchanges cost together."""
    request = Request(name, PROMPT, SamplingParameters(temperature=0, max_tokens=DECODED, ignore_eos=True))
    seconds, began, model = [], 0.0, runner.model
    for event in runner.stream([request]):
        if not isinstance(event, Stepped):
            continue
        if event.phase == "decode":
            seconds.append(time.perf_counter() - began)
        elif isinstance(model, TensorParallelTransformer):
            model.ranks.traffic = Traffic()  # what follows is of decodes alone
        began = time.perf_counter()
    if not isinstance(model, TensorParallelTransformer):
        return seconds, Traffic()
    cost, model.ranks.traffic = model.ranks.traffic, Traffic()  # the next request counts on one of its own
    return seconds, cost


def memory_of(runners: dict[str, Runner], dtype: str) -> Row:
    """Return the weight and cache bytes of each rank, predicted and measured, beside those of a single process."""
    alone = runners[f"eager, {ONE_PROCESS}"]
    weights = sum(parameter.nbytes for parameter in alone.model.parameters())
    found: Row = {ONE_PROCESS: {"weight_bytes": weights, "cache_bytes": alone.store.bytes}, "ranks": []}
    shared, config = runners[next(iter(WAYS))], alone.config
    held = memory_of_ranks(cast(TensorParallelTransformer, shared.model), cast(TensorParallelStore, shared.store))
    ranks = rank_memories(alone.model.spec, dtype, alone.model.format, config.cache, tensor=len(held))
    tokens = (PAGES + 1) * config.cache.page_size
    for rank, (own, pages) in zip(ranks, held, strict=True):
        cache = round(tokens * sum(part.bytes_per_token for part in rank.parts))
        found["ranks"].append({
            "predicted": {"weight_bytes": rank.memory.weight_bytes, "cache_bytes": cache},
            "measured": {"weight_bytes": own, "cache_bytes": pages},
        })  # fmt: skip
    return found


if __name__ == "__main__":
    typer.run(main)
