"""A run as small as a run can be, and a process that dies in the midst of writing one."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from tests.helpers.processes import python
from workbench.errors import WorkbenchError
from workbench.runs.condition import MANIFEST, fingerprint
from workbench.runs.folder import RunFolder, write_dated_record
from workbench.runs.record import Record
from workbench.trace.events import Decoded, Finished, Stepped, Submitted
from workbench.trace.perfetto import chrome_trace
from workbench.trace.recorder import Recorder


def small_recorder(tokens: int = 3) -> Recorder:
    recorder = Recorder()
    recorder.record(Submitted(1.0, "a", prompt_tokens=2, arrival=0.9))
    for index in range(tokens):
        recorder.record(Decoded(1.5 + index, "a", "x", step=index, token_id=index, index=index))
        recorder.record(Stepped(1.5 + index, step=index, phase="decode", decode_tokens=1, wall_seconds=0.5))
    ids = tuple(range(tokens))
    recorder.record(Finished(9.0, "a", reason="length", token_ids=ids, output_text="x" * tokens))
    return recorder


def write_run(parent: Path, recorder: Recorder, name: str = "first") -> Path:
    run = RunFolder.create(parent, name)
    run.write_text("experiment.yaml", "question: how fast?\n")
    run.write_json("environment.json", {"python": "3.11"})
    run.write_table("requests.parquet", recorder.requests())
    run.write_table("steps.parquet", recorder.steps())
    run.write_table("tokens.parquet", recorder.tokens())
    run.write_table("verifications.parquet", recorder.verifications())
    run.write_table("decisions.parquet", recorder.decisions())
    run.write_json("summary.json", {"wall_s": 8.1, "ttft_s": {"p50": 0.6, "p90": 0.6, "p99": 0.6}})
    run.write_json("trace.json", chrome_trace(recorder), indent=None)
    return run.finish()


def write_note(parent: Path) -> Path:
    return write_dated_record({"date": "2025-01-02T03:04:05", "rows": list(range(50))}, parent, "note")


def die_before_call(write: Callable[[], object], number: int) -> bool:
    """Fork; the child writes, killed at its `number`-th file operation. Whether it got that far."""
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        return os.WIFSIGNALED(status)
    calls = itertools.count()
    operations = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link"}

    def watch(event: str, arguments: tuple) -> None:
        if event in operations and next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    write()
    os._exit(0)


def vouched(path: Path) -> Record:
    """Return the record of a folder that was changed by hand, with a manifest that vouches for what it holds."""
    files = {each.name: fingerprint(each) for each in path.iterdir() if each.name != MANIFEST}
    (path / MANIFEST).write_text(json.dumps({"files": files}))
    return Record.open(path)


def write_until_full(parent: Path) -> None:
    """Runs until one cannot be written, whose error is printed, as a run would end by it."""
    recorder = small_recorder(200)
    while True:
        try:
            write_run(parent, recorder)
        except WorkbenchError as error:
            print(error)
            return


def run_and_kill(*arguments: str) -> str:
    return python("-m", "tests.measure.runs", *arguments, check=True).stdout


if __name__ == "__main__":
    manner, folder = sys.argv[1], Path(sys.argv[2])
    if manner == "full":
        write_until_full(folder)
    else:
        number = 0
        write = {"run": lambda: write_run(here, small_recorder()), "note": lambda: write_note(here)}
        while True:
            here = folder / str(number)
            if manner == "note":
                write_note(here)  # the one that has the name already
            if not die_before_call(write[manner], number):
                break
            number += 1
        print(number)
