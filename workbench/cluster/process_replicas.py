"""Run replicas as child processes on this machine, each behind one connection, with which it ends.

front's process: a thread for each replica hears it ---> child: engine, reports of its steps, how long a step has lasted
                 submit, cancel, call (in order, not waited for) --->
"""

from __future__ import annotations

import itertools
import os
import pickle
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from workbench.cluster.launcher import CLOSED
from workbench.cluster.replica import PageCounts, ReadyReplica, ReplicaEngine, Report, fingerprint_of, tokens_in_cache
from workbench.engine.config import EngineConfig
from workbench.errors import WorkbenchError, describe_error
from workbench.request import Request

BEAT_SECONDS = 0.5  # between two words of a replica on how long its step has lasted
SILENT_SECONDS = 120.0  # without a word until a replica is given up
READY_SECONDS = 600.0  # for a replica to load its model
READY, FAILED, REPORT, BEAT, ANSWER, SUBMIT, CANCEL, CALL = range(8)  # kinds of messages


class ProcessReplica:
    """The front's handle of a child process."""

    def __init__(self, number: int, threads: int, config: EngineConfig, step_seconds: float | None):
        mine, its = socket.socketpair()
        with its:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "workbench.cluster.process_replicas", str(its.fileno()), str(threads)],
                pass_fds=[its.fileno()], stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in a terminal is the front's
            )  # fmt: skip
        self.number, self.process_id, self.busy_seconds = number, self._child.pid, 0.0
        self.ready: Any = None
        self.is_stopped = False
        self._step_seconds = step_seconds
        self._connection = Connection(mine.detach())
        self._outbox: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self._answers: dict[int, Future[Any]] = {}
        self._questions = itertools.count()
        threading.Thread(target=self._send, name=f"to replica {number}", daemon=True).start()
        self._outbox.put((config,))

    def _send(self) -> None:
        """Send messages in order; a process that does not read holds back these alone."""
        while (message := self._outbox.get()) is not None:
            with suppress(OSError, ValueError):  # its process has ended, and `listen` says so
                self._connection.send(message)

    def wait_until_ready(self, is_cancelled: Callable[[], bool]) -> None:
        """Wait until it can serve (WorkbenchError where it cannot)."""
        began, where = time.monotonic(), f"replica {self.number} did not start"
        while not self._connection.poll(BEAT_SECONDS):
            if is_cancelled():
                raise WorkbenchError(CLOSED)
            if time.monotonic() - began > READY_SECONDS:
                raise WorkbenchError(f"{where}: it cannot serve after {READY_SECONDS:.0f} s")
        try:
            kind, found = self._connection.recv()
        except (EOFError, OSError):
            raise WorkbenchError(f"{where}: its process ended with {self._child.wait()}") from None
        if kind == FAILED:
            raise WorkbenchError(f"{where}: {found}")
        self.ready = found

    def submit(self, requests: Sequence[Request]) -> None:
        self._outbox.put((SUBMIT, tuple(requests)))

    def cancel(self, request_id: str) -> None:
        self._outbox.put((CANCEL, request_id))

    def call(self, function: Callable[[Any], Any]) -> Any:
        """Return `function(runner)`, run in the replica between two of its steps."""
        number, answer = next(self._questions), Future[Any]()
        self._answers[number] = answer
        self._outbox.put((CALL, number, _pickled(function)))
        if self.is_stopped:
            self._give_up_answers()
        return answer.result()

    def stop(self) -> None:
        self.is_stopped = True
        with suppress(OSError):
            self._child.kill()
        self._outbox.put(None)
        self._give_up_answers()

    def close(self) -> None:
        """Stop, and wait until the process has ended."""
        self.stop()
        self._child.wait()

    def _give_up_answers(self) -> None:
        for answer in list(self._answers.values()):
            if not answer.done():
                answer.set_exception(WorkbenchError(f"replica {self.number}: its process has ended"))

    def listen(self, on_report: Callable[[Report], None], on_lost: Callable[[str], None]) -> None:
        """Hear its reports until it is stopped or lost; for a thread of its own."""
        while not self.is_stopped:
            lost = f"it has said nothing for {SILENT_SECONDS:.0f} s"
            try:
                if self._connection.poll(SILENT_SECONDS):
                    lost = self._hear(self._connection.recv(), on_report)
            except (EOFError, OSError):
                lost = "its process has ended"
            if lost and not self.is_stopped:
                self.stop()
                on_lost(f"replica {self.number}: {lost}")
        self._child.wait()
        self._connection.close()

    def _hear(self, message: tuple[Any, ...], on_report: Callable[[Report], None]) -> str:
        """Take a message; return why the replica is to be given up, if it is."""
        kind, *found = message
        if kind == REPORT:
            on_report(found[0])
        elif kind == ANSWER:
            number, value, error = found
            answer = self._answers.pop(number)
            if not answer.done():
                answer.set_exception(error) if error is not None else answer.set_result(value)
        elif kind == BEAT:
            self.busy_seconds = found[0]
            if self._step_seconds is not None and self.busy_seconds > self._step_seconds:
                return f"a step had not ended after {self.busy_seconds:.0f} s"
        return ""


class ProcessLauncher:
    """Start replicas in child processes.

    Args:
        cpus: threads of a replica; an equal share of this machine's cores unless given.
        replicas: about how many there will be.
        step_seconds: that a step may last; then the replica is ended as a lost one. None: any time.
    """

    def __init__(self, cpus: int | None, replicas: int, step_seconds: float | None = None):
        self._threads = cpus or max(1, (os.cpu_count() or 1) // max(1, replicas))
        self._step_seconds, self._is_cancelled = step_seconds, False
        self._started: list[ProcessReplica] = []

    def start(self, number: int, config: EngineConfig) -> ProcessReplica:
        """Start a replica and wait until it can serve (WorkbenchError where it cannot)."""
        made = ProcessReplica(number, self._threads, config, self._step_seconds)
        self._started = [each for each in self._started if not each.is_stopped] + [made]
        try:
            made.wait_until_ready(lambda: self._is_cancelled)
        except BaseException:
            made.close()
            raise
        return made

    def cancel_starts(self) -> None:
        """Let starts that are under way end soon."""
        self._is_cancelled = True

    def close(self) -> None:
        """End all processes."""
        for each in self._started:
            each.close()


def _pickled(function: Callable[[Any], Any]) -> bytes:
    """Return a function as bytes: by its name, or by its code where a package for that is installed."""
    try:
        return pickle.dumps(function)
    except Exception:  # of any kind: it has no name that another process knows
        for package in ("cloudpickle", "ray.cloudpickle"):
            with suppress(ImportError):
                return __import__(package, fromlist=["dumps"]).dumps(function)
        raise WorkbenchError("call: give a function of a module: a replica in another process has to find it") from None


class _Child:
    """A replica in its own process: the engine in a thread, messages in this one."""

    def __init__(self, connection: Connection, threads: int):
        self._connection, self._lock = connection, threading.Lock()
        (config,) = connection.recv()
        try:
            import torch

            from workbench.engine.runner import Runner

            torch.set_num_threads(threads)
            self._runner = Runner(config, report=lambda line: print(line, file=sys.stderr))
            self._engine = ReplicaEngine(self._runner, lambda report: self._send(REPORT, report))
        except Exception as error:  # of any kind: the front says why
            self._send(FAILED, " ".join(describe_error(error).split())[-2000:])
            raise SystemExit(1) from None
        pages, runner = PageCounts.of_runner(self._runner), self._runner
        self._send(READY, ReadyReplica(pages, os.getpid(), fingerprint_of(runner), tokens_in_cache(runner)))

    def _send(self, *message: Any) -> None:
        with self._lock, suppress(OSError):  # the front has ended, and `serve` ends this process
            self._connection.send(message)

    def serve(self) -> None:
        """Carry out messages until the connection ends."""
        threading.Thread(target=self._beat, daemon=True).start()
        while True:
            try:
                kind, *found = self._connection.recv()
            except (EOFError, OSError):
                os._exit(0)  # no one waits for a step under way
            if kind == SUBMIT:
                self._engine.submit(*found)
            elif kind == CANCEL:
                self._engine.cancel(*found)
            else:
                threading.Thread(target=self._answer, args=found, daemon=True).start()

    def _beat(self) -> None:
        while True:
            self._send(BEAT, self._engine.thread.busy_seconds())
            time.sleep(BEAT_SECONDS)

    def _answer(self, number: int, function: bytes) -> None:
        try:
            self._send(ANSWER, number, self._engine.thread.call(pickle.loads(function)), None)
        except Exception as error:  # of any kind: whoever asked sees it
            self._send(ANSWER, number, None, WorkbenchError(describe_error(error)))


if __name__ == "__main__":
    _Child(Connection(int(sys.argv[1])), int(sys.argv[2])).serve()
