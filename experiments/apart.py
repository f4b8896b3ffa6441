"""Measure prefill and decode apart on recorded traffic: `python -m experiments.apart TRACE [--out FOLDER]`.

The same requests, at their recorded distances, go to two processes of one core each: one pool that computes prompts in
chunks between decodes, one pool that computes them whole, and two pools (one engine for prompts, one for decodes) that
share memory or send bytes. The simulator, with step times fitted to one engine of this machine, predicts all four; its
figures are in the record, with the time at which they were made, before anything is measured.

The rule, written before: separate pools pay where their p99 of the longest gap is at most half of that of one pool with
chunks, and their goodput no lower.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from workbench.cluster.pools import PrefillDecodePools
from workbench.display import Table
from workbench.engine.cache import cache_num_pages
from workbench.engine.config import EngineConfig
from workbench.engine.loaded_model import LoadedModel
from workbench.engine.runner import Runner, generate
from workbench.experiment.experiment import SLO
from workbench.machine.environment import environment
from workbench.machine.processor import cpu_times, is_contended, others_cpu_share
from workbench.measure.goodput import goodput
from workbench.measure.simulated import fleet_metrics, model_sizes
from workbench.progress import discard
from workbench.request import Request, SamplingParameters
from workbench.runs.folder import write_dated_record
from workbench.runs.metrics import distribution
from workbench.scheduler.plan import SchedulerLimits
from workbench.simulate.arrival import Arrival, request_from_arrival, scale_arrivals
from workbench.simulate.fleet import Fleet, InstancePool, KVTransfer
from workbench.simulate.instance import InstanceSpec, instance_spec
from workbench.simulate.roofline import Hardware
from workbench.simulate.source import OpenLoopSource
from workbench.simulate.step_times import StepTimeModel, fit_step_times
from workbench.simulate.trace_files import read_trace
from workbench.trace.events import Decoded, Event, Finished
from workbench.trace.recorder import Recorder

CHUNK = 128  # prompt tokens of a step of one pool with chunks
WHOLE = 4096  # of a step that computes prompts whole
SHARED = KVTransfer(bytes_per_second=1e15, latency=0.0005)  # page numbers travel (0.2 ms), and a step's end is awaited
GLOO = KVTransfer(bytes_per_second=1.6e9, latency=0.0005)  # 128 MiB in 78 ms between two processes of this host
HALF = 0.5
FIGURES = ("ttft_s", "longest_gap_s", "tpot_s")
# name: engines for prompts, engines for decodes, tokens of a step, transfer, its cost
VARIANTS: dict[str, tuple[int, int, int, str, KVTransfer]] = {
    "one pool, chunks": (2, 0, CHUNK, "shared", SHARED),
    "one pool, whole prompts": (2, 0, WHOLE, "shared", SHARED),
    "two pools, shared memory": (1, 1, WHOLE, "shared", SHARED),
    "two pools, gloo": (1, 1, WHOLE, "gloo", GLOO),
}


def config_of(model: str, tokens: int, pages: int) -> EngineConfig:
    """Return the configuration of an engine whose steps compute at most `tokens` tokens."""
    return EngineConfig.build(model, pages=pages, max_num_batched_tokens=tokens, max_num_seqs=32)


def traffic(trace: Path, requests: int, time_scale: float, length_scale: float, most: int) -> list[Arrival]:
    """Return the first requests of a trace, scaled; longer ones than `most` tokens are left out."""
    scaled = scale_arrivals(read_trace(trace), time_scale, length_scale)
    fits = (each for each in scaled if each.prompt_tokens + each.output_tokens < most)
    return list(itertools.islice(fits, requests))


def fit_steps(loaded: LoadedModel, config: EngineConfig, arrivals: Iterable[Arrival]) -> StepTimeModel:
    """Fit step times to one engine of one thread that computes the traffic's requests as fast as it can."""
    runner, recorder = Runner(config, loaded, report=discard), Recorder()
    vocab = runner.model.spec.vocab_size
    runner.set_listener(recorder.record)
    generate(runner, (request_of(each, f"fit-{n}", vocab, arrives=False) for n, each in enumerate(arrivals)))
    return fit_step_times(recorder.steps(), "one engine")


def request_of(arrival: Arrival, name: str, vocab: int, arrives: bool = True) -> Request:
    """Return the request of an arrival, of its lengths and random ids."""
    made = request_from_arrival(arrival, name, vocab, SamplingParameters(temperature=0))
    return made if arrives else Request(name, made.prompt_ids, made.sampling)


def predict(
    arrivals: list[Arrival], times: StepTimeModel, loaded: LoadedModel, config: EngineConfig, slo: SLO
) -> dict[str, dict[str, Any]]:
    """Return the simulator's figures of each variant."""
    model = loaded.transformer
    dtype = str(model.dtype).removeprefix("torch.")
    sizes = model_sizes(model.spec, dtype, model.format, config.cache)
    hardware = Hardware(
        name="here", flops=1.0, bandwidth=1.0, memory=1e15, link=1.0, network=1.0, cpu_link=1.0, source="fitted steps"
    )

    def spec(tokens: int, receives: bool) -> InstanceSpec:
        limits = SchedulerLimits(config.schedule.max_num_seqs, tokens)
        return instance_spec(
            sizes, hardware, limits, page_size=config.cache.page_size, pages=max(cache_num_pages(model, config)),
            times=times, receives_kv=receives,
        )  # fmt: skip

    found = {}
    for name, (prefill, decode, tokens, _, transfer) in VARIANTS.items():
        pools = [InstancePool(spec(tokens, False), prefill)]
        pools += [InstancePool(spec(tokens, True), decode)] if decode else []
        fleet = Fleet(OpenLoopSource(arrivals), *pools, transfer=transfer).run()
        figures = fleet_metrics(fleet, slo, time.perf_counter())
        found[name] = {each: figures[each] for each in FIGURES} | {"goodput": figures["goodput"]}
    return found


def measure(
    arrivals: list[Arrival], model: str, pages: int, vocab: int, slo: SLO, rounds: int, say: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    """Run each variant `rounds` times, in turn; return its medians over rounds."""
    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in VARIANTS}
    for turn in range(rounds):
        for name, (prefill, decode, tokens, transfer, _) in VARIANTS.items():
            say(f"round {turn + 1} of {rounds}: {name}")
            with PrefillDecodePools(
                config_of(model, tokens, pages),
                prefill,
                decode,
                transfer=transfer,  # type: ignore[arg-type]
            ) as pools:
                warm = [request_of(each, f"warm-{n}", vocab, arrives=False) for n, each in enumerate(arrivals[:4])]
                list(pools.stream(warm))
                asked = [request_of(each, f"r-{n}", vocab) for n, each in enumerate(arrivals)]
                began = time.perf_counter()
                events = list(pools.stream(asked))
                measured[name].append(
                    _figures(events, asked, began, slo) | {"handed over": pools.counts["handed over"]}
                )
    return {name: _medians(each) for name, each in measured.items()}


def _figures(events: list[Event], asked: list[Request], began: float, slo: SLO) -> dict[str, Any]:
    times: dict[str, list[float]] = {request.request_id: [] for request in asked}
    for event in events:
        if isinstance(event, Decoded):
            times[event.request_id].append(event.time)
        elif isinstance(event, Finished) and event.error:
            raise RuntimeError(f"{event.request_id}: {event.error}")
    rows = []
    for request in asked:
        mine = times[request.request_id]
        gaps = [after - before for before, after in itertools.pairwise(mine)]
        rows.append({
            "ttft_s": mine[0] - began - request.arrival,
            "tpot_s": (mine[-1] - mine[0]) / len(gaps) if gaps else None,
            "longest_gap_s": max(gaps, default=None),
        })  # fmt: skip
    seconds = max(mine[-1] for mine in times.values()) - began
    return {name: distribution(row[name] for row in rows) for name in FIGURES} | {
        "goodput": goodput(rows, slo, seconds)
    }


def _medians(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians over rounds of every number."""
    first = rounds[0]
    return {
        key: _medians([each[key] for each in rounds])
        if isinstance(value, dict)
        else statistics.median(each[key] for each in rounds)
        if isinstance(value, int | float)
        else value
        for key, value in first.items()
    }


def judge(measured: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the verdict by the rule above."""
    one, two = measured["one pool, chunks"], measured["two pools, shared memory"]
    times = two["longest_gap_s"]["p99"] / one["longest_gap_s"]["p99"]
    keeps = two["goodput"]["requests"] >= one["goodput"]["requests"]
    return {
        "rule": "p99 of the longest gap at most half of one pool's with chunks, and goodput no lower: pays",
        "outcome": "pays" if times <= HALF and keeps else "does not pay here",
        "longest gap, times one pool's": times,
        "requests within the SLO": [one["goodput"]["requests"], two["goodput"]["requests"]],
    }


def table(record: dict[str, Any]) -> Table:
    rows = []
    for name in VARIANTS:
        for kind in ("predicted", "measured"):
            if found := record.get(kind, {}).get(name):
                cells = [f"{found[each][key] * 1e3:.0f}" for each in FIGURES for key in ("p50", "p99")]
                rows.append((name, kind, *cells, found["goodput"]["requests"]))
    heads = [f"{each.removesuffix('_s')} {key}, ms" for each in FIGURES for key in ("p50", "p99")]
    return Table("prefill and decode apart", rows, ("variant", "", *heads, "within SLO"))


def main(
    trace: Annotated[Path, typer.Argument(help="a recorded trace: Azure's CSV or Mooncake's JSON lines")],
    model: Annotated[str, typer.Option(help="model of every engine")] = "shape:smollm2-135m",
    requests: Annotated[int, typer.Option(help="requests of the trace")] = 30,
    time_scale: Annotated[float, typer.Option(help="factor on the trace's distances")] = 8.0,
    length_scale: Annotated[float, typer.Option(help="factor on the trace's lengths")] = 0.15,
    pages: Annotated[int, typer.Option(help="pages of each engine, of 64 tokens")] = 300,
    ttft: Annotated[float, typer.Option(help="SLO: seconds to the first token")] = 1.0,
    tpot: Annotated[float, typer.Option(help="SLO: seconds per later token")] = 0.1,
    rounds: Annotated[int, typer.Option(help="rounds, variants in turn")] = 1,
    out: Annotated[Path | None, typer.Option(help="folder for a dated record")] = None,
) -> None:
    """Predict, then measure, then judge."""

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    torch.set_num_threads(1)
    slo, config = SLO(ttft=ttft, tpot=tpot), config_of(model, CHUNK, pages)
    say("loading, and fitting step times to one engine")
    loaded = LoadedModel.load(config, discard)
    spec = loaded.transformer.spec
    arrivals = traffic(trace, requests, time_scale, length_scale, spec.max_position_embeddings)
    record: dict[str, Any] = {
        "experiment": "apart", "date": datetime.now(UTC).isoformat(timespec="seconds"), "trace": trace.name,
        "model": model, "requests": len(arrivals), "time_scale": time_scale,
        "length_scale": length_scale, "rounds": rounds, "environment": environment(),
        "prompt_tokens": distribution(each.prompt_tokens for each in arrivals),
        "output_tokens": distribution(each.output_tokens for each in arrivals),
    }  # fmt: skip
    steps = fit_steps(loaded, config, arrivals[: max(4, requests // 4)])
    record |= {"step_times": steps.name, "predicted": predict(arrivals, steps, loaded, config, slo)}
    record["predicted_at"] = datetime.now(UTC).isoformat()
    if out is not None:
        say(f"prediction: {write_dated_record(record, out, 'apart_prediction')}")
    del loaded
    before = cpu_times()
    record["measured"] = measure(arrivals, model, pages, spec.vocab_size, slo, rounds, say)
    share = others_cpu_share(before, cpu_times())
    record |= {"others_cpu_share": share, "contended": is_contended(share), "verdict": judge(record["measured"])}
    Console(width=160).print(table(record).text())
    Console(width=160).print(record["verdict"])
    if out is not None:
        say(str(write_dated_record(record, out, "apart")))


if __name__ == "__main__":
    typer.run(main)
