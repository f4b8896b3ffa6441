"""Serve a model from several processes behind one front, which is used like a runner's thread.

any thread: submit, scale, deploy ---> jobs ---> front's thread: place requests, take reports ---> sinks
"""

from __future__ import annotations

import atexit
import hashlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from workbench.cluster.accounts import FleetAccount, compare_variants
from workbench.cluster.deployments import Deployments
from workbench.cluster.fleet_model import FleetModel
from workbench.cluster.front import FleetLimits, Front
from workbench.cluster.front_thread import FrontThread
from workbench.cluster.launcher import CLOSED, Launcher, LauncherThreads, StartedReplica
from workbench.cluster.process_replicas import ProcessLauncher
from workbench.cluster.replica import PageCounts
from workbench.cluster.variants import DeployedVariant
from workbench.display import Displayable, Table
from workbench.engine import inputs as intake
from workbench.engine.config import EngineConfig
from workbench.engine.request_handle import RequestHandle
from workbench.engine.runner_thread import EventSink
from workbench.errors import WorkbenchError
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
LOCAL = "local"  # the address of a Ray of one's own
ROUTERS = {"prefix": "prefix_aware", "session": "session_sticky"}  # short names
SEQUENCES_PER_PLACE = 2  # a replica has so many of its running sequences, so that none of its places stays empty


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
            address: of a Ray cluster, on which they start; `local` starts one on this machine. None: processes of this
                machine, which need no Ray.
            cpus: cores, and threads, of a replica; an equal share of this machine's unless given.
            gpus: accelerators of a replica, which Ray shares out, with an address or without.
            step_seconds: that a step may last; then its replica is ended as a lost one. None: any time.
            limits: bounds of the fleet; by the config unless given.
            launcher: starts replicas in another way.
            report: receives a line on each slow part of starting.

        Raises:
            WorkbenchError: for a model or settings that cannot be carried out, and where Ray is wanted and missing.
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
        self._thread = FrontThread(self.front)
        self._deployments = Deployments(first, self._thread, self._threads, report)
        self._request_ids = (f"request-{n}" for n in itertools.count())
        atexit.register(self.close)
        register_stoppable(self)
        try:
            with report_if_slow(starting, report):
                self._deployments.start_first()
        except BaseException:
            self.close()
            raise

    # What a runner's thread offers.

    @property
    def config(self) -> EngineConfig:
        """Return the settings of the variant that serves alone, or of the last one that did."""
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
        """Return `requests` as Requests, in the given order; texts and conversations are encoded and get an id."""
        return intake.make_requests(
            requests, self.tokenizer, sampling, self._request_ids, self.assemble, self.sampling_defaults
        )

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
        if not self._thread.put(lambda: submissions.append(self.front.submit(sink, made, is_single))):
            raise WorkbenchError(CLOSED)

        def cancel() -> None:
            self._thread.put(lambda: [self.front.cancel(each) for each in submissions])

        return cancel

    def listen(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        """Call `listener` with every event of the fleet, in the front's thread; return a function that ends it."""
        listeners = self.front.submissions.listeners
        listeners.append(listener)
        return lambda: listeners.remove(listener) if listener in listeners else None

    def after_delivery(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` when the events of a message are with their sinks; return a function that ends it."""
        callbacks = self.front.submissions.after_delivery
        callbacks.append(callback)
        return lambda: callbacks.remove(callback) if callback in callbacks else None

    def busy_seconds(self) -> float:
        """Return the seconds that the present step has lasted, of the replica where it is shortest."""
        return min((each.busy_seconds for each in self.replicas.values()), default=0.0)

    def call(self, function: Callable[[Any], Result], replica: int | None = None) -> Result:
        """Return `function(runner)`, run in a replica between two of its steps; the first replica unless given."""
        known = self.replicas
        number = next(iter(known), None) if replica is None else replica
        if number not in known:
            raise WorkbenchError(f"replica {number}: not there now; there are {', '.join(map(str, known)) or 'none'}")
        with self._threads.using():
            return known[number].call(function)

    def stop(self) -> None:
        """Cancel all requests soon."""
        self._thread.put(lambda: [self.front.cancel(each) for each in self.front.submissions])

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
        known = self._deployments.variants.get(variant)
        return "" if known is None else known.fingerprint

    @property
    def pages(self) -> PageCounts:
        """Return the pages of all replicas together."""
        return self.front.pages

    @property
    def cache_tokens(self) -> int:
        """Return how many tokens the cache of the smallest replica has room for; 0 while none serves."""
        return min((each.ready.cache_tokens for each in self.replicas.values()), default=0)

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
        return dict(self._deployments.replicas)

    def num_replicas(self, variant: str = "") -> int:
        """Return the replicas that serve a variant now."""
        return self._deployments.num_replicas(variant)

    @property
    def starting(self) -> dict[int, str]:
        """Return the variants of the replicas that start now, by number."""
        return {number: known.name for number, known in dict(self._deployments.starting).items()}

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
        self._deployments.scale(variant, replicas, hand_over)

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
        self._deployments.deploy(made, share, keys)

    def close(self) -> None:
        """End all requests and replicas, and the Ray cluster that was started here. Does nothing the second time.

        Waits for starts that are under way: Ray exits the process where a thread uses it while it shuts down.
        """
        if not self._thread.close():
            return
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
