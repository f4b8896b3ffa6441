"""Kill processes at random, and look for what is left.

`python -m tests.long.random_kills [--kills 10] [--json] [--out DIR]`: each kill is a SIGKILL of one process of a
running service, at a random token: of an engine of the pools or their coordinator (pages in a shared memory, or sent by
gloo), or of any rank of a model that is cut in two. It fails where a request of the pools has not ended as it should,
where its tokens are not those of an engine that was not harmed, each streamed once and in order, where a rank's death
leaves others waiting, or a request without an end that says so, where a process that the service started still lives,
or where /dev/shm has a file more than before.
"""

from __future__ import annotations

import functools
import json
import os
import random
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from workbench.cluster.pools import PrefillDecodePools
from workbench.engine.config import EngineConfig
from workbench.engine.runner import Runner, generate
from workbench.machine.environment import environment
from workbench.request import Request, SamplingParameters
from workbench.runs.folder import write_dated_record
from workbench.trace.events import Decoded, Event, Finished

SERVICES = ("pools over shared memory", "pools over gloo", "ranks over shared memory", "ranks over gloo")
MARK = "WORKBENCH_RANDOM_KILL"  # in the environment of all that a service starts
FAILED = "failed: "  # begins the last line of a service, before what is wrong with its requests, as JSON
LEAVE_SECONDS = 120.0  # for processes to end after a kill
TOKEN_SECONDS = 300.0  # for a service to start and to reach the token of the kill
RANK_LOST = re.compile(r"rank \d+ ended \(signal 9|the ranks ended")  # in the reason of a request that a kill ended
SHM = Path("/dev/shm")
REQUESTS, TOKENS = 6, 24
LAST_TOKEN = 60  # at which a kill comes
SETTINGS: dict[str, Any] = {"backend": "mlir", "page_size": 64, "pages": 16}  # which keeps bits in any batch


def main(
    kills: Annotated[int, typer.Option(help="kills of each service")] = 10,
    seed: int = 0,
    as_json: Annotated[bool, typer.Option("--json")] = False,
    out: Annotated[Path | None, typer.Option(help="folder of the record")] = None,
) -> None:
    draw, rows = random.Random(seed), []
    for service in SERVICES:
        for _ in range(kills):
            rows.append(kill_once(service, draw))
            if not as_json:
                print(_words(rows[-1]), flush=True)
    machine = environment()
    record = {"experiment": "random_kills", "date": machine["date"], "kills": rows, "seed": seed}
    record["environment"] = machine
    if out is not None:
        print(f"record  {write_dated_record(record, out, 'random_kills')}", file=sys.stderr)
    if as_json:
        print(json.dumps(record, indent=1))
    if failed := [row for row in rows if row["faults"]]:
        print(f"{len(failed)} of {len(rows)} kills left something", file=sys.stderr)
        raise typer.Exit(1)


def _words(row: dict[str, Any]) -> str:
    found = "; ".join(row["faults"]) or f"as before, {row['seconds']:.1f} s after the kill"
    return f"{row['service']:26} {row['killed']:12} at token {row['token']:3}: {found}"


def kill_once(service: str, draw: random.Random) -> dict[str, Any]:
    """Start a service, kill one of its processes at a random token, and return what was found, `faults` above all."""
    files, mark = set(SHM.iterdir()), secrets.token_hex(8)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.long.random_kills", "serve", service, json.dumps(unharmed_ids())],
        env=os.environ | {MARK: mark}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    with ending(mark, TOKEN_SECONDS):
        names: dict[str, int] = json.loads(process.stdout.readline() or "{}")
        if not names:
            raise RuntimeError(f"{service}: it ended, or did not start within {TOKEN_SECONDS:.0f} s")
        killed, token = draw.choice(sorted(names)), draw.randrange(1, LAST_TOKEN)
        for _ in range(token):
            process.stdout.readline()
    began = time.monotonic()
    with suppress(ProcessLookupError):
        os.kill(names[killed], signal.SIGKILL)
    with ending(mark, LEAVE_SECONDS) as is_late:
        said = process.stdout.read()  # until all have ended that may print
        status = process.wait()
    faults = [f"it had not ended after {LEAVE_SECONDS:.0f} s"] if is_late.is_set() else []
    if names[killed] == process.pid:
        faults += status_faults(status, said, -signal.SIGKILL)
    elif service.startswith("pools"):
        faults += status_faults(status, said, 0)  # engines are replaced
    else:
        faults += status_faults(status, said, 1) or rank_faults(said)  # of ranks none is
    while (left := marked(mark)) and time.monotonic() - began < LEAVE_SECONDS:
        time.sleep(0.02)
    faults += [f"process {each} is left" for each in left]
    seconds = time.monotonic() - began
    faults += [f"{file} is left" for file in sorted(set(SHM.iterdir()) - files) if not is_mapped(file)]
    return {"service": service, "killed": killed, "token": token, "seconds": seconds, "faults": faults}


@contextmanager
def ending(mark: str, seconds: float) -> Iterator[threading.Event]:
    """End the processes of `mark` where the block takes longer than `seconds`; the event says that it did."""
    is_late = threading.Event()

    def end() -> None:
        is_late.set()
        for each in marked(mark):
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)

    timer = threading.Timer(seconds, end)
    timer.start()
    try:
        yield is_late
    finally:
        timer.cancel()
        timer.join()


def status_faults(status: int, said: str, expected: int) -> list[str]:
    """Return what is wrong with how a service ended."""
    return [f"it ended with {status} and not {expected}: {said.strip()[-200:]}"] if status != expected else []


def rank_faults(said: str) -> list[str]:
    """Return what is wrong with requests besides that a rank was killed, by the service's last line."""
    *_, last = said.splitlines() or [""]
    found = last.removeprefix(FAILED)
    if found == last:
        return [f"it said no faults: {said.strip()[-200:]}"]
    return [why for why in json.loads(found) if not RANK_LOST.search(why)]


def marked(mark: str) -> list[int]:
    """Return the processes that live and have `mark` in the environment with which they started."""
    found = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError):
            if folder.name.isdigit() and f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def is_mapped(file: Path) -> bool:
    """Return whether a process of this machine maps a file: another program's, where the service has ended."""
    for folder in Path("/proc").iterdir():
        with suppress(OSError):
            if folder.name.isdigit() and str(file) in (folder / "maps").read_text():
                return True
    return False


def asked_requests() -> list[Request]:
    """Return what every service is asked."""
    sampling = SamplingParameters(max_tokens=TOKENS, temperature=0, ignore_eos=True)
    return [Request(f"r{number}", tuple(range(5, 25 + 7 * number)), sampling) for number in range(REQUESTS)]


def pool_config() -> EngineConfig:
    """Return the settings of an engine of the pools: a request has the same tokens in any batch."""
    return EngineConfig.build("demo", prefix="radix", batch_invariant=True, **SETTINGS)


@functools.cache
def unharmed_ids() -> dict[str, list[int]]:
    """Return the tokens of every request by one engine that lives."""
    return {name: list(end.token_ids) for name, end in generate(Runner(pool_config()), asked_requests()).items()}


def serve(service: str, wanted: dict[str, list[int]]) -> None:
    """Serve requests, a line for each token; the first line names the processes.

    Args:
        service: one of `SERVICES`.
        wanted: the tokens of each request of the pools.
    """
    kind, _, transport = service.partition(" over ")
    asked = asked_requests()
    if kind == "ranks":
        carrier = "gloo" if transport == "gloo" else "shared_memory"
        runner = Runner(EngineConfig.build("demo", tensor=2, transport=carrier, **SETTINGS))
        others = [pid for pid in marked(os.environ[MARK]) if pid != os.getpid()]
        ranks = {f"rank {number}": pid for number, pid in enumerate([os.getpid(), *others])}
        show(runner.stream(asked), ranks, None)
        runner.close()
        return
    with PrefillDecodePools(pool_config(), 1, 2, transfer="gloo" if transport == "gloo" else "shared") as pools:
        engines = {slot.name: slot.process.pid for slot in pools.slots if slot.process is not None and slot.process.pid}
        show(pools.stream(asked), {"coordinator": os.getpid()} | engines, wanted)


def show(events: Iterator[Event], names: dict[str, int], wanted: dict[str, list[int]] | None) -> None:
    """Print the processes, then a line a token; exit with 1 where `faults_of` finds any."""
    print(json.dumps(names), flush=True)
    failed = faults_of(_printed(events), wanted)
    if failed:
        print(FAILED + json.dumps(failed), flush=True)
        sys.exit(1)


def _printed(events: Iterator[Event]) -> Iterator[Event]:
    for event in events:
        if isinstance(event, Decoded):
            print(event.request_id, flush=True)
        yield event


def faults_of(events: Iterable[Event], wanted: dict[str, list[int]] | None) -> list[str]:
    """Return what is wrong with the streams and ends of requests.

    Args:
        events: of all requests.
        wanted: the tokens of each; None: `TOKENS` of any of each of `asked_requests`, unless it ended by an error, as
            another number of ranks rounds otherwise.
    """
    failed, streamed, ended = list[str](), dict[str, list[tuple[int, int]]](), dict[str, list[int]]()
    errors: set[str] = set()
    for event in events:
        if isinstance(event, Decoded):
            streamed.setdefault(event.request_id, []).append((event.index, event.token_id))
        elif isinstance(event, Finished):
            failed += [f"{event.request_id} ended twice"] if event.request_id in ended else []
            if event.error:
                failed.append(event.error)
                errors.add(event.request_id)
            ended[event.request_id] = list(event.token_ids)
    if wanted is None:
        for name in (each.request_id for each in asked_requests()):
            if name not in ended:
                failed.append(f"{name} never ended")
            elif name not in errors and len(ended[name]) != TOKENS:
                failed.append(f"{name} has {len(ended[name])} tokens")
        return failed
    for name, ids in wanted.items():
        if ended.get(name) != ids:
            failed.append(f"{name} ended with {ended.get(name)} and not {ids}")
        if streamed.get(name) != list(enumerate(ids)):
            failed.append(f"{name} streamed {streamed.get(name)} and not {ids}")
    return failed


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2], json.loads(sys.argv[3]))
    else:
        typer.run(main)
