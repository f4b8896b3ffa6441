r"""Compute tasks on all ranks of a model, step by step, and exchange tensors between the ranks.

    rank 0:   post task n --> compute: exchange 1, exchange 2, ... --> compare digests of what was computed
    others:   wait        --> compute: exchange 1, exchange 2, ... --> wait for task n + 1

Rank 0 has the runner; the others compute the tasks that it posts, over the same pages. In an exchange every rank gets
the numbers of all ranks; sums are in the order of ranks, so all ranks have the same bits with every transport
(collective calls of a torch.distributed group). An exchange is an all-gather; for two ranks it moves as many bytes as
an all-reduce.

Calls of gloo and NCCL cannot be cancelled: a task that fails on one rank, or is interrupted, ends all ranks. Calls of
`SharedMemoryGroup` can: all ranks abandon the task, and the next one is computed.
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
Transport = Literal["shared_memory", "gloo", "nccl"]  # how ranks exchange numbers
CHUNK_BYTES = 2**20  # maximum bytes of one exchange; larger tensors take several
NOTE_BYTES = 4096  # maximum bytes of a rank's error message
DIGEST_BYTES = 16
LOOK_SECONDS = 0.05  # seconds between checks that the other ranks are alive
AS_IN_EXCHANGES = -1.0  # a time limit: use the limit of `Ranks`
STOP = "stop"  # the last task
TASK_BYTES = 2**14  # bytes of a task sent together with its size; the rest follows in chunks
HEAD_BYTES = 16  # bytes of a task's header: its size and its number
GRACE_SECONDS = 1.0  # from the end of a rank's connections to the end of its process
RANK_LOST = "a rank was lost"  # message of a rank that ends because another rank ended
FAILED = "failed"  # store key of a failed rank's message, by task and rank
REMEDY = "load the model again"


def rows_per_exchange(columns: int, itemsize: int) -> int:
    """Return the number of rows of `columns` columns that fit into one exchange of `CHUNK_BYTES`; at least 1."""
    return max(1, CHUNK_BYTES // (columns * itemsize))


class RankFailed(WorkbenchError):
    """Raised if another rank died, failed, or did not answer in time."""


class TaskAbandoned(Exception):
    """Raised if another rank has abandoned the current task and begun the round with this number."""


class Peers(Protocol):
    """A rank's view of the processes of the other ranks, used while it waits for them."""

    can_end: bool  # whether `end` ends them

    def check(self) -> None:
        """Raise RankFailed if the process of another rank has ended."""

    def end(self) -> None:
        """End the processes of all other ranks."""


class NoPeers:
    """Peers of a rank that does not monitor other ranks, because rank 0 or torchrun does."""

    can_end = False

    def check(self) -> None:
        """Do nothing."""

    def end(self) -> None:
        """Do nothing."""


@dataclass
class Traffic:
    """The cost of all exchanges so far: bytes that this rank contributed, and seconds, including waiting."""

    exchanges: int = 0
    bytes: int = 0
    seconds: float = 0.0


class Ranks:
    """This process as one of the `size` ranks of a model. On rank 0 one thread at a time leads a task; other threads
    wait.
    """

    def __init__(self, group: Any, store: Any, timeout: float, peers: Peers):
        """Join the ranks of a model.

        Args:
            group: a ProcessGroup for collective calls.
            store: a Store for the error messages of failed ranks.
            timeout: seconds to wait for another rank in a task.
            peers: the other processes, checked while waiting.
        """
        self.rank, self.size, self.timeout, self._peers = group.rank(), group.size(), timeout, peers
        self.group, self._store, self._stuck = group, store, False
        self._restart = getattr(group, "restart", None)  # cancels the calls of a task
        self._serial = 0
        self._running = False
        self._digest = hashlib.blake2b(digest_size=DIGEST_BYTES)  # digest of the current task
        self.broken: str | None = None  # why no further task is possible, after a fatal error
        self._leading = threading.Lock()
        self.unused_stores: list[int] = []  # numbers of stores that were freed on rank 0 and still exist on other ranks
        self.traffic = Traffic()

    def lead(
        self, kind: str, content: Any, compute: Callable[[], Result], timeout: float | None = AS_IN_EXCHANGES
    ) -> Result:
        """Post a task to the other ranks, run `compute` for rank 0's part, and wait until all ranks have finished.

        Args:
            kind: the task's name.
            content: the task's data for other ranks; any picklable value.
            compute: rank 0's part of the task, with the same exchanges as on the other ranks.
            timeout: seconds to wait for other ranks at its end, None for ever; default: the limit of an exchange.

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
        """Execute the tasks that rank 0 posts, by their kind, until STOP. A failed task is reported; if the ranks can
        continue, the next task is executed.
        """
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
        """Execute a task; return its kind."""
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
        """Add the input tensors of a computation to this rank's digest. Rank 0 compares the ranks' digests at the end
        of the task.
        """
        for tensor in tensors:
            self._digest.update(str(tuple(tensor.shape)).encode())
            self._digest.update(tensor.contiguous().cpu().view(-1).view(torch.uint8).numpy().data)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of `x` over all ranks, which pass equal shapes. It is added rank by rank in float32 or wider,
        and rounded once.
        """
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
        """Return `x` of all ranks, which pass equal shapes, stacked on a new first axis: [rank, ...]. Ranks other than
        0 get only their own x: [1, ...].
        """
        found = torch.empty(0 if self.rank else self.size, x.numel(), dtype=x.dtype, device=x.device)

        def keep(chunk: Tensor, out: Tensor) -> None:
            self._wait(self.group.gather([] if self.rank else [list(out)], [chunk]), on_cuda=chunk.is_cuda)

        self._exchange_in_chunks(x, found, keep)
        return x[None] if self.rank else found.view(self.size, *x.shape)

    def _exchange_in_chunks(self, x: Tensor, out: Tensor, exchange: Callable[[Tensor, Tensor], None]) -> None:
        """Exchange x chunk by chunk; `exchange` writes the result of a chunk to its slice of `out` [..., value]."""
        if not self._running:
            raise WorkbenchError("parallel.tensor: a model on several ranks computes only in the runner's steps")
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
        """Raise, now and in all later calls, if another rank computed a different result."""
        if digest != self._digest.digest():
            self.broken = f"parallel.tensor: rank {other} computed another step than rank 0; {REMEDY}"
            raise RankFailed(self.broken)

    @staticmethod
    def _words_of(error: Exception) -> str:
        """Return the message of an error, called within its `except` block; with a traceback unless it is a
        WorkbenchError.
        """
        return (str(error) if isinstance(error, WorkbenchError) else traceback.format_exc(limit=-2)).strip()

    def _no_answer(self, other: int | None, seconds: float) -> RankFailed:
        """Mark the ranks as broken because one did not answer in time; return the error to raise."""
        who = "another rank" if other is None else f"rank {other}"
        self.broken = f"parallel.tensor: {who} did not answer for {seconds:g} s; {REMEDY}"
        return RankFailed(self.broken)

    def break_off(self, reason: str) -> None:
        """Mark the ranks as broken, on rank 0, and end the other ranks: no task can be computed any more. The first
        reason is kept.
        """
        self.broken = self.broken or reason
        self._peers.end()

    def close(self) -> None:
        """Leave the ranks: no task can be led any more, and ranks that wait for this one notice its end."""
        self.broken = self.broken or f"parallel.tensor: the ranks were closed; {REMEDY}"
        if self._restart is None and torch.distributed.is_initialized() and not self._stuck:
            torch.distributed.destroy_process_group()

    def _post(self, raw: bytes) -> None:
        """Begin a task on rank 0, and send it to the other ranks."""
        self._begin(self._serial + 1)
        task = torch.zeros(max(TASK_BYTES, len(raw) + HEAD_BYTES), dtype=torch.uint8)
        task[:HEAD_BYTES].view(torch.int64)[:] = torch.tensor([len(raw), self._serial])
        task[HEAD_BYTES : HEAD_BYTES + len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        self._wait(self.group.broadcast([task[:TASK_BYTES]]))
        self._broadcast(task[TASK_BYTES:])

    def _next_task(self) -> bytes:
        """Wait, without limit, for rank 0's next task, and begin it."""
        task = torch.zeros(TASK_BYTES, dtype=torch.uint8)
        self._wait(self.group.broadcast([task]), None)
        size, serial = task[:HEAD_BYTES].view(torch.int64).tolist()
        rest = torch.zeros(max(0, size + HEAD_BYTES - TASK_BYTES), dtype=torch.uint8)
        self._broadcast(rest)
        self._begin(serial)
        return bytes(torch.cat((task, rest))[HEAD_BYTES : HEAD_BYTES + size].numpy())

    def _broadcast(self, rest: Tensor) -> None:
        """Send the rest of rank 0's task, which may be empty, to all ranks."""
        for first in range(0, len(rest), CHUNK_BYTES):
            self._wait(self.group.broadcast([rest[first : first + CHUNK_BYTES]]))

    def _end(self, timeout: float | None) -> None:
        """Wait, on rank 0, until all ranks have finished the task, and compare their digests."""
        notes = [torch.zeros(DIGEST_BYTES, dtype=torch.uint8) for _ in range(self.size)]
        self._wait(self.group.gather([notes], [notes[0].clone()]), timeout)
        for other in range(1, self.size):
            self._compare(other, bytes(notes[other].numpy()))

    def _finish(self) -> None:
        """Report to rank 0 that this rank has finished the task, with its digest."""
        note = torch.tensor(list(self._digest.digest()), dtype=torch.uint8)
        self._wait(self.group.gather([], [note]), None)  # rank 0 may take long for its own part

    def _abandon(self, error: BaseException) -> None:
        """Abandon the task on rank 0 because of `error`. If its calls cannot be cancelled, or after an interrupt (other
        ranks may take long to finish), end the ranks.
        """
        if self._restart is not None and isinstance(error, Exception) and self.broken is None:
            self._restart()
            return
        self.broken = self.broken or f"parallel.tensor: the ranks ended ({error or type(error).__name__}); {REMEDY}"
        self._peers.end()
        if self._peers.can_end:
            self.close()
        elif not self._stuck:  # a rank may hang, and destroying the group would wait for it for ever
            self._stuck = True
            atexit.register(end_process)

    def _report(self, error: Exception) -> None:
        """Write the reason of the failed task to the store, called within the error's `except` block, and leave the
        task; exit if calls cannot be cancelled. Rank 0 notices, and reads the store.
        """
        words = f"rank {self.rank}: {self._words_of(error)}"
        if self._restart is not None or not isinstance(error, RankFailed):  # else rank 0 finds the cause itself
            self._store.set(f"{FAILED}/{self._serial}/{self.rank}", words[:NOTE_BYTES])
        if self._restart is None:
            raise SystemExit(words)
        self._restart()

    def _wait(self, call: Any, timeout: float | None = AS_IN_EXCHANGES, on_cuda: bool = False) -> None:
        """Wait until a collective call has ended (an NCCL call if `on_cuda`); a `timeout` of None waits for ever.

        Raises:
            RankFailed: where another rank died, failed or did not answer.
            TaskAbandoned: on ranks other than 0, if another rank has left the task.
        """
        limit = self.timeout if timeout == AS_IN_EXCHANGES else timeout
        began = time.monotonic()
        try:
            while not (poll if on_cuda else wait_for)(call, LOOK_SECONDS if self.rank == 0 else 1.0):
                try:
                    self._look()
                except RankFailed:
                    if not call.is_completed():  # the lost rank had announced this call and ended normally
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
        """Raise RankFailed if another rank's process has ended, and on rank 0 also if a rank has failed."""
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
        """Return the error to raise for a failed call, unless a rank's message or the end of its process explains it.
        """
        deadline = time.monotonic() + GRACE_SECONDS
        while self.rank == 0 and time.monotonic() < deadline:
            self._look()
            time.sleep(LOOK_SECONDS)
        self.broken = f"parallel.tensor: {RANK_LOST}: {str(error).splitlines()[0]}; {REMEDY}"
        return RankFailed(self.broken)
