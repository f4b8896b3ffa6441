"""Compile grammars in threads of their own, and keep the last ones."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor

from workbench.errors import WorkbenchError
from workbench.prompt.tokenizer import Tokenizer
from workbench.response_format import ResponseFormat
from workbench.sampling.grammar import Grammar, GrammarVocabulary

KEPT_GRAMMARS = 64
NUM_THREADS = 2


class CompileJob:
    """A compilation: its result, and for how many seconds it has run."""

    def __init__(self) -> None:
        self.grammar: Future[Grammar] = Future()
        self.began: float | None = None

    @property
    def seconds(self) -> float:
        return 0.0 if self.began is None else time.perf_counter() - self.began


class GrammarCompiler:
    """Compile grammars for a tokenizer's vocabulary; equal ones are compiled once."""

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer
        self._vocabulary: GrammarVocabulary | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()  # of the vocabulary, which is built once
        self._jobs: OrderedDict[str, CompileJob] = OrderedDict()

    def start(self, wanted: ResponseFormat) -> CompileJob:
        """Start to compile `wanted`, or return the job of an equal one. For one thread."""
        key = f"{wanted.kind} {wanted.model_dump_json()}"  # the order of a schema's properties counts
        job = self._jobs.get(key)
        if job is None:
            job = self._jobs[key] = CompileJob()
            if self._pool is None:
                self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar")
            self._pool.submit(self._run, job, wanted)
        self._jobs.move_to_end(key)
        while len(self._jobs) > KEPT_GRAMMARS:
            self._jobs.popitem(last=False)
        return job

    def _run(self, job: CompileJob, wanted: ResponseFormat) -> None:
        try:
            vocabulary = self.vocabulary()
            job.began = time.perf_counter()
            job.grammar.set_result(vocabulary.compile(wanted))
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
