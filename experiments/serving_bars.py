"""Measure the cost of HTTP against the same requests in process: `python -m experiments.serving_bars [--out
experiments/records]`.

The same requests to one runner, in process and through its server, in turn, since machines drift; the client is a
process of its own on the same machine, which runs before the first time is taken. The rules, written before the first
run:

- 16 concurrent streams reach at least 0.95 of the tokens a second that the same requests reach in process.
- TTFT of a request alone grows by at most 5 ms at the median.
- 64 streams that wait take less than 2% of a core.

Three things were added after a look at first runs. Each token must come as an event of its own: the model has no
tokenizer, and the server held its ids back until the answer's end, which measured neither rule. TTFTs are taken one
by one in turn; in blocks of eight, requests in process came so soon behind each other that HTTP seemed the faster. A
client that starts for each request (record serving_bars-20261124-044800) competes for one of two cores while it starts:
now it lives as long as the run.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from rich.console import Console

import workbench
from experiments.serving_client import Ask, ClientProcess, Reply
from workbench.display import Table
from workbench.engine.runner import Runner
from workbench.engine.runner_thread import RunnerThread
from workbench.machine.environment import environment
from workbench.machine.processor import cpu_times, is_contended, others_cpu_share
from workbench.progress import discard
from workbench.request import Request, SamplingParameters, random_token_ids
from workbench.runs.folder import write_dated_record
from workbench.serve.server import serve
from workbench.trace.events import Decoded

MIN_THROUGHPUT, MAX_TTFT_MS, MAX_IDLE_SHARE = 0.95, 5.0, 0.02
STREAMS, IDLE_STREAMS = 16, 64
PROMPT, OUTPUT = 64, 64
TTFTS = 8  # of each kind in a round, in turn
IDLE_SECONDS = 20.0  # longer than the time after which a stream that waits is pinged


class Load:
    """Requests drawn from a seed, both as values for the engine and as bodies for `/v1/completions`."""

    def __init__(self, runner: Runner, model: str, seed: int = 0):
        self._draw, self._model, self._number = random.Random(seed), model, 0
        self._vocab = runner.model.spec.vocab_size

    def requests(self, count: int, output: int) -> list[Request]:
        self._number += 1
        sampling = SamplingParameters(temperature=0, max_tokens=output, ignore_eos=True)
        return [
            Request(f"bar-{self._number}-{each}", random_token_ids(self._draw, self._vocab, PROMPT), sampling)
            for each in range(count)
        ]

    def asks(self, count: int, output: int) -> list[Ask]:
        return [
            Ask(
                "/v1/completions",
                {
                    "model": self._model, "prompt": list(each.prompt_ids), "max_tokens": output, "temperature": 0,
                    "ignore_eos": True, "stream": True, "return_token_ids": True,
                },
            )
            for each in self.requests(count, output)
        ]  # fmt: skip


def throughput_in_process(runner: Runner, load: Load) -> float:
    """Return the tokens per second of STREAMS requests in process, from the first submission to the last token."""
    began = runner.clock()
    times = [event.time for event in runner.stream(load.requests(STREAMS, OUTPUT)) if isinstance(event, Decoded)]
    assert len(times) == STREAMS * OUTPUT
    return len(times) / (times[-1] - began)


def throughput_of_streams(client: ClientProcess, url: str, load: Load) -> float:
    replies = client.ask_all(url, load.asks(STREAMS, OUTPUT))
    _check(replies, OUTPUT)
    return STREAMS * OUTPUT / (max(each.times[-1] for each in replies) - min(each.sent for each in replies))


def ttft_in_process(runner: Runner, load: Load) -> float:
    (request,), began = load.requests(1, 2), runner.clock()
    first, *_ = [event.time for event in runner.stream([request]) if isinstance(event, Decoded)]  # read to the end:
    return 1e3 * (first - began)  # what is left of one request would be in the way of the next


def ttft_of_stream(client: ClientProcess, url: str, load: Load) -> float:
    """Return the TTFT of one request over HTTP, in ms from the moment when it is sent."""
    replies = client.ask_all(url, load.asks(1, 2))
    _check(replies, 2)
    return 1e3 * (replies[0].times[0] - replies[0].sent)


def idle_share(runner: Runner, client: ClientProcess, url: str, load: Load, streams: int) -> float:
    """Return the fraction of one core that this process uses while `streams` streams wait for a runner that is kept
    from stepping."""
    process = psutil.Process()

    def held(_: Runner) -> float:
        time.sleep(2.0)  # until all streams wait
        before, began = process.cpu_times(), time.monotonic()
        time.sleep(IDLE_SECONDS)
        after = process.cpu_times()
        return (after.user + after.system - before.user - before.system) / (time.monotonic() - began)

    share = RunnerThread.attach(runner).submit_call(held)
    time.sleep(0.5)
    _check(client.ask_all(url, load.asks(streams, 1)) if streams else [], 1)
    return share.result()


def _check(replies: list[Reply], tokens: int) -> None:
    for each in replies:
        assert each.status == 200 and each.events and each.events[-1] == "[DONE]", (each.status, each.events[-1:])
        assert len(each.events) > tokens, f"{len(each.events)} events for {tokens} tokens"


def measure(model: str, rounds: int, progress: Any = discard) -> dict[str, Any]:
    """Measure the three limits (throughput, TTFT, idle cost) and return the record."""
    runner = workbench.load(model, max_num_seqs=STREAMS, report=discard)
    load, before = Load(runner, "bars"), cpu_times()
    with serve({"bars": runner}) as server, ClientProcess() as client:
        inside, through, ttft_inside, ttft_through = [], [], [], []
        for turn in range(rounds + 1):
            found = throughput_in_process(runner, load), throughput_of_streams(client, server.url, load)
            progress(f"round {turn}: {found[0]:.0f} tokens/s in process, {found[1]:.0f} through HTTP")
            if turn:  # not the first, which compiles
                inside.append(found[0])
                through.append(found[1])
        for _ in range(TTFTS * rounds):
            ttft_inside.append(ttft_in_process(runner, load))
            ttft_through.append(ttft_of_stream(client, server.url, load))
        shares = {str(count): idle_share(runner, client, server.url, load, count) for count in (0, IDLE_STREAMS)}
    others = others_cpu_share(before, cpu_times())
    ratio = statistics.median(b / a for a, b in zip(inside, through, strict=True))
    grown = statistics.median(ttft_through) - statistics.median(ttft_inside)
    idle = shares[str(IDLE_STREAMS)] - shares["0"]
    return {
        "experiment": "serving_bars", "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": environment(), "model": model, "backend": str(runner.core.backends), "rounds": rounds,
        "others_cpu_share": others, "contended": is_contended(others),
        "tokens_per_second": {"in process": inside, "through HTTP": through}, "throughput_ratio": ratio,
        "ttft_ms": {"in process": ttft_inside, "through HTTP": ttft_through}, "ttft_grown_ms": grown,
        "share_of_a_core": shares, "idle_share": idle,
        "met": {
            "throughput": ratio >= MIN_THROUGHPUT, "ttft": grown <= MAX_TTFT_MS, "idle": idle < MAX_IDLE_SHARE,
        },
    }  # fmt: skip


def table(record: dict[str, Any]) -> Table:
    met = {name: "met" if each else "missed" for name, each in record["met"].items()}
    rows = [
        (f"tokens/s of {STREAMS} streams, HTTP to in process", f"{record['throughput_ratio']:.3f}",
         f"at least {MIN_THROUGHPUT}", met["throughput"]),
        ("TTFT added by HTTP (ms)", f"{record['ttft_grown_ms']:.2f}", f"at most {MAX_TTFT_MS:g}", met["ttft"]),
        (f"share of a core of {IDLE_STREAMS} waiting streams", f"{record['idle_share']:.2%}",
         f"under {MAX_IDLE_SHARE:.0%}", met["idle"]),
    ]  # fmt: skip
    note = f"{record['model']}, {record['backend']}; {record['others_cpu_share']:.0%} of the CPU used by others"
    return Table("what HTTP costs", rows, ("", "measured", "asked", ""), note=note)


def main(
    model: Annotated[str, typer.Option(help="the model to serve")] = "shape:smollm2-135m",
    rounds: Annotated[int, typer.Option(help="rounds of each throughput, in turn")] = 5,
    out: Annotated[Path | None, typer.Option(help="folder for a dated record")] = None,
) -> None:
    """Measure throughput, TTFT and idle cost through HTTP against the same in process."""
    record = measure(model, rounds, lambda line: print(line, file=sys.stderr, flush=True))
    Console(width=120).print(table(record).text())
    if out is not None:
        print(write_dated_record(record, out, "serving_bars"), file=sys.stderr)


if __name__ == "__main__":
    typer.run(main)
