"""Keep the wanted number of replicas of each variant: start them, replace lost replicas, retire surplus ones.

scale, deploy ---> reserve numbers ---> threads: start ---> take in, or stop where no longer wanted
lost          ---> reserve numbers ---> thread: start again ---> later again, or give up the variant if none serves
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from workbench.cluster.accounts import FleetAccount
from workbench.cluster.front import Front
from workbench.cluster.job_thread import JobThread
from workbench.cluster.launcher import LauncherThreads, StartedReplica, pause_before_start
from workbench.cluster.replica import Report
from workbench.cluster.variants import DeployedVariant
from workbench.errors import WorkbenchError, describe_error
from workbench.progress import AGAIN_SECONDS, report_if_slow


class Deployments:
    """The variants that a cluster serves and the replicas of each; changed in the front's thread alone.

    Attributes:
        variants: variants by name; the first variant's name is empty.
        starting: the variant of each starting replica, by replica number.
        replicas: serving replicas by number.
        current: the variant that supplies the cluster's template, context and settings: the only serving variant, or
            the last one that served alone.
    """

    def __init__(
        self,
        first: DeployedVariant,
        front: Front,
        thread: JobThread,
        threads: LauncherThreads,
        report: Callable[[str], None],
    ):
        self.variants = {first.name: first}
        self.starting: dict[int, DeployedVariant] = {}
        self.replicas: dict[int, StartedReplica] = {}
        self.current = first
        self._thread, self._front, self._threads, self._report = thread, front, threads, report
        self._numbers = itertools.count(1)

    # Call from any thread except the front's.

    def start_first(self) -> None:
        """Start the wanted replicas of the first variant; return when they can serve."""
        first = self.current
        self._start_all(first, self._thread.ask(lambda: self._reserve(first, first.wanted)))

    def scale(self, variant: str, replicas: int, hand_over: bool) -> None:
        """Change the number of replicas of a variant (see `Cluster.scale`)."""
        self._start_all(*self._thread.ask(lambda: self._resize(variant, replicas, hand_over)))

    def deploy(self, made: DeployedVariant, share: float, keys: Sequence[str]) -> None:
        """Start the replicas of a variant, then assign its share of the requests (see `Cluster.deploy`)."""
        numbers = self._thread.ask(lambda: self._enter(made))
        try:
            self._start_all(made, numbers)
            self._thread.ask(lambda: self._share(made, share, keys))
        except BaseException:
            with suppress(WorkbenchError):  # closed: the original error is raised
                self._thread.ask(lambda: self._withdraw(made))
            raise

    def _start_all(self, known: DeployedVariant, numbers: Sequence[int]) -> None:
        """Start replicas in parallel and wait until they can serve (WorkbenchError of the first that cannot)."""
        errors: list[BaseException] = []

        def start(number: int) -> None:
            try:
                self._start(number, known)
            except BaseException as error:
                errors.append(error)

        threads = [self._threads.begin(f"start of replica {number}", partial(start, number)) for number in numbers]
        for each in threads:
            each.join()
        if errors:
            raise errors[0]

    def _start(self, number: int, known: DeployedVariant) -> None:
        """Start a replica and let it serve."""
        try:
            line = f"starting replica {number} of {known.config.model.name}"
            with report_if_slow(line, self._report, seconds=AGAIN_SECONDS):
                made = self._threads.launcher.start(number, known.config)
        except BaseException:
            self._thread.put(lambda: self.starting.pop(number, None))
            raise
        try:
            is_wanted = self._thread.ask(lambda: self._take_in(made, known))
        except BaseException:  # the cluster was closed meanwhile
            made.stop()
            raise
        if not is_wanted:
            made.stop()
            return

        def on_report(report: Report) -> None:
            self._thread.put(lambda: self._front.take_report(number, report))

        def on_lost(reason: str) -> None:
            self._thread.put(lambda: self._front.lose_replica(number, reason))

        self._threads.begin(f"reports of replica {number}", partial(made.listen, on_report, on_lost))

    def _replace(self, number: int, known: DeployedVariant) -> None:
        """Start a replacement for a lost replica."""
        try:
            self._start(number, known)
        except BaseException as error:
            why = describe_error(error) if isinstance(error, Exception) else type(error).__name__
            self._thread.put(lambda: self._on_failed_start(known, why))

    # In the front's thread: variants.

    def _resize(self, variant: str, replicas: int, hand_over: bool) -> tuple[DeployedVariant, list[int]]:
        """Set the wanted number of replicas; return the variant and the numbers of the replicas to start."""
        if variant not in self.variants:
            raise WorkbenchError(f"variant {variant!r}: not deployed; there are {sorted(self.variants)}")
        shares = self._front.variants
        if replicas < (1 if shares.shares.get(variant) or variant in shares.keys.values() else 0):
            raise WorkbenchError(f"replicas: {replicas}; a variant that gets requests needs at least 1")
        known = self.variants[variant]
        known.wanted = replicas
        self._trim(known, hand_over)
        return known, self._reserve(known, replicas - self._num_staying(known))

    def _enter(self, made: DeployedVariant) -> list[int]:
        if (name := made.name) in self.variants:
            raise WorkbenchError(f"name: variant {name!r} is deployed; give another name (share=1 replaces the others)")
        self.variants[name] = made
        return self._reserve(made, made.wanted)

    def _share(self, made: DeployedVariant, share: float, keys: Sequence[str]) -> None:
        if not self._is_deployed(made):
            raise WorkbenchError(f"variant {made.name!r}: its replicas ended before it served; none can be started")
        self._front.accounts.setdefault(made.name, FleetAccount(made.name))
        self._front.variants = self._front.variants.with_variant(made.name, share, keys)
        for known in list(self.variants.values()):
            if share == 1 and known is not made:
                self._withdraw(known, hand_over=False)
        self._follow()

    def _withdraw(self, known: DeployedVariant, hand_over: bool = True) -> None:
        """Retire the replicas of a variant, including those that are starting."""
        if self._is_deployed(known):
            known.wanted = 0
            self._trim(known, hand_over)
            del self.variants[known.name]

    def _follow(self) -> None:
        names = [*self._front.variants.shares]
        if len(names) == 1 and names[0] in self.variants:
            self.current = self.variants[names[0]]

    def _is_deployed(self, known: DeployedVariant) -> bool:
        return self.variants.get(known.name) is known

    # In the front's thread: replicas.

    def num_replicas(self, variant: str) -> int:
        """Return the number of replicas that serve a variant now. Any thread may call it."""
        views = tuple(self._front.replicas.values())
        return sum(each.variant == variant and not each.is_leaving for each in views)

    def on_gone(self, number: int) -> None:
        """Start a replacement for a lost replica."""
        self.replicas.pop(number, None)
        for known in self.variants.values():
            self._replace_missing(known)

    def _reserve(self, known: DeployedVariant, count: int) -> list[int]:
        """Reserve and return the numbers of `count` replicas to start now."""
        numbers = [next(self._numbers) for _ in range(count)]
        self.starting.update(dict.fromkeys(numbers, known))
        return numbers

    def _take_in(self, made: StartedReplica, known: DeployedVariant) -> bool:
        """Let a replica serve; return False if it is no longer wanted: scaled down or withdrawn meanwhile."""
        self.starting.pop(made.number, None)
        if not self._is_deployed(known) or self.num_replicas(known.name) >= known.wanted:
            return False
        known.failed_starts, known.fingerprint = 0, made.ready.fingerprint
        self.replicas[made.number] = made
        processes = made.ready.process_ids
        where = ", ".join(map(str, processes)) or "on another machine"
        self._report(f"replica {made.number}: process{'es' * (len(processes) > 1)} {where}")
        self._front.add_replica(made, known.name, made.ready.pages)
        return True

    def _num_staying(self, known: DeployedVariant) -> int:
        return self.num_replicas(known.name) + sum(each is known for each in self.starting.values())

    def _replace_missing(self, known: DeployedVariant) -> None:
        for number in self._reserve(known, known.wanted - self._num_staying(known)):
            with suppress(WorkbenchError):  # closed meanwhile
                self._threads.begin(f"start of replica {number}", partial(self._replace, number, known))

    def _on_failed_start(self, known: DeployedVariant, why: str) -> None:
        if not self._is_deployed(known):
            return
        known.failed_starts += 1
        of_variant = f"variant {known.name}: " * bool(known.name)
        self._report(f"{of_variant}a replica did not start in the place of a lost one: {why}")
        pause = pause_before_start(known.failed_starts, self._num_staying(known) > 0)
        if pause == 0:
            self._replace_missing(known)
        elif pause is not None:
            again = threading.Timer(pause, lambda: self._thread.put(lambda: self._try_again(known)))
            again.daemon = True
            again.start()
        else:
            error = f"{of_variant}no replica can be started: {why}"
            self._report(error)
            self._front.give_up(known.name, error)
            if known.name not in self._front.variants.shares:
                self._withdraw(known)
            self._follow()

    def _try_again(self, known: DeployedVariant) -> None:
        if self._is_deployed(known):
            self._replace_missing(known)

    def _trim(self, known: DeployedVariant, hand_over: bool) -> None:
        """Retire surplus serving replicas, the youngest first.

        A surplus replica that is still starting is stopped once it could serve, since it may never get there."""
        mine = [each for each in self._front.replicas.values() if each.variant == known.name and not each.is_leaving]
        for view in sorted(mine, key=lambda each: -each.number)[: max(0, len(mine) - known.wanted)]:
            self._front.retire_replica(view.number, hand_over)
