"""Python processes for tests, forked from one that has torch and the workbench imported: 0.3 s where a start takes 3.

    done = python("-c", SCRIPT, "argument")                    # as subprocess.run, with its output
    with start_python("-m", "workbench", "serve", stdout=PIPE) as process:    # as subprocess.Popen
        process.send_signal(signal.SIGTERM)
    assert python(function_of_a_module, 3, check=True).stdout == "4\n"

A child has its own standard files, environment, folder and exit code, is sent signals by its number, and ends as an
interpreter does: threads are waited for, `atexit` is called. It differs in what is read while modules are imported or
Python starts (OMP_NUM_THREADS, PYTHONPATH, the level of kernels): tests of that, of imports, and one of each command
line have a real process.

pytest ---length, four files; command, environment, folder---> server ---fork---> child
       <--------number, exit status (a pipe of each child)----
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import pickle
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from tests.kept_cache import ROOT
from tests.patience import TEST_SECONDS, limit

PIPE, DEVNULL, STDOUT = subprocess.PIPE, subprocess.DEVNULL, subprocess.STDOUT
IMPORTED = (  # none of them starts a thread, as pyarrow does
    "torch", "workbench", "workbench.cli", "workbench.engine.load", "workbench.engine.runner_thread",
    "workbench.serve.server", "workbench.cluster.cluster", "workbench.cluster.pools", "workbench.sweep.run",
)  # fmt: skip
Command = str | os.PathLike[str] | Callable[..., object]

_ENVIRONMENT = dict(os.environ)  # before any test changes it
_LOCK = threading.Lock()
_SERVER: list[tuple[socket.socket, subprocess.Popen[bytes]]] = []


def python(
    *command: Any,
    input: str = "",
    env: Mapping[str, str] | None = None,
    cwd: os.PathLike[str] | str | None = None,
    stdout: IO[Any] | None = None,
    check: bool = False,
    seconds: float = TEST_SECONDS,
) -> subprocess.CompletedProcess[str]:
    """Run Python to its end and return its output and exit code.

    Args:
        command: ("-c", text, arguments), ("-m", module, arguments), (a script, arguments), or (a function of a module,
            arguments that can be pickled).
        input: what it reads.
        env: its whole environment; None: this process's.
        cwd: its working folder; None: this process's.
        stdout: where its output goes, if not into what is returned.
        check: whether another exit code than 0 fails the test.
        seconds: what it takes at most on the reference machine, scaled as all limits.
    """
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        given.write(input.encode())
        given.seek(0)
        process = Process(command, given, stdout or output, errors, env, cwd)
        try:
            process.wait(limit(seconds))
        finally:
            process.kill()
            output.seek(0)
            errors.seek(0)
            texts = output.read().decode(), errors.read().decode()
            done = subprocess.CompletedProcess(command, process.wait(), *texts)
    assert not check or done.returncode == 0, f"{command} ended with {done.returncode}\n{done.stdout}{done.stderr}"
    return done


def start_python(
    *command: Any,
    stdin: Any = None,
    stdout: Any = None,
    stderr: Any = None,
    env: Mapping[str, str] | None = None,
    cwd: os.PathLike[str] | str | None = None,
) -> Process:
    """Start Python (`python` tells the command); its standard files are given as to `subprocess.Popen`, as text."""
    return Process(command, stdin, stdout, stderr, env, cwd)


class Process:
    """A process of Python that the server forked: what tests use of `subprocess.Popen`.

    Attributes:
        pid: its number.
        returncode: its exit code, or minus the signal that ended it; None until `wait` or `poll` saw its end.
        stdin, stdout, stderr: this end of its pipes; None where none was asked for.
    """

    def __init__(
        self, command: tuple[Any, ...], stdin: Any, stdout: Any, stderr: Any, env: Mapping[str, str] | None, cwd: Any
    ):
        self.args, self.returncode = command, None
        files = [self._file(number, each) for number, each in enumerate((stdin, stdout, stderr))]
        if stderr == STDOUT:
            files[2] = (files[1][0], None)
        pipes: list[Any] = [pipe for _, pipe in files]
        self.stdin, self.stdout, self.stderr = pipes
        self._result, its = os.pipe()
        if callable(command[0]):
            command = ("call", pickle.dumps(command))
        words = [each if isinstance(each, bytes) else os.fspath(each) for each in command]
        body = pickle.dumps((words, dict(os.environ if env is None else env), os.fspath(cwd or os.getcwd())))
        with _LOCK:
            server = _server()
            socket.send_fds(server, [struct.pack("q", len(body))], [*(handle for handle, _ in files), its])
            server.sendall(body)
        for handle in {its, *(handle for handle, pipe in files if pipe is not None)}:
            os.close(handle)
        self.pid = self._read()

    @staticmethod
    def _file(number: int, given: Any) -> tuple[int, IO[str] | None]:
        """Return the child's file, and this process's end of a pipe."""
        if given is None or (number == 2 and given == STDOUT):
            return number, None
        if given == DEVNULL:
            return os.open(os.devnull, os.O_RDWR), open(os.devnull)
        if given != PIPE:
            return given if isinstance(given, int) else given.fileno(), None
        reading, writing = os.pipe()
        return (reading, os.fdopen(writing, "w", 1)) if number == 0 else (writing, os.fdopen(reading))

    def _read(self) -> int:
        read = os.read(self._result, 8)
        assert len(read) == 8, "the server of Python processes has ended"
        return struct.unpack("q", read)[0]

    def poll(self) -> int | None:
        """Return the exit code if it has ended."""
        if self.returncode is None and select.select([self._result], [], [], 0)[0]:
            self.returncode = os.waitstatus_to_exitcode(self._read())
            os.close(self._result)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end: `timeout` seconds, or the limit of a test."""
        seconds = limit(TEST_SECONDS) if timeout is None else timeout
        if self.returncode is None and not select.select([self._result], [], [], seconds)[0]:
            raise subprocess.TimeoutExpired(str(self.args), seconds)
        code = self.poll()
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        for file in (self.stdin, self.stdout, self.stderr):
            if file is not None:
                with suppress(BrokenPipeError):
                    file.close()
        if kind is not None:  # a test that failed waits for nothing
            self.kill()
        self.wait()


def _server() -> socket.socket:
    """Return the connection to this process's server, which is started on first use and ends with this process."""
    if not _SERVER:
        mine, its = socket.socketpair()
        path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
        environment = {**_ENVIRONMENT, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"}
        code = f"from tests.helpers.processes import serve; serve({its.fileno()})"
        process = subprocess.Popen(
            [sys.executable, "-c", code], pass_fds=[its.fileno()], env=environment, cwd=ROOT, stdin=DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        its.close()
        _SERVER.append((mine, process))
        atexit.register(_end)
    return _SERVER[0][0]


def _end() -> None:
    for connection, process in _SERVER:
        connection.shutdown(socket.SHUT_RDWR)  # also where a process that was forked has it
        process.wait()


def serve(handle: int) -> None:
    """Fork a process for each command that comes. In the forked one, run it and return, as a script that ends."""
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    connection, (heard, hears) = socket.socket(fileno=handle), os.pipe()
    os.set_blocking(hears, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(hears)
    results: dict[int, int] = {}
    while True:
        ready = select.select([connection, heard], [], [])[0]
        if heard in ready:
            os.read(heard, 4096)
            for child in list(results):
                number, status = os.waitpid(child, os.WNOHANG)
                if number:
                    _write(results.pop(child), status, closes=True)
        if connection not in ready:
            continue
        head, files, _, _ = socket.recv_fds(connection, 8, 4)
        if not head:
            for child in results:
                os.kill(child, signal.SIGKILL)
            os._exit(0)
        body = b""
        while len(body) < struct.unpack("q", head)[0]:
            body += connection.recv(struct.unpack("q", head)[0] - len(body))
        assert not Path("/proc/self/task").is_dir() or len(os.listdir("/proc/self/task")) == 1, "it has threads"
        *standard, result = files
        child = os.fork()
        if child:
            for file in standard:
                os.close(file)
            results[child] = result
            _write(result, child)
            continue
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        connection.close()
        for number, file in enumerate(standard):
            os.dup2(file, number)
        for file in {heard, hears, *files, *results.values()}:
            os.close(file)
        for number, name in enumerate(("stdin", "stdout", "stderr")):  # what these were opened on was another file
            file = open(number, "w" if number else "r", 1, closefd=False)  # noqa: SIM115 (it stays)
            setattr(sys, name, file)
        return _run(*pickle.loads(body))


def _write(result: int, value: int, closes: bool = False) -> None:
    with suppress(BrokenPipeError):  # no caller waits for it any more
        os.write(result, struct.pack("q", value))
    if closes:
        os.close(result)


def _run(command: list[Any], environment: dict[str, str], folder: str) -> None:
    gc.unfreeze()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    kind, *rest = command
    main = ModuleType("__main__")
    sys.modules["__main__"] = main
    if kind == "call":
        function, *arguments = pickle.loads(rest[0])
        sys.argv = ["-c"]
        function(*arguments)
    elif kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    elif kind == "-m":
        sys.argv = rest
        warnings.filterwarnings("ignore", ".*found in sys.modules after import of")
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        runpy.run_path(kind, run_name="__main__")
