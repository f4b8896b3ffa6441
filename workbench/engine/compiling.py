"""Hold requests until their grammars are compiled in other threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass

from workbench.constrained.compiler import CompileJob, GrammarCompiler
from workbench.constrained.grammar import MAX_COMPILE_SECONDS, TOOK_TOO_LONG, Grammar
from workbench.errors import describe_error
from workbench.request import Request
from workbench.trace.events import Event


@dataclass(frozen=True)
class CompilingRequest:
    """A request whose grammar is being compiled; `arrival` is when it was submitted, on the runner's clock."""

    request: Request
    request_ids: tuple[str, ...]  # ids of its samples
    queue: deque[Event]
    arrival: float
    job: CompileJob


class CompilingRequests:
    """All requests whose grammars are being compiled, in the order of their submission."""

    def __init__(self, compiler: GrammarCompiler, clock: Callable[[], float]):
        self._compiler, self._clock = compiler, clock
        self._waiting: dict[str, CompilingRequest] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: Request, request_ids: Iterable[str], queue: deque[Event], arrival: float) -> None:
        assert request.sampling.response_format is not None
        job = self._compiler.start(request.sampling.response_format)
        self._waiting[request.request_id] = CompilingRequest(request, tuple(request_ids), queue, arrival, job)

    def reserves(self, request_id: str) -> bool:
        """Return whether a waiting request or one of its samples has this id."""
        return any(request_id in each.request_ids for each in self._waiting.values())

    def request_ids_of(self, queue: deque[Event]) -> list[str]:
        return [name for name, each in self._waiting.items() if each.queue is queue]

    def pop(self, request_id: str) -> CompilingRequest | None:
        """Remove and return the request with this id; None if it does not wait for a grammar."""
        return self._waiting.pop(request_id, None)

    def pop_compiled(self) -> list[tuple[CompilingRequest, Grammar | None, str]]:
        """Remove the requests whose compilation has ended, and return each with its grammar or its error."""
        ended = []
        for each in list(self._waiting.values()):
            job = each.job
            if job.grammar.done():
                error = job.grammar.exception()
                grammar = None if error else job.grammar.result()
                ended.append((self._waiting.pop(each.request.request_id), grammar, describe_error(error or "")))
            elif job.seconds > MAX_COMPILE_SECONDS:  # inside a section that cannot be interrupted
                ended.append((self._waiting.pop(each.request.request_id), None, TOOK_TOO_LONG))
                self._compiler.give_up(job, [other.job for other in self._waiting.values()])
        return ended

    def wait(self, seconds: float) -> None:
        """Wait until a compilation has ended, at most `seconds`."""
        waiting = list(self._waiting.values())  # another thread may cancel a request at the same time
        if waiting:
            wait([each.job.grammar for each in waiting], seconds, FIRST_COMPLETED)
