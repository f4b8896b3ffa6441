"""Serve a model from several processes behind one front, which is used like a runner's thread.

any thread: submit, scale, deploy ---> jobs ---> front's thread: place requests, take reports ---> sinks
"""

from __future__ import annotations

import atexit
import hashlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, TypeVar

from workbench.cluster.accounts import FleetAccount, compare_variants
from workbench.cluster.fleet_model import FleetModel
from workbench.cluster.front import FleetLimits, Front
from workbench.cluster.replica import PageCounts, Replica, Report
from workbench.cluster.variants import DeployedVariant
from workbench.display import Displayable, Table
from workbench.engine import inputs as intake
from workbench.engine.config import EngineConfig
from workbench.engine.request_handle import RequestHandle
from workbench.engine.runner_thread import EventSink
from workbench.errors import WorkbenchError, describe_error
from workbench.kv_cache.settings import RadixPrefixCache
from workbench.progress import report_if_slow, to_stderr
from workbench.prompt.assemble import Prompt
from workbench.prompt.conversation import Conversation
from workbench.prompt.templates import ChatTemplate
from workbench.prompt.tokenization.tokenizer import Tokenizer
from workbench.request import Request
from workbench.simulate.routers import router_from
from workbench.stop_button import register_stoppable
from workbench.trace.events import Event

Result = TypeVar("Result")
MAX_FAILED_STARTS = 3  # one after another, of replicas that are to take the place of lost ones
ROUTERS = {"prefix": "prefix_aware", "session": "session_sticky"}  # short names
SEQUENCES_PER_PLACE = 2  # a replica has so many of its running sequences, so that none of its places stays empty
CLOSE_SECONDS = 10.0
CLOSED = "the cluster was closed"
ALIVE_SECONDS = 1.0  # between two looks whether the front's thread goes on


class StartedReplica(Replica, Protocol):
    """A replica that can serve, in a process or a thread of its own."""

    @property
    def ready(self) -> Any: ...

    @property
    def busy_seconds(self) -> float: ...

    def listen(self, on_report: Callable[[Report], None], on_lost: Callable[[str], None]) -> None:
        """Hear its reports until it is stopped or lost; for a thread of its own."""
        ...

    def call(self, function: Callable[[Any], Any]) -> Any: ...


class Launcher(Protocol):
    """A launcher of replicas: Ray (`ray_replicas.RayLauncher`)."""

    def start(self, number: int, config: EngineConfig) -> StartedReplica:
        """Start a replica and wait until it can serve (WorkbenchError where it cannot)."""
        ...

    def cancel_starts(self) -> None:
        """Let starts that are under way end soon, where they can be cancelled; no other will come."""
        ...

    def close(self) -> None:
        """End everything. Nothing starts, and no replica is asked, while or after it is called."""
        ...


class Cluster(Displayable):
    """Replicas of a model and their front. `close()` ends them, and so does leaving a `with` block or Python.

        with workbench.Cluster(workbench.EngineConfig(), replicas=2) as cluster:
            for event in cluster.stream("def fib(n):", max_tokens=32):
                print(event.text, end="")

    It is used like a runner: `stream`, `workbench.serve(cluster)`. What a killed replica was answering goes on at
    another after what was emitted, and a new one starts.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        replicas: int = 2,
        router: object = "prefix",
        *,
        address: str | None = None,
        cpus: int | None = None,
        gpus: float = 0,
        step_seconds: float | None = 600.0,
        limits: FleetLimits | None = None,
        launcher: Launcher | None = None,
        report: Callable[[str], None] = to_stderr,
    ):
        """Start a cluster; return when all its replicas can serve.

        Args:
            config: every setting of an engine; the same for all replicas.
            replicas: how many.
            router: round_robin, least_loaded, session or prefix; or a router's settings (`simulate.routers`).
            address: of a Ray cluster; None starts one on this machine.
            cpus: cores, and threads, of a replica; an equal share of this machine's unless given.
            gpus: accelerators of a replica.
            step_seconds: that a step may last; then its replica is ended as a lost one. None: any time.
            limits: bounds of the fleet; by the config unless given.
            launcher: starts replicas; Ray unless given.
            report: receives a line on each slow part of starting.

        Raises:
            WorkbenchError: for a model or settings that cannot be carried out, and where Ray is missing.
        """
        if replicas < 1:
            raise WorkbenchError(f"replicas: {replicas}; give at least 1")
        self.config = (config or EngineConfig()).engine
        self.is_from_config = True
        self.model = FleetModel.of(self.config)
        self.clock = time.perf_counter
        cache = self.config.cache
        page_size = cache.page_size if isinstance(cache.prefix, RadixPrefixCache) else None
        places = SEQUENCES_PER_PLACE * self.config.schedule.max_num_seqs
        kind = ROUTERS.get(router, router) if isinstance(router, str) else router
        limits = limits or FleetLimits(page_size, places)
        self.front = Front(router_from(kind), limits, self.clock, self._on_gone)
        if launcher is None:
            from workbench.cluster.ray_replicas import RayLauncher

            launcher = RayLauncher(address, cpus, gpus, replicas, step_seconds)
        self._launcher, self._report = launcher, report
        self._numbers, self._request_ids = itertools.count(1), (f"request-{n}" for n in itertools.count())
        first = DeployedVariant("", self.config, self.model, replicas)
        self._variants = {"": first}
        self._starting: dict[int, DeployedVariant] = {}  # of replicas that start, by number
        self._replicas: dict[int, StartedReplica] = {}
        self._bell = threading.Condition()
        self._jobs: deque[Callable[[], object]] = deque()
        self._is_closed = False
        self._users = 0  # threads that start, hear or ask replicas
        self._unused = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="cluster's front", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        register_stoppable(self)
        try:
            with report_if_slow(f"starting {replicas} replicas of {self.config.model.name}", report):
                self._start_all(first, self._ask(lambda: self._reserve(first, replicas)))
        except BaseException:
            self.close()
            raise

    # What a runner's thread offers.

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.model.tokenizer

    @property
    def chat_template(self) -> ChatTemplate | None:
        return self.model.chat_template

    def assemble(self, conversation: Conversation, max_tokens: int = 1) -> Prompt:
        """Return the prompt of a conversation, within the model's context as `overflow` says."""
        context, overflow = self.model.spec.max_position_embeddings, self.config.schedule.overflow
        return intake.assemble(self, conversation, context, overflow, max_tokens)

    def make_requests(self, requests: intake.RequestInput, sampling: dict[str, Any]) -> list[Request]:
        """Return `requests` as Requests, in the given order; texts and conversations are encoded and get an id."""
        return intake.make_requests(requests, self.tokenizer, sampling, self._request_ids, self.assemble)

    @intake.with_sampling_signature
    def stream(self, requests: intake.RequestInput, **sampling: object) -> Iterator[Event]:
        """Run `requests` and yield events as they happen, as `Runner.stream` does; each names its replica."""
        return iter(self.submit(requests, **sampling))

    def submit(self, requests: intake.RequestInput, **sampling: object) -> RequestHandle:
        """Submit `requests` as `stream` does, and return their handle at once."""
        asked = RequestHandle(lambda: cancel())
        made = self.make_requests(requests, sampling)
        cancel = self.submit_to(asked, made, intake.is_single(requests))
        return asked

    def submit_to(self, sink: EventSink, requests: Iterable[Request], is_single: bool = False) -> Callable[[], None]:
        """Submit `requests`, whose events go to `sink`; return a function that cancels them soon, from any thread.

        `is_single`: the sink is given the error of a request that is refused.
        """
        context, overflow = self.model.spec.max_position_embeddings, self.config.schedule.overflow
        begin = self.tokenizer.bos_token_ids if self.tokenizer is not None else ()
        made = [intake.truncate_prompt(each, context, overflow, begin) for each in requests]  # as a runner does
        submissions: list[Any] = []
        if not self._try_put(lambda: submissions.append(self.front.submit(sink, made, is_single))):
            raise WorkbenchError(CLOSED)

        def cancel() -> None:
            self._put(lambda: [self.front.cancel(each) for each in submissions])

        return cancel

    def listen(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        """Call `listener` with every event of the fleet, in the front's thread; return a function that ends it."""
        self.front.listeners.append(listener)
        return lambda: self.front.listeners.remove(listener) if listener in self.front.listeners else None

    def after_delivery(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` when the events of a message are with their sinks; return a function that ends it."""
        callbacks = self.front.after_delivery
        callbacks.append(callback)
        return lambda: callbacks.remove(callback) if callback in callbacks else None

    def busy_seconds(self) -> float:
        """Return the seconds that the present step has lasted, of the replica where it is shortest."""
        return min((each.busy_seconds for each in tuple(self._replicas.values())), default=0.0)

    def call(self, function: Callable[[Any], Result], replica: int | None = None) -> Result:
        """Return `function(runner)`, run in a replica between two of its steps; the first replica unless given."""
        known = dict(self._replicas)
        number = next(iter(known), None) if replica is None else replica
        if number not in known:
            raise WorkbenchError(f"replica {number}: not there now; there are {', '.join(map(str, known)) or 'none'}")
        self._use_launcher()
        try:
            return known[number].call(function)
        finally:
            self._release_launcher()

    def stop(self) -> None:
        """Cancel all requests soon."""
        self._put(lambda: [self.front.cancel(each) for each in self.front.submissions])

    # The fleet.

    @property
    def fingerprint(self) -> str:
        """Return a text that differs where the same tokens may be answered differently: weights and settings.

        Several variants that serve have one together; see `fingerprint_of`."""
        prints = sorted({self._fingerprint(name) for name in self.front.variants.shares})
        return prints[0] if len(prints) == 1 else f"fp_{hashlib.sha256(repr(prints).encode()).hexdigest()[:12]}"

    def fingerprint_of(self, tenant: str) -> str:
        """Return the fingerprint of the variant that a tenant's requests get; empty where they get several.

        Only answers of one fingerprint may stand for each other."""
        variant = self.front.variants.of_tenant(tenant)
        return "" if variant is None else self._fingerprint(variant)

    def _fingerprint(self, variant: str) -> str:
        known = self._variants.get(variant)
        return "" if known is None else known.fingerprint

    @property
    def pages(self) -> PageCounts:
        """Return the pages of all replicas together."""
        return self.front.pages

    @property
    def cache_tokens(self) -> int:
        """Return how many tokens the cache of the smallest replica has room for; 0 while none serves."""
        return min((each.ready.cache_tokens for each in tuple(self._replicas.values())), default=0)

    @property
    def accounts(self) -> dict[str, FleetAccount]:
        """Return what each variant did; the first variant's name is empty."""
        return self.front.accounts

    def compare(self) -> Table:
        """Return a table of the variants' accounts, a column for each (see `deploy`)."""
        return compare_variants(tuple(self.accounts.values()))

    @property
    def replicas(self) -> dict[int, StartedReplica]:
        """Return the replicas that serve now, by number."""
        return dict(self._replicas)

    def num_replicas(self, variant: str = "") -> int:
        """Return the replicas that serve a variant now."""
        return sum(each.variant == variant and not each.is_leaving for each in tuple(self.front.replicas.values()))

    @property
    def starting(self) -> dict[int, str]:
        """Return the variants of the replicas that start now, by number."""
        return {number: known.name for number, known in dict(self._starting).items()}

    def num_requests(self) -> tuple[int, int]:
        """Return the requests that replicas have, and those that wait at the front."""
        waiting = self.front.num_waiting
        return self.front.num_requests - waiting, waiting

    def scale(self, replicas: int, variant: str = "", hand_over: bool = True) -> None:
        """Change the number of replicas; returns when new ones can serve, those that leave may still drain.

        Args:
            replicas: how many of the variant there are to be.
            variant: the name of a variant that was deployed.
            hand_over: requests of a replica that leaves go on elsewhere at once; otherwise they end there.
        """
        self._start_all(*self._ask(lambda: self._resize(variant, replicas, hand_over)))

    def _resize(self, variant: str, replicas: int, hand_over: bool) -> tuple[DeployedVariant, list[int]]:
        """Change how many replicas are wanted; return the variant and the numbers of those that are to start."""
        if variant not in self._variants:
            raise WorkbenchError(f"variant {variant!r}: not deployed; there are {sorted(self._variants)}")
        shares = self.front.variants
        if replicas < (1 if shares.shares.get(variant) or variant in shares.keys.values() else 0):
            raise WorkbenchError(f"replicas: {replicas}; a variant that gets requests needs at least 1")
        known = self._variants[variant]
        known.wanted = replicas
        self._trim(known, hand_over)
        return known, self._reserve(known, replicas - self._num_staying(known))

    def deploy(
        self, config: EngineConfig, share: float, replicas: int = 1, name: str = "b", keys: Sequence[str] = ()
    ) -> None:
        """Serve a share of the requests by another config: a rolling change, or two variants to compare.

        A tenant's requests, or one without a tenant by its id, always go to the same variant, and stay with it when
        its replicas are lost. Where none of them can be started again, its requests go to the other variants.
        `accounts` has the results of each. A variant that cannot be started leaves the fleet as it was.

        Args:
            config: of the new variant; its model must have the tokenizer of the first.
            share: of the requests, 0 to 1; 1 replaces all others, whose replicas then leave as they get idle.
            replicas: how many serve it.
            name: of the variant; none that serves now has it.
            keys: tenants (the owners of the server's keys) that always get it; the share is of all others.
        """
        if not 0 <= share <= 1 or not (share or keys):
            raise WorkbenchError(f"share: {share}; give a part of the requests, above 0 and up to 1; or 0 and keys")
        if isinstance(keys, str):
            raise WorkbenchError(f"keys: {keys!r}; give a list of tenants")
        if replicas < 1:
            raise WorkbenchError(f"replicas: {replicas}; a variant that gets requests needs at least 1")
        made = DeployedVariant(name, config.engine, FleetModel.of(config.engine), replicas)
        self.model.check_encodes_for(made.model)
        numbers = self._ask(lambda: self._enter(made))
        try:
            self._start_all(made, numbers)
            self._ask(lambda: self._share(made, share, keys))
        except BaseException:
            with suppress(WorkbenchError):  # the cluster was closed, which is the error
                self._ask(lambda: self._withdraw(made))
            raise

    def _enter(self, made: DeployedVariant) -> list[int]:
        if (name := made.name) in self._variants:
            raise WorkbenchError(f"name: variant {name!r} is deployed; give another name (share=1 replaces the others)")
        self._variants[name] = made
        return self._reserve(made, made.wanted)

    def _share(self, made: DeployedVariant, share: float, keys: Sequence[str]) -> None:
        if not self._is_deployed(made):
            raise WorkbenchError(f"variant {made.name!r}: its replicas ended before it served; none can be started")
        self.front.accounts.setdefault(made.name, FleetAccount(made.name))
        self.front.variants = self.front.variants.with_variant(made.name, share, keys)
        for known in list(self._variants.values()):
            if share == 1 and known is not made:
                self._withdraw(known, hand_over=False)
        self._follow()

    def _is_deployed(self, known: DeployedVariant) -> bool:
        return self._variants.get(known.name) is known

    def _withdraw(self, known: DeployedVariant, hand_over: bool = True) -> None:
        """Let the replicas of a variant leave, also those that start now."""
        if self._is_deployed(known):
            known.wanted = 0
            self._trim(known, hand_over)
            del self._variants[known.name]

    def _follow(self) -> None:
        """Take over template, context and settings where one variant alone serves, maybe another than before."""
        names = [*self.front.variants.shares]
        if len(names) == 1 and names[0] in self._variants:
            self.config, self.model = self._variants[names[0]].config, self._variants[names[0]].model

    def close(self) -> None:
        """End all requests and replicas, and the Ray cluster that was started here. Does nothing the second time.

        Waits for starts that are under way: Ray exits the process where a thread uses it while it shuts down.
        """
        with self._bell:
            if self._is_closed:
                return
            self._is_closed = True
            self._jobs.append(lambda: self.front.end_all(CLOSED))
            self._bell.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_SECONDS)
        self._launcher.cancel_starts()
        for each in tuple(self._replicas.values()):
            each.stop()
        with self._unused:
            self._unused.wait_for(lambda: not self._users)
        self._launcher.close()
        atexit.unregister(self.close)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Replicas come and go; all below but what starts one runs in the front's thread.

    def _reserve(self, known: DeployedVariant, count: int) -> list[int]:
        """Return the numbers of replicas that are to start now."""
        numbers = [next(self._numbers) for _ in range(count)]
        self._starting.update(dict.fromkeys(numbers, known))
        return numbers

    def _start_all(self, known: DeployedVariant, numbers: Sequence[int]) -> None:
        """Start replicas together, and wait until they can serve (WorkbenchError of the first that cannot)."""
        errors: list[BaseException] = []

        def start(number: int) -> None:
            try:
                self._start(number, known)
            except BaseException as error:
                errors.append(error)

        threads = [self._begin(f"start of replica {number}", partial(start, number)) for number in numbers]
        for each in threads:
            each.join()
        if errors:
            raise errors[0]

    def _start(self, number: int, known: DeployedVariant) -> None:
        """Start a replica and take it in; for any thread but the front's."""
        try:
            made = self._launcher.start(number, known.config)
        except BaseException:
            self._put(lambda: self._starting.pop(number, None))
            raise
        try:
            is_wanted = self._ask(lambda: self._take_in(made, known))
        except BaseException:  # the cluster was closed meanwhile
            made.stop()
            raise
        if not is_wanted:
            made.stop()
            return
        listen = partial(
            made.listen,
            lambda report: self._put(lambda: self.front.take_report(number, report)),
            lambda reason: self._put(lambda: self._lose(number, reason)),
        )
        self._begin(f"reports of replica {number}", listen)

    def _begin(self, name: str, work: Callable[[], None]) -> threading.Thread:
        """Begin work with the launcher or a replica in a thread of its own (WorkbenchError after `close`)."""
        self._use_launcher()

        def run() -> None:
            try:
                work()
            finally:
                self._release_launcher()

        made = threading.Thread(target=run, name=name, daemon=True)
        made.start()
        return made

    def _use_launcher(self) -> None:
        """Put off the launcher's end until `_release_launcher` (WorkbenchError after `close`)."""
        with self._unused:
            if self._is_closed:
                raise WorkbenchError(CLOSED)
            self._users += 1

    def _release_launcher(self) -> None:
        with self._unused:
            self._users -= 1
            self._unused.notify_all()

    def _take_in(self, made: StartedReplica, known: DeployedVariant) -> bool:
        """Let a replica serve; return False where it is no longer wanted: scaled down or withdrawn meanwhile."""
        self._starting.pop(made.number, None)
        if not self._is_deployed(known) or self.num_replicas(known.name) >= known.wanted:
            return False
        known.failed_starts, known.fingerprint = 0, made.ready.fingerprint
        self._replicas[made.number] = made
        self._report(f"replica {made.number}: process {made.ready.process_id}")
        self.front.add_replica(made, known.name, made.ready.pages)
        return True

    def _lose(self, number: int, reason: str) -> None:
        self._report(f"{reason} ({self.front.num_on(number)} requests go on elsewhere)")
        self.front.lose_replica(number, reason)

    def _on_gone(self, number: int) -> None:
        """Start another replica in the place of one that was lost."""
        self._replicas.pop(number, None)
        for known in self._variants.values():
            self._replace_missing(known)

    def _num_staying(self, known: DeployedVariant) -> int:
        return self.num_replicas(known.name) + sum(each is known for each in self._starting.values())

    def _replace_missing(self, known: DeployedVariant) -> None:
        for number in self._reserve(known, known.wanted - self._num_staying(known)):
            with suppress(WorkbenchError):  # closed meanwhile
                self._begin(f"start of replica {number}", partial(self._replace, number, known))

    def _replace(self, number: int, known: DeployedVariant) -> None:
        """Start a replica in the place of a lost one; for a thread of its own."""
        try:
            self._start(number, known)
        except BaseException as error:
            why = describe_error(error) if isinstance(error, Exception) else type(error).__name__
            self._put(lambda: self._on_failed_start(known, why))

    def _on_failed_start(self, known: DeployedVariant, why: str) -> None:
        if not self._is_deployed(known):
            return
        known.failed_starts += 1
        if known.failed_starts < MAX_FAILED_STARTS:
            self._replace_missing(known)
        elif not self._num_staying(known):
            error = f"variant {known.name}: " * bool(known.name) + f"no replica can be started: {why}"
            self._report(error)
            self.front.give_up(known.name, error)
            if known.name not in self.front.variants.shares:
                self._withdraw(known)
            self._follow()

    def _trim(self, known: DeployedVariant, hand_over: bool) -> None:
        """Let the replicas leave that are too many of those that serve, the youngest first.

        One that starts and is then too many is stopped when it could serve: it may never come to that."""
        mine = [each for each in self.front.replicas.values() if each.variant == known.name and not each.is_leaving]
        for view in sorted(mine, key=lambda each: -each.number)[: max(0, len(mine) - known.wanted)]:
            self.front.retire_replica(view.number, hand_over)

    # The front's thread.

    def is_current_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def _put(self, job: Callable[[], object]) -> None:
        """Run `job` in the front's thread, soon; not at all once the cluster is closed."""
        self._try_put(job)

    def _try_put(self, job: Callable[[], object]) -> bool:
        """Run `job` in the front's thread, soon; return False where it will not be run, since the cluster is closed."""
        if self.is_current_thread():
            job()
            return True
        with self._bell:
            if self._is_closed:
                return False
            self._jobs.append(job)
            self._bell.notify()
        return True

    def _ask(self, function: Callable[[], Result]) -> Result:
        """Return `function()`, run in the front's thread."""
        if self.is_current_thread():
            return function()
        answer: Future[Result] = Future()

        def run() -> None:
            try:
                answer.set_result(function())
            except BaseException as error:
                answer.set_exception(error)

        if not self._try_put(run):
            raise WorkbenchError(CLOSED)
        while not answer.done():
            if self._is_closed or not self._thread.is_alive():
                raise WorkbenchError(CLOSED)
            wait((answer,), ALIVE_SECONDS)
        return answer.result()

    def _work(self) -> None:
        while True:
            with self._bell:
                coming = self.front.next_arrival()
                seconds = None if coming is None else max(0.0, coming - self.clock())
                self._bell.wait_for(lambda: self._jobs, seconds)
                jobs, self._jobs = self._jobs, deque()
                ends = self._is_closed
            for job in (*jobs, self.front.arrive):
                try:
                    job()
                except Exception as error:  # a fault of the front's own: nothing that it has can go on
                    self.front.end_all(f"the front failed: {describe_error(error)}")
            if ends:
                return

    def __repr__(self) -> str:
        return f"<Cluster {self.config.model.name}, {len(self._replicas)} replicas>"

    def _display_table(self) -> Table:
        rows: list[list[object]] = []
        for view in tuple(self.front.replicas.values()):
            state = "leaves" if view.is_leaving else "serves"
            rows.append([view.number, view.variant or "first", state, view.num_requests, *view.pages])
        headings = ("replica", "variant", "state", "samples", "pages in use", "idle", "free")
        return Table(f"cluster of {self.config.model.name}", rows, headings)
