r"""Compute tasks on all ranks of a model, step by step, and exchange numbers between them.

    rank 0:   post task n --> compute: exchange 1, exchange 2, ... --> compare digests of what was computed
    others:   wait        --> compute: exchange 1, exchange 2, ... --> wait for task n + 1

Rank 0 has the runner; the others compute what it posts, over the same pages. In an exchange every rank gets the numbers
of all; sums are in the order of ranks, so that all have the same bits, whatever carries them: collective calls of a
group of torch.distributed. An exchange is an all-gather; for two ranks it moves as many bytes as an all-reduce.

gloo's and NCCL's calls cannot be taken back: a task that fails on one rank, or is interrupted, ends all ranks. Those of
`SharedMemoryGroup` can: the task is given up by all, and the next is computed.
"""

from __future__ import annotations

import atexit
import hashlib
import pickle
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from workbench.errors import WorkbenchError
from workbench.tensor_parallel.distributed import end_process, error_of, poll, wait_for

Result = TypeVar("Result")
Transport = Literal["shared_memory", "gloo", "nccl"]  # what carries numbers between ranks
CHUNK_BYTES = 2**20  # of one exchange; more goes in several
NOTE_BYTES = 4096  # of what a rank says of an error
DIGEST_BYTES = 16
LOOK_SECONDS = 0.05  # between looks at whether the others still live
AS_IN_EXCHANGES = -1.0  # a time limit: that of the ranks
STOP = "stop"  # the last task
TASK_BYTES = 2**14  # of a task that is sent with its size; what is longer follows in chunks
HEAD_BYTES = 16  # of a task: its size, and its number
GRACE_SECONDS = 1.0  # from the end of a rank's connections to that of its process
RANK_LOST = "a rank was lost"  # what a rank says before it ends because another has
FAILED = "failed"  # in the store, by task and rank: what a rank said that failed
REMEDY = "load the model again"


def rows_per_exchange(columns: int, itemsize: int) -> int:
    """Return how many rows of so many columns an exchange of at most `CHUNK_BYTES` carries; one at least."""
    return max(1, CHUNK_BYTES // (columns * itemsize))


class RankFailed(WorkbenchError):
    """A rank other than this one died, failed, or did not answer in time."""


class TaskAbandoned(Exception):
    """Another rank has left the task that this rank computes, for the round of this number."""


class Peers(Protocol):
    """The processes of the other ranks, as a rank that waits sees them."""

    can_end: bool  # whether `end` ends them

    def check(self) -> None:
        """Raise RankFailed where one of them has ended."""

    def end(self) -> None:
        """End all of them."""


class NoPeers:
    """The other ranks, as those but 0 see them: rank 0, or torchrun, looks after all."""

    can_end = False

    def check(self) -> None:
        """Do nothing."""

    def end(self) -> None:
        """Do nothing."""


@dataclass
class Traffic:
    """The cost of all exchanges so far: bytes of this rank's own numbers, and seconds, waiting included."""

    exchanges: int = 0
    bytes: int = 0
    seconds: float = 0.0


class Ranks:
    """This process among the `size` ranks of a model. One thread at a time leads a task; others wait for it."""

    def __init__(self, group: Any, store: Any, timeout: float, peers: Peers):
        """Take a place among ranks.

        Args:
            group: a ProcessGroup, which carries out their collective calls.
            store: a Store, where a rank says why it failed.
            timeout: seconds to wait for another rank in a task.
            peers: the other processes; looked after while waiting.
        """
        self.rank, self.size, self.timeout, self._peers = group.rank(), group.size(), timeout, peers
        self.group, self._store, self._stuck = group, store, False
        self._restart = getattr(group, "restart", None)  # takes back the calls of a task
        self._serial = 0
        self._running = False
        self._digest = hashlib.blake2b(digest_size=DIGEST_BYTES)  # of the task under way
        self.broken: str | None = None  # why no task can be led any more, once one broke them
        self._leading = threading.Lock()
        self.unused_stores: list[int] = []  # numbers of stores that rank 0 has collected and others still have
        self.traffic = Traffic()

    def lead(
        self, kind: str, content: Any, compute: Callable[[], Result], timeout: float | None = AS_IN_EXCHANGES
    ) -> Result:
        """Post a task to the other ranks, `compute` rank 0's own of it, and wait until all have done theirs.

        Args:
            kind: the task's name.
            content: what others need for it: anything that can be pickled.
            compute: what rank 0 does, with the same exchanges as that of the others.
            timeout: seconds to wait for others at its end, None for ever; as in exchanges unless given.

        Raises:
            RankFailed: where another rank died, failed or did not answer.
        """
        with self._leading:
            if self.broken is not None:
                raise RankFailed(self.broken)
            try:
                self._post(pickle.dumps((kind, content), protocol=5))
                result = compute()
                self._end(timeout)
                return result
            except BaseException as error:
                self._abandon(error)
                raise
            finally:
                self._running = False

    def serve(self, tasks: dict[str, Callable[[Any], None]]) -> None:
        """Do the tasks that rank 0 posts, by their kind, until it posts STOP. One that raises is reported; the next is
        done where the ranks can go on."""
        kind = ""
        while kind != STOP:
            try:
                raw = self._next_task()
                kind = self._do(raw, tasks)
            except TaskAbandoned as left:
                assert self._restart is not None
                self._restart(*left.args)
            self._running = False

    def _do(self, raw: bytes, tasks: dict[str, Callable[[Any], None]]) -> str:
        """Do a task; return its kind."""
        kind = ""
        try:
            kind, content = pickle.loads(raw)
            if kind != STOP:
                tasks[kind](content)
            self._finish()
        except TaskAbandoned:
            raise
        except Exception as error:
            self._report(error)
        return kind

    def record(self, tensors: Iterable[Tensor]) -> None:
        """Add what this rank is about to compute to its digest, which rank 0 compares at the end of the task."""
        for tensor in tensors:
            self._digest.update(str(tuple(tensor.shape)).encode())
            self._digest.update(tensor.contiguous().cpu().view(-1).view(torch.uint8).numpy().data)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' x, which have one shape: in float32 at least, rank by rank, rounded once."""
        exact, out = (
            torch.promote_types(x.dtype, torch.float32),
            torch.empty_like(x, memory_format=torch.contiguous_format),
        )

        def add(chunk: Tensor, out: Tensor) -> None:
            chunks = [torch.empty_like(chunk) for _ in range(self.size)]
            self._wait(self.group.allgather([chunks], [chunk]), on_cuda=chunk.is_cuda)
            total = chunks[0].to(exact)
            for each in chunks[1:]:
                total = total + each
            out.copy_(total)

        self._exchange_in_chunks(x, out.view(-1), add)
        return out

    def gather(self, x: Tensor) -> Tensor:
        """Return all ranks' x, which have one shape, on a new first axis: [rank, ...]. Ranks but 0 get their own
        alone, on an axis of one."""
        found = torch.empty(0 if self.rank else self.size, x.numel(), dtype=x.dtype, device=x.device)

        def keep(chunk: Tensor, out: Tensor) -> None:
            self._wait(self.group.gather([] if self.rank else [list(out)], [chunk]), on_cuda=chunk.is_cuda)

        self._exchange_in_chunks(x, found, keep)
        return x[None] if self.rank else found.view(self.size, *x.shape)

    def _exchange_in_chunks(self, x: Tensor, out: Tensor, exchange: Callable[[Tensor, Tensor], None]) -> None:
        """Exchange x chunk by chunk; `exchange` writes what comes of a chunk to its place in `out` [..., value]."""
        if not self._running:
            raise WorkbenchError("parallel.tensor: a model on several ranks computes in the runner's steps alone")
        began, flat, step = time.perf_counter(), x.contiguous().view(-1), CHUNK_BYTES // x.dtype.itemsize
        for first in range(0, flat.numel(), step):
            exchange(flat[first : first + step], out[..., first : first + step])
        self.traffic.exchanges += 1
        self.traffic.bytes += x.nbytes
        self.traffic.seconds += time.perf_counter() - began

    def _begin(self, serial: int) -> None:
        self._serial, self._running = serial, True
        self._digest = hashlib.blake2b(digest_size=DIGEST_BYTES)

    def _compare(self, other: int, digest: bytes) -> None:
        """Raise where another rank computed something else than this one; for ever after."""
        if digest != self._digest.digest():
            self.broken = f"parallel.tensor: rank {other} computed another step than rank 0; {REMEDY}"
            raise RankFailed(self.broken)

    @staticmethod
    def _words_of(error: Exception) -> str:
        """Return what is said of an error, within its `except` block: how it came about where it is none of ours."""
        return (str(error) if isinstance(error, WorkbenchError) else traceback.format_exc(limit=-2)).strip()

    def _no_answer(self, other: int | None, seconds: float) -> RankFailed:
        """Break the ranks for ever, since one did not answer in time; return what to raise."""
        who = "another rank" if other is None else f"rank {other}"
        self.broken = f"parallel.tensor: {who} did not answer for {seconds:g} s; {REMEDY}"
        return RankFailed(self.broken)

    def break_off(self, reason: str) -> None:
        """Break the ranks for good, on rank 0: none computes any more. Kept is the first reason."""
        self.broken = self.broken or reason
        self._peers.end()

    def close(self) -> None:
        """Leave the ranks: none leads a task any more, and those that wait for this one notice."""
        self.broken = self.broken or f"parallel.tensor: the ranks were closed; {REMEDY}"
        if self._restart is None and torch.distributed.is_initialized() and not self._stuck:
            torch.distributed.destroy_process_group()

    def _post(self, raw: bytes) -> None:
        """Begin a task on rank 0, and hand it to the others."""
        self._begin(self._serial + 1)
        task = torch.zeros(max(TASK_BYTES, len(raw) + HEAD_BYTES), dtype=torch.uint8)
        task[:HEAD_BYTES].view(torch.int64)[:] = torch.tensor([len(raw), self._serial])
        task[HEAD_BYTES : HEAD_BYTES + len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        self._wait(self.group.broadcast([task[:TASK_BYTES]]))
        self._broadcast(task[TASK_BYTES:])

    def _next_task(self) -> bytes:
        """Wait for ever for the next task of rank 0, and begin it."""
        task = torch.zeros(TASK_BYTES, dtype=torch.uint8)
        self._wait(self.group.broadcast([task]), None)
        size, serial = task[:HEAD_BYTES].view(torch.int64).tolist()
        rest = torch.zeros(max(0, size + HEAD_BYTES - TASK_BYTES), dtype=torch.uint8)
        self._broadcast(rest)
        self._begin(serial)
        return bytes(torch.cat((task, rest))[HEAD_BYTES : HEAD_BYTES + size].numpy())

    def _broadcast(self, rest: Tensor) -> None:
        """Give the rest of rank 0's task, which may be empty, to all."""
        for first in range(0, len(rest), CHUNK_BYTES):
            self._wait(self.group.broadcast([rest[first : first + CHUNK_BYTES]]))

    def _end(self, timeout: float | None) -> None:
        """Wait on rank 0 until all ranks have done the task, and compare what they computed."""
        notes = [torch.zeros(DIGEST_BYTES, dtype=torch.uint8) for _ in range(self.size)]
        self._wait(self.group.gather([notes], [notes[0].clone()]), timeout)
        for other in range(1, self.size):
            self._compare(other, bytes(notes[other].numpy()))

    def _finish(self) -> None:
        """Tell rank 0 that this rank is done with the task, and what it computed."""
        note = torch.tensor(list(self._digest.digest()), dtype=torch.uint8)
        self._wait(self.group.gather([], [note]), None)  # rank 0 may be long in its own part

    def _abandon(self, error: BaseException) -> None:
        """Give up the task on rank 0, for `error`; all other tasks too where its calls cannot be taken back, or others
        may be long in what they do."""
        if self._restart is not None and isinstance(error, Exception) and self.broken is None:
            self._restart()
            return
        self.broken = self.broken or f"parallel.tensor: the ranks ended ({error or type(error).__name__}); {REMEDY}"
        self._peers.end()
        if self._peers.can_end:
            self.close()
        elif not self._stuck:  # a rank may hang, and leaving the group would wait for it for ever
            self._stuck = True
            atexit.register(end_process)

    def _report(self, error: Exception) -> None:
        """Say in the store why the task failed here, within the error's `except` block, and leave it; end where calls
        cannot be taken back. Rank 0 sees that, and looks there."""
        words = f"rank {self.rank}: {self._words_of(error)}"
        if self._restart is not None or not isinstance(error, RankFailed):  # else rank 0 finds what another did
            self._store.set(f"{FAILED}/{self._serial}/{self.rank}", words[:NOTE_BYTES])
        if self._restart is None:
            raise SystemExit(words)
        self._restart()

    def _wait(self, call: Any, timeout: float | None = AS_IN_EXCHANGES, on_cuda: bool = False) -> None:
        """Wait until a collective call has ended, of NCCL where it is `on_cuda`; None is for ever.

        Raises:
            RankFailed: where another rank died, failed or did not answer.
            TaskAbandoned: where another rank has left the task, on ranks but 0.
        """
        limit = self.timeout if timeout == AS_IN_EXCHANGES else timeout
        began = time.monotonic()
        try:
            while not (poll if on_cuda else wait_for)(call, LOOK_SECONDS if self.rank == 0 else 1.0):
                try:
                    self._look()
                except RankFailed:
                    if not call.is_completed():  # it announced this, and ended well
                        raise
                if limit is not None and time.monotonic() - began > limit:
                    raise self._no_answer(getattr(call, "awaited", None), limit)
        except TaskAbandoned:
            if self.rank == 0:
                self._look()
            raise
        if self._restart is None and (error := error_of(call)) is not None:
            raise self._lost(error)

    def _look(self) -> None:
        """Raise where another rank has ended, and on rank 0 where one has failed."""
        for other in range(1, self.size) if self.rank == 0 else ():
            if self._store.check([name := f"{FAILED}/{self._serial}/{other}"]):
                words = f"parallel.tensor: {self._store.get(name).decode()}"
                if self._restart is None:
                    words = self.broken = f"{words}; {REMEDY}"
                raise RankFailed(words)
        try:
            self._peers.check()
        except RankFailed as error:
            self.broken = self.broken or str(error)
            raise

    def _lost(self, error: RuntimeError) -> RankFailed:
        """Return what to raise where a call failed, unless a rank said why, or its process shows how it ended."""
        deadline = time.monotonic() + GRACE_SECONDS
        while self.rank == 0 and time.monotonic() < deadline:
            self._look()
            time.sleep(LOOK_SECONDS)
        self.broken = f"parallel.tensor: {RANK_LOST}: {str(error).splitlines()[0]}; {REMEDY}"
        return RankFailed(self.broken)
