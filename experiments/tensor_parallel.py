"""Measure the cost of ranks on one host: `python -m experiments.tensor_parallel [--model demo] [--ranks 2] [--json]`.

Bytes and seconds of the sums over ranks are predicted, from the model's sizes and from exchanges of two processes that
compute nothing, before a model is loaded; then decode steps of batch 1 are measured on one process and on ranks, in
turns. Nothing here is asserted: speed is for machines with a core, or a card, to each rank.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Annotated

import torch
import typer

from experiments.tensor_parallel_rank import exchange
from workbench.engine.config import EngineConfig, parse_dtype
from workbench.engine.loaded_model import describe_model
from workbench.engine.runner import Runner
from workbench.machine.environment import environment
from workbench.model.spec import ModelSpec
from workbench.request import Request, SamplingParameters
from workbench.tensor_parallel.processes import RankProcesses
from workbench.tensor_parallel.ranks import Traffic
from workbench.tensor_parallel.transformer import TensorParallelTransformer
from workbench.trace.events import Stepped

EXCHANGES, DECODED, ROUNDS = 200, 24, 3
PROMPT = tuple(range(5, 13))
EXCHANGE_MODULE = "experiments.tensor_parallel_rank"


def main(
    model: str = "demo",
    ranks: int = 2,
    dtype: str = "bfloat16",
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    spec, _ = describe_model(model)
    predicted = predict(spec, dtype, ranks)
    settings = {"backend": "eager", "dtype": dtype, "pages": 8}
    runners = {count: Runner(EngineConfig.build(model, tensor=count, **settings)) for count in (1, ranks)}
    measured = measure(runners)
    record = {
        "experiment": "tensor_parallel", "model": spec.name, "ranks": ranks, "dtype": dtype,
        "environment": environment(), "predicted": predicted, "measured": measured,
    }  # fmt: skip
    runners[ranks].close()
    if as_json:
        print(json.dumps(record, indent=1))
        return
    print(f"{spec.name} on {ranks} ranks, {dtype}, eager; a decode step of batch 1, medians")
    print(f"{'':28}{'predicted':>14}{'measured':>14}")
    for name, value in predicted.items():
        print(f"{name:28}{value:14,.3f}{measured[name]:14,.3f}")
    print(f"step, one process {measured['ms of a step, one process']:.1f} ms, ranks {measured['ms of a step']:.1f} ms")


def predict(spec: ModelSpec, dtype: str, ranks: int) -> dict[str, float]:
    """Predict the exchanges of one decode step: two sums a layer, one of the embedding, and the logits of rank 0."""
    itemsize = parse_dtype(dtype).itemsize
    sums = 2 * len(spec.layers) + 1
    logits = -(-spec.vocab_size // ranks) * torch.float32.itemsize
    processes = RankProcesses(ranks, 60.0, EXCHANGE_MODULE)
    try:
        one = statistics.median(_seconds_of_exchange(processes, spec.hidden_size, dtype) for _ in range(ROUNDS))
    finally:
        processes.close()
    return {
        "exchanges a step": sums + 1,
        "bytes a step and rank": sums * spec.hidden_size * itemsize + logits,
        "ms of exchanges a step": 1000 * one * (sums + 1),
    }


def _seconds_of_exchange(processes: RankProcesses, width: int, dtype: str) -> float:
    content = width, dtype, EXCHANGES
    processes.ranks.traffic = Traffic()
    processes.ranks.lead("exchange", content, lambda: exchange(processes.ranks, content))
    return processes.ranks.traffic.seconds / EXCHANGES


def measure(runners: dict[int, Runner]) -> dict[str, float]:
    """Measure decode steps on each runner, in turns; what exchanges cost is of the last, with its waiting."""
    seconds: dict[int, list[float]] = {count: [] for count in runners}
    costs: list[Traffic] = []
    for turn in range(ROUNDS + 1):
        for count, runner in runners.items():
            steps, traffic = _decode(runner, f"turn-{turn}")
            if turn:  # the first warms up
                seconds[count] += steps
                costs += [traffic] if traffic.exchanges else []
    alone, together = (statistics.median(each) for each in seconds.values())
    return {
        "exchanges a step": statistics.median(each.exchanges for each in costs) / (DECODED - 1),
        "bytes a step and rank": statistics.median(each.bytes for each in costs) / (DECODED - 1),
        "ms of exchanges a step": 1000 * statistics.median(each.seconds for each in costs) / (DECODED - 1),
        "ms of a step": 1000 * together,
        "ms of a step, one process": 1000 * alone,
    }


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
            model.ranks.traffic = Traffic()
        began = time.perf_counter()
    if not isinstance(model, TensorParallelTransformer):
        return seconds, Traffic()
    cost, model.ranks.traffic = model.ranks.traffic, Traffic()  # the next request counts on one of its own
    return seconds, cost


if __name__ == "__main__":
    typer.run(main)
