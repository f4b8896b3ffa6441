"""Compile grammars in separate threads, and cache the most recently used ones."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from workbench.constrained.grammar import Grammar, GrammarVocabulary
from workbench.errors import WorkbenchError
from workbench.prompt.tokenization.tokenizer import Tokenizer
from workbench.response_format import ResponseFormat

KEPT_GRAMMARS = 64
NUM_THREADS = 2


class CompileJob:
    """A compilation of the response format `form`: its result, and the processor time that it has taken so far."""

    def __init__(self, form: ResponseFormat):
        self.form = form
        self.grammar: Future[Grammar] = Future()
        self._claim = threading.Lock()  # held by the compiling thread
        self._clock: tuple[Callable[[], float], float] | None = None  # the thread's clock, and its value at the start

    @property
    def has_begun(self) -> bool:
        return self._claim.locked()

    def begin(self) -> bool:
        """Claim the job for this thread; return False if another thread has it."""
        return self._claim.acquire(blocking=False)

    def restart_clock(self) -> None:
        """Measure this thread's processor time from now on."""
        clock = _thread_clock(threading.get_ident())
        self._clock = clock, clock()

    @property
    def seconds(self) -> float:
        """Return the compilation's processor time so far, in seconds."""
        if self._clock is None or self.grammar.done():
            return 0.0
        clock, began = self._clock
        return clock() - began


def _thread_clock(thread: int) -> Callable[[], float]:
    """Return a clock of a thread's processor time; a wall clock if the system has none."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return time.perf_counter
    clock = time.pthread_getcpuclockid(thread)  # valid while the thread lives, as threads of a pool do
    return lambda: time.clock_gettime(clock)


class GrammarCompiler:
    """A compiler of grammars for a tokenizer's vocabulary; equal grammars are compiled once."""

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer
        self._vocabulary: GrammarVocabulary | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()  # guards the vocabulary, which is built once
        self._jobs: OrderedDict[str, CompileJob] = OrderedDict()

    def start(self, form: ResponseFormat) -> CompileJob:
        """Return the job that compiles `form`: a new one, or the existing job of an equal form. Not thread-safe."""
        key = f"{form.kind} {form.model_dump_json()}"  # the order of a schema's properties matters
        job = self._jobs.get(key)
        if job is None:
            job = self._jobs[key] = CompileJob(form)
            self._submit(job)
        self._jobs.move_to_end(key)
        while len(self._jobs) > KEPT_GRAMMARS:
            self._jobs.popitem(last=False)
        return job

    def give_up(self, job: CompileJob, waiting: Iterable[CompileJob]) -> None:
        """Drop a job that takes too long, and start the waiting jobs in new threads: the old threads may stay busy
        without limit.
        """
        self._jobs = OrderedDict((key, each) for key, each in self._jobs.items() if each is not job)
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None
        for each in dict.fromkeys(waiting):
            if not each.has_begun:
                self._submit(each)

    def _submit(self, job: CompileJob) -> None:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar")
        self._pool.submit(self._run, job)

    def _run(self, job: CompileJob) -> None:
        if not job.begin():
            return
        try:
            vocabulary = self.vocabulary()
            job.restart_clock()
            job.grammar.set_result(vocabulary.compile(job.form))
        except BaseException as error:
            job.grammar.set_exception(error)

    def vocabulary(self) -> GrammarVocabulary:
        """Return the vocabulary, built at the first call (0.1 s for 4,096 tokens, 2 s for 131,072)."""
        if self._tokenizer is None:
            raise WorkbenchError("response_format: this model has no tokenizer, and a grammar needs one")
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = GrammarVocabulary(self._tokenizer)
            return self._vocabulary
