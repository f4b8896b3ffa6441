"""Serve a model from several processes behind one front, with the interface of a runner's thread.

any thread: submit, scale, deploy ---> jobs ---> front's thread: place requests, take reports ---> sinks
"""

from __future__ import annotations

import atexit
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from workbench.cluster.accounts import FleetAccount, compare_variants
from workbench.cluster.deployments import Deployments
from workbench.cluster.fleet_model import FleetModel
from workbench.cluster.front import FleetLimits, Front
from workbench.cluster.job_thread import JobThread
from workbench.cluster.launcher import CLOSED, Launcher, LauncherThreads, StartedReplica
from workbench.cluster.pools_replica import ProcessLauncher
from workbench.cluster.replica import PageCounts, combine_fingerprints
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
LOCAL = "local"  # address that starts Ray on this machine
ROUTERS = {"prefix": "prefix_aware", "session": "session_sticky"}  # short names
CLOSE_SECONDS = 10.0  # time limit for the front to end all requests
SEQUENCES_PER_PLACE = 2  # samples sent to a replica, per running sequence, to keep its batch full


class Cluster(Displayable):
    """Replicas of a model and the front that serves requests with them. `close()` ends them, and so does leaving a
    `with` block or Python.

        with workbench.Cluster(workbench.EngineConfig(), replicas=2) as cluster:
            for event in cluster.stream("def fib(n):", max_tokens=32):
                print(event.text, end="")

    It has a runner's interface: `stream`, `workbench.serve(cluster)`. Requests of a killed replica continue on
    another replica after their emitted tokens, and a new replica starts.
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
            config: engine settings, the same for all replicas.
            replicas: number of replicas.
            router: round_robin, least_loaded, session or prefix; or a router's settings (`simulate.routers`).
            address: address of a Ray cluster to start replicas on; `local` starts one on this machine. None: child
                processes of this machine, without Ray.
            cpus: cores and threads of a replica; default: an equal share of this machine's cores.
            gpus: accelerators of a replica, assigned by Ray, with or without an address.
            step_seconds: time limit of a step; then its replica is ended as lost. None for no limit.
            limits: bounds of the fleet; default: derived from the config.
            launcher: starts the replicas, in place of Ray or child processes.
            report: receives a line on each slow part of the start.

        Raises:
            WorkbenchError: for an unsupported model or settings, or if Ray is needed and missing.
        """
        if replicas < 1:
            raise WorkbenchError(f"replicas: {replicas}; give at least 1")
        settings = (config or EngineConfig()).engine
        first = DeployedVariant("", settings, FleetModel.of(settings), replicas)
        self.is_from_config = True
        self.clock = time.perf_counter
        page_size = settings.cache.page_size if isinstance(settings.cache.prefix, RadixPrefixCache) else None
        kind = ROUTERS.get(router, router) if isinstance(router, str) else router
        limits = limits or FleetLimits(page_size, SEQUENCES_PER_PLACE * settings.schedule.max_num_seqs)
        self.front = Front(
            router_from(kind), limits, self.clock, lambda number: self._deployments.on_gone(number), report
        )
        starting = f"starting {replicas} replicas of {settings.model.name}"
        if launcher is None and address is None and not gpus:
            launcher = ProcessLauncher(cpus, replicas, step_seconds)
        elif launcher is None:
            from workbench.cluster.ray_replicas import RayLauncher

            with report_if_slow(f"{starting}: Ray at {address or LOCAL}", report):
                launcher = RayLauncher(None if address == LOCAL else address, cpus, gpus, replicas, step_seconds)
        self._threads = LauncherThreads(launcher)
        self._thread = JobThread(
            "cluster's front", lambda: CLOSED, self.front.arrive, self.front.seconds_to_arrival, self._failed
        )
        self._deployments = Deployments(first, self.front, self._thread, self._threads, report)
        self._request_ids = (f"request-{n}" for n in itertools.count())
        atexit.register(self.close)
        register_stoppable(self)
        try:
            with report_if_slow(starting, report):
                self._deployments.start_first()
        except BaseException:
            self.close()
            raise

    def _failed(self, error: BaseException) -> None:
        """End all requests after an error of the front itself: they cannot continue."""
        self.front.end_all(f"the front failed: {describe_error(error)}")

    # The interface of a runner's thread.

    @property
    def config(self) -> EngineConfig:
        """Return the settings of the only serving variant. If there are several, return the settings of the last
        variant that served alone.
        """
        return self._deployments.current.config

    @property
    def model(self) -> FleetModel:
        return self._deployments.current.model

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.model.tokenizer

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        return self.model.sampling_defaults

    @property
    def chat_template(self) -> ChatTemplate | None:
        return self.model.chat_template

    def assemble(self, conversation: Conversation, max_tokens: int = 1) -> Prompt:
        """Return the prompt of a conversation, within the model's context as `overflow` says."""
        context, overflow = self.model.spec.max_position_embeddings, self.config.schedule.overflow
        return intake.assemble(self, conversation, context, overflow, max_tokens)

    def make_requests(self, requests: intake.RequestInput, sampling: dict[str, Any]) -> list[Request]:
        """Return `requests` as Request values, in the given order; texts and conversations are encoded and
        get an id.
        """
        return intake.make_requests(
            requests, self.tokenizer, sampling, self._request_ids, self.assemble, self.sampling_defaults
        )

    @intake.with_sampling_signature
    def stream(self, requests: intake.RequestInput, **sampling: object) -> Iterator[Event]:
        """Run `requests` and yield events as they happen, as `Runner.stream` does; each event names its replica."""
        return iter(self.submit(requests, **sampling))

    def submit(self, requests: intake.RequestInput, **sampling: object) -> RequestHandle:
        """Submit `requests` as `stream` does, and return their handle at once."""
        asked = RequestHandle(lambda: cancel())
        made = self.make_requests(requests, sampling)
        cancel = self.submit_to(asked, made, intake.is_single(requests))
        return asked

    def submit_to(self, sink: EventSink, requests: Iterable[Request], is_single: bool = False) -> Callable[[], None]:
        """Submit `requests`, whose events go to `sink`; return a function that cancels them soon, from any thread.

        `is_single`: the error of a refused request goes to the sink.
        """
        context, overflow = self.model.spec.max_position_embeddings, self.config.schedule.overflow
        begin = self.tokenizer.bos_token_ids if self.tokenizer is not None else ()
        made = [intake.truncate_prompt(each, context, overflow, begin) for each in requests]  # as in a runner
        submissions: list[Any] = []
        if not self._thread.put(lambda: submissions.append(self.front.submit(sink, made, is_single))):
            raise WorkbenchError(CLOSED)

        def cancel() -> None:
            self._thread.put(lambda: [self.front.cancel(each) for each in submissions])

        return cancel

    def listen(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        """Call `listener` with every event of the fleet, in the front's thread; return a function that stops it."""
        return self.front.submissions.listen(listener)

    def after_delivery(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` each time that the events of a replica's message have reached their sinks; return a function
        that stops it.
        """
        callbacks = self.front.submissions.after_delivery
        callbacks.append(callback)
        return lambda: callbacks.remove(callback) if callback in callbacks else None

    def busy_seconds(self) -> float:
        """Return how many seconds the current step has taken so far, at the replica where this is least."""
        return min((each.busy_seconds for each in self.replicas.values()), default=0.0)

    def call(self, function: Callable[[Any], Result], replica: int | None = None) -> Result:
        """Run `function(runner)` in a replica (default: the first), between two steps, and return its result."""
        known = self.replicas
        number = next(iter(known), None) if replica is None else replica
        if number not in known:
            raise WorkbenchError(f"replica {number}: not running; running: {', '.join(map(str, known)) or 'none'}")
        with self._threads.using():
            return known[number].call(function)

    def stop(self) -> None:
        """Cancel all requests, without waiting."""
        self._thread.put(lambda: [self.front.cancel(each) for each in self.front.submissions])

    # The fleet.

    @property
    def fingerprint(self) -> str:
        """Return a text that identifies weights and settings: engines that may answer the same tokens differently have
        different texts.

        Serving variants share one combined fingerprint; for one variant see `fingerprint_of`."""
        return combine_fingerprints(self._fingerprint(name) for name in self.front.variants.shares)

    def fingerprint_of(self, tenant: str) -> str:
        """Return the fingerprint of the variant that serves a tenant; empty if several variants do.

        A cached answer may be reused only under the same fingerprint."""
        variant = self.front.variants.of_tenant(tenant)
        return "" if variant is None else self._fingerprint(variant)

    def _fingerprint(self, variant: str) -> str:
        known = self._deployments.variants.get(variant)
        return "" if known is None else known.fingerprint

    @property
    def pages(self) -> PageCounts:
        """Return the numbers of pages in use, idle and free, over all replicas."""
        return self.front.pages

    @property
    def cache_tokens(self) -> int:
        """Return the cache size in tokens of the smallest replica; 0 while none serves."""
        return min((each.ready.cache_tokens for each in self.replicas.values()), default=0)

    @property
    def accounts(self) -> dict[str, FleetAccount]:
        """Return the account of each variant; the first variant's name is empty."""
        return self.front.accounts

    def compare(self) -> Table:
        """Return a table of the variants' accounts, a column for each (see `deploy`)."""
        return compare_variants(tuple(self.accounts.values()))

    @property
    def replicas(self) -> dict[int, StartedReplica]:
        """Return the replicas that serve now, by number."""
        return dict(self._deployments.replicas)

    def num_replicas(self, variant: str = "") -> int:
        """Return the number of replicas that serve a variant now."""
        return self._deployments.num_replicas(variant)

    @property
    def starting(self) -> dict[int, str]:
        """Return the variant of each replica that is starting now, by replica number."""
        return {number: known.name for number, known in dict(self._deployments.starting).items()}

    def num_requests(self) -> tuple[int, int]:
        """Return (number of requests at replicas, number of requests waiting at the front)."""
        waiting = self.front.num_waiting
        return self.front.num_requests - waiting, waiting

    def scale(self, replicas: int, variant: str = "", hand_over: bool = True) -> None:
        """Change the number of replicas; return when new replicas can serve. Leaving replicas may still drain.

        Args:
            replicas: target number of replicas of the variant.
            variant: name of a deployed variant.
            hand_over: move requests of a leaving replica elsewhere at once; otherwise they finish there.
        """
        self._deployments.scale(variant, replicas, hand_over)

    def deploy(
        self, config: EngineConfig, share: float, replicas: int = 1, name: str = "b", keys: Sequence[str] = ()
    ) -> None:
        """Serve a share of the requests with another config: for a rolling change, or to compare two variants.

        A tenant's requests always go to the same variant, also after replicas are lost; a request without a tenant is
        assigned by its id. If no replica of a variant can be restarted, its requests go to the other variants.
        `accounts` has the results of each variant. A variant that cannot be started leaves the fleet unchanged.

        Args:
            config: config of the new variant; its model must have the tokenizer of the first variant.
            share: fraction of the requests, 0 to 1; 1 replaces all other variants: their replicas leave when idle.
            replicas: number of replicas.
            name: name of the variant; no serving variant may have it.
            keys: tenants (owners of the server's keys) always served by it; `share` applies to all others.
        """
        if not 0 <= share <= 1 or not (share or keys):
            raise WorkbenchError(f"share: {share}; give a share of the requests, above 0 and up to 1; or 0 and keys")
        if isinstance(keys, str):
            raise WorkbenchError(f"keys: {keys!r}; give a list of tenants")
        if replicas < 1:
            raise WorkbenchError(f"replicas: {replicas}; a variant that gets requests needs at least 1")
        made = DeployedVariant(name, config.engine, FleetModel.of(config.engine), replicas)
        self.model.check_encodes_for(made.model)
        self._deployments.deploy(made, share, keys)

    def close(self) -> None:
        """End all requests and replicas, and a Ray cluster started here. A second call does nothing.

        Waits for replicas that are starting: Ray exits the process if a thread uses it during shutdown.
        """
        if not self._thread.close(lambda: self.front.end_all(CLOSED)):
            return
        if not self._thread.is_current:
            self._thread.join(CLOSE_SECONDS)
        self._threads.close(lambda: [each.stop() for each in self.replicas.values()])
        atexit.unregister(self.close)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def is_current_thread(self) -> bool:
        """Return whether this is the front's thread, in which sinks and listeners are called."""
        return self._thread.is_current

    def __repr__(self) -> str:
        return f"<Cluster {self.config.model.name}, {len(self._deployments.replicas)} replicas>"

    def _display_table(self) -> Table:
        rows: list[list[object]] = []
        for view in tuple(self.front.replicas.values()):
            state = "leaves" if view.is_leaving else "serves"
            rows.append([view.number, view.variant or "first", state, view.num_requests, *view.pages])
        headings = ("replica", "variant", "state", "samples", "pages in use", "idle", "free")
        return Table(f"cluster of {self.config.model.name}", rows, headings)
