"""Compile an untrusted grammar in a child process first: a crash of the compiler ends the child, not the server.

check --- response_format ---> child: compile it, take 100 drawn tokens through its matchers --- its error ---> check

The child's thread has half of the usual stack: a grammar that it survives is not too deep for the server's threads.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import numpy as np
import psutil
import tokenizers
from pydantic import TypeAdapter

from workbench.constrained.grammar import TOOK_TOO_LONG, Grammar, GrammarVocabulary
from workbench.errors import WorkbenchError, describe_error
from workbench.prompt.tokenization.tokenizer import Tokenizer
from workbench.response_format import Lark, ResponseFormat

DRAWN_TOKENS = 100
MAX_CPU_SECONDS = 5  # seconds of a trial; up to one more, since the limit is in whole seconds
MAX_WAIT_SECONDS = 300.0  # seconds to wait for a child that uses no processor time
MAX_BYTES = 2 << 30  # maximum memory of a trial
ATTEMPTS = 2  # the first child may have died of another cause
OWN_ENDS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGABRT, signal.SIGFPE)  # of a compiler crash
KEPT_VERDICTS = 10_000
DEFAULT_STACK_BYTES = 2 << 20  # a thread's stack on x86-64 if the process's stack is unlimited
FORMAT = TypeAdapter(ResponseFormat)


class TrialUnavailable(WorkbenchError):
    """Raised if no child process can try a grammar now; the grammar itself may be valid."""


class GrammarTrial:
    """A child process that tries grammars over named tokenizers. It is started on demand, and restarted after it dies.

    Thread-safe. Grammars are tried one after another; known grammars do not wait. `close` ends the child and all
    waiting calls.
    """

    module = __name__  # the module that the child runs

    def __init__(self, vocabularies: Mapping[str, Tokenizer]):
        self.vocabularies = vocabularies
        self._lock = threading.Lock()  # guards the child
        self._child: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._verdicts: dict[bytes, str] = {}  # errors by hash of the grammar; empty if it compiled
        self._is_closed = False

    def __enter__(self) -> GrammarTrial:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the child before the first grammar arrives; a failure is ignored here and recurs with that grammar."""
        with self._lock, contextlib.suppress(WorkbenchError, OSError):
            self._started()

    def knows(self, vocabulary: str, form: ResponseFormat) -> bool:
        """Return whether `check` answers at once: the grammar was tried before."""
        return _key(vocabulary, form) in self._verdicts

    def check(self, vocabulary: str, form: ResponseFormat) -> None:
        """Check that a child compiled `form` over this vocabulary, now or earlier, without error.

        Raises:
            WorkbenchError: with the compiler's error, or the crash of the child.
            TrialUnavailable: if no child could try it; this result is not cached.
        """
        key = _key(vocabulary, form)
        if (error := self._verdicts.get(key)) is None:
            with self._lock:
                if (error := self._verdicts.get(key)) is None:  # another thread may have tried it in the meantime
                    error = self._verdicts[key] = self._try(vocabulary, form)
                    while len(self._verdicts) > KEPT_VERDICTS:
                        del self._verdicts[next(iter(self._verdicts))]
        if error:
            raise WorkbenchError(error)

    def close(self) -> None:
        """End the child at once."""
        self._is_closed = True
        if (child := self._child) is not None:
            child.kill()
        with self._lock:
            self._end()

    def _try(self, vocabulary: str, form: ResponseFormat) -> str:
        """Return the error of a grammar, or an empty string (may raise TrialUnavailable)."""
        end = ""
        for _ in range(ATTEMPTS):
            try:
                connection = self._started()
                connection.send((vocabulary, "grammar", form.model_dump_json()))
                if connection.poll(MAX_WAIT_SECONDS):
                    return connection.recv()
                end = f"it gave no answer for {MAX_WAIT_SECONDS:.0f} s"
                self._end()
            except (EOFError, OSError):  # the child has ended
                code = self._end()
                if code == -signal.SIGXCPU:
                    return TOOK_TOO_LONG
                end = f"it ended by {signal.Signals(-code).name}" if code < 0 else f"it ended with {code}"
                if -code in OWN_ENDS:
                    where = "tools" if isinstance(form, Lark) and form.labels else f"response_format.{form.kind}"
                    return f"{where}: the compiler's process did not survive it ({end}); give a simpler one"
        raise TrialUnavailable(f"response_format: the process that tries grammars does not answer ({end}); ask again")

    def _started(self) -> Connection:
        """Return the connection to the child, started if none runs (may raise TrialUnavailable)."""
        self._check_open()
        if self._connection is None:
            try:
                parent_end, child_end = Pipe()
                with child_end:
                    self._child = self._start_child(child_end)
            except OSError as error:
                raise TrialUnavailable(f"response_format: no process can be started to try it ({error})") from None
            self._connection = parent_end
            self._check_open()  # `close` may have been called before the child existed
            for name, tokenizer in self.vocabularies.items():
                parent_end.send((name, "vocabulary", tokenizer.to_json()))
        return self._connection

    def _start_child(self, connection: Connection) -> subprocess.Popen[bytes]:
        handle = connection.fileno()
        return subprocess.Popen(
            [sys.executable, "-m", self.module, str(handle), str(_thread_stack_bytes() // 2)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            pass_fds=[handle], stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in a terminal is the server's
        )  # fmt: skip

    def _check_open(self) -> None:
        if self._is_closed:
            self._end()
            raise TrialUnavailable("response_format: the server is ending, and compiles no grammar")

    def _end(self) -> int:
        """End the child, if one runs, and return its exit code, negative for a signal."""
        child, self._child = self._child, None
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if child is None:
            return 0
        try:
            child.wait(0.0 if self._is_closed else 1.0)  # a dying child then reports its signal
        except subprocess.TimeoutExpired:
            child.kill()
        return child.wait()


def _key(vocabulary: str, form: ResponseFormat) -> bytes:
    return hashlib.sha256(f"{vocabulary}\0{form.model_dump_json()}".encode()).digest()


def take_drawn_tokens(grammar: Grammar, count: int = DRAWN_TOKENS) -> int:
    """Advance copies of a grammar's matchers by up to `count` tokens, as an answer does; return the number of tokens.

    Each token is drawn at random from the allowed ones, with the same draws in every process for one vocabulary
    size.
    """
    tokens, symbols, vocabulary = grammar.tokens.deep_copy(), grammar.symbols.deep_copy(), grammar.vocabulary
    draw = random.Random(vocabulary.size)
    for taken in range(count):
        mask = np.frombuffer(tokens.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")[: vocabulary.size])
        if tokens.is_error() or not len(allowed):
            return taken
        token = int(draw.choice(allowed))
        if not (tokens.consume_token(token) and symbols.consume_tokens(vocabulary.symbols(token))):
            return taken
        symbols.is_accepting()
        symbols.compute_ff_bytes()
    return count


def serve_trials(handle: int, stack_bytes: int) -> None:
    """Try the grammars that arrive through a connection, until it closes, in a thread with this stack size."""
    threading.stack_size(stack_bytes)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    thread = threading.Thread(target=_serve, args=(Connection(handle),))
    thread.start()
    thread.join()


def _serve(connection: Connection) -> None:
    tokenizer_texts: dict[str, str] = {}
    vocabularies: dict[str, GrammarVocabulary] = {}
    try:
        while True:
            name, kind, text = connection.recv()
            if kind == "vocabulary":
                tokenizer_texts[name] = text
                with contextlib.suppress(Exception):  # the failure recurs, with a message, when a grammar needs it
                    vocabularies[name] = _vocabulary(text)
                continue
            _limit_resources()
            try:
                vocabulary = vocabularies.get(name) or _vocabulary(tokenizer_texts[name])
                take_drawn_tokens(vocabulary.compile(FORMAT.validate_json(text)))
                error = ""
            except BaseException as failed:  # a panic of the compiler is not an Exception
                error = describe_error(failed)
            connection.send(error)
    except (EOFError, OSError):  # the server has ended
        return


def _vocabulary(text: str) -> GrammarVocabulary:
    return GrammarVocabulary(Tokenizer(tokenizers.Tokenizer.from_str(text)))


def _limit_resources() -> None:
    """Limit the processor time and memory of this process for the next trial."""
    limits = {
        resource.RLIMIT_CPU: int(time.process_time()) + 1 + MAX_CPU_SECONDS,
        resource.RLIMIT_AS: psutil.Process().memory_info().vms + MAX_BYTES,
    }
    for kind, soft in limits.items():
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _thread_stack_bytes() -> int:
    """Return the stack size of a new thread of this process, in bytes."""
    own = resource.getrlimit(resource.RLIMIT_STACK)[0]
    return threading.stack_size() or (DEFAULT_STACK_BYTES if own == resource.RLIM_INFINITY else own)


if __name__ == "__main__":
    serve_trials(*map(int, sys.argv[1:]))
