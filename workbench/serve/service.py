"""Answer calls: find the model, ask the gate, run the call, keep its trace. Of HTTP it knows only requests' headers."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from workbench.constrained.grammar_trial import GrammarTrial, TrialUnavailable
from workbench.errors import WorkbenchError, describe_error
from workbench.response_format import ResponseFormat
from workbench.serve.answers.engine_stream import EngineStream, StepBridge
from workbench.serve.answers.pieces import Piece
from workbench.serve.answers.prompt_work import embed_prompts, tokenize_prompts
from workbench.serve.answers.task_stream import TaskStream
from workbench.serve.bodies.fields import invalid
from workbench.serve.bodies.json_body import parse_json_object, read_bytes
from workbench.serve.call import Call, Caller
from workbench.serve.call_run import CallRun, CallStream
from workbench.serve.config import ServerSettings
from workbench.serve.dialect import Dialect, read_call
from workbench.serve.errors import RETRY_SECONDS, SERVER_FAILED, ApiError
from workbench.serve.gate import Gate, Lease
from workbench.serve.local_names import check_names, is_loopback
from workbench.serve.memory.call_memory import CallMemory
from workbench.serve.prompt_threads import PromptThreads
from workbench.serve.replays import Replays
from workbench.serve.served_model import PreparedPrompt, ServedModel, not_served
from workbench.serve.watch.metrics import Metrics
from workbench.serve.watch.serving_log import ServingLog
from workbench.serve.watch.snapshot import PageUse
from workbench.serve.watch.telemetry import CallSpans
from workbench.serve.watch.traces import CallTrace, TraceStore

if TYPE_CHECKING:
    from fastapi import Request

LOG = logging.getLogger(__name__)
Result = TypeVar("Result")
TICK_SECONDS = 0.5
MAX_BYTES_ON_LOOP = 1 << 16  # maximum body parsed in the event loop: a few milliseconds
SETTLE_SECONDS = 5.0  # time for the engine to end its calls when the server ends


class Service:
    """The calls of one server: the models behind its gate, and the running calls. It belongs to one event loop."""

    def __init__(
        self, models: Mapping[str, ServedModel], gate: Gate, dialects: Mapping[str, Dialect], settings: ServerSettings
    ):
        self.models, self.gate, self.dialects, self.settings = dict(models), gate, dialects, settings
        self.traces = TraceStore(settings.kept_traces, settings.trace_bytes)
        self.replays = Replays(self.models, settings)
        self.metrics = Metrics(self.models)
        self.log = ServingLog(", ".join(self.models), self._count_pages, gate.meters)
        self._leave_log: list[Callable[[], None]] = []
        self._runs: dict[str, CallRun] = {}
        self.is_draining = False
        self.memory = CallMemory(settings.memory_bytes, settings.memory_seconds)
        self._bridges: dict[str, StepBridge] = {}
        self._embedding_turns: dict[str, asyncio.Lock] = {}
        self._threads = PromptThreads(settings.num_threads)
        tokenizers = {name: model.tokenizer for name, model in models.items() if model.tokenizer is not None}
        self._trial = GrammarTrial({k: v for k, v in tokenizers.items() if v.byte_rule is not None})
        self._trial_turns = PromptThreads(1)
        self._spans = CallSpans()
        self._ticking: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[Any]] = set()
        gate.connect(self)

    async def open(self) -> None:
        """Start the service in the current event loop, which serves."""
        loop = asyncio.get_running_loop()
        self._embedding_turns = {name: asyncio.Lock() for name in self.models}
        self._bridges = {name: StepBridge(loop, model.thread) for name, model in self.models.items()}
        self._leave_log = [model.thread.listen(self.log.record) for model in self.models.values()]
        self._leave_log += self.replays.listen()
        self._ticking = asyncio.create_task(self._tick())
        threading.Thread(target=self._trial.start, name="grammar trial", daemon=True).start()

    async def close(self) -> None:
        """Cancel and settle running calls, and release everything but the runners.

        The wait for a stuck engine ends after `SETTLE_SECONDS`.
        """
        runs = list(self.runs)
        for run in runs:
            run.leave()
        await self.wait_for([*self._background, *(asyncio.create_task(run.settle()) for run in runs)])
        if self._ticking is not None:
            self._ticking.cancel()
        for bridge in self._bridges.values():
            bridge.close()
        for leave in self._leave_log:
            leave()
        self.replays.write()
        self._threads.close()
        self._trial.close()
        self._trial_turns.close()
        await self.gate.close()

    async def wait_for(self, ending: Collection[asyncio.Task[Any]], background_only: bool = False) -> None:
        """Wait for tasks that end with their calls; after `SETTLE_SECONDS` abandon the engine, which may be stuck.

        Args:
            ending: the tasks.
            background_only: only abandon calls of batches; calls of clients continue.
        """
        if not ending:
            return
        await asyncio.wait(ending, timeout=SETTLE_SECONDS)
        for run in list(self.runs):
            if run.call.background or not background_only:
                run.abandon()
        await asyncio.wait(ending, timeout=SETTLE_SECONDS)

    @property
    def runs(self) -> Collection[CallRun]:
        """Return the calls that have arrived but are not settled."""
        return self._runs.values()

    def end_all(self) -> None:
        """End every call with an error for its client, because the drain time is over."""
        for run in list(self.runs):
            run.fail(ApiError("unavailable_error", "the server is shutting down; ask again", code="shutting_down"))

    # Queries of a gate (gate.ModelCatalog).

    def names(self) -> Collection[str]:
        return self.models.keys()

    def fingerprint(self, model: str, tenant: str) -> str:
        return self.models[model].fingerprint_of(tenant)

    def max_model_len(self, model: str) -> int:
        return self.models[model].max_model_len

    def unavailable(self, model: str) -> str:
        """Return why a call that has arrived, and already counts, cannot run on a model now; empty if it can."""
        return self._closed() or self.stuck(model)

    def _closed(self) -> str:
        """Return why the server takes no call of any model now; the arrived call is counted already."""
        if self.is_draining:
            return "the server is shutting down"
        if self._is_full():
            return f"{self.num_waiting - 1} calls wait for their first token, which is the limit"
        return ""

    def stuck(self, model: str) -> str:
        """Return why the engine of a model counts as stuck: a step has not ended for too long. Empty while it works."""
        limit, known = self.settings.step_seconds, self.models.get(model)
        busy = 0.0 if known is None else known.thread.busy_seconds()
        return f"a step of the engine has not ended for {busy:.0f} s" if limit is not None and busy > limit else ""

    def _is_full(self) -> bool:
        return self.num_waiting > self.settings.max_waiting

    @property
    def num_waiting(self) -> int:
        """Return the number of calls with a client that waits for a first token; batch calls have no client."""
        return sum(not (each.has_first_token or each.has_ended or each.call.background) for each in self.runs)

    async def prompt_ids(self, call: Call) -> tuple[tuple[int, ...], ...]:
        return tuple(each.request.prompt_ids for each in await self._prepare(call))

    async def decode(self, model: str, ids: Sequence[int]) -> str | None:
        tokenizer = self.models[model].tokenizer
        return None if tokenizer is None else await self.in_thread(lambda: tokenizer.decode(ids, special=True))

    # From a request to a call.

    async def identify(self, request: Request) -> Caller:
        """Return the caller of a request; the gate is asked once per request."""
        if not hasattr(request.state, "caller"):
            headers = {name.lower(): value for name, value in request.headers.items()}
            caller = await self.gate.identify(headers)
            if not caller.key and is_loopback(self.settings.host):
                check_names(headers)
            request.state.caller = caller
        return request.state.caller

    async def read(self, request: Request, dialect: Dialect) -> Call:
        """Return the validated call of a request, with its caller. The gate has not admitted it yet. ApiError for an
        invalid request.
        """
        caller = await self.identify(request)
        body = await read_bytes(request, self.settings.max_body_bytes, self.settings.body_seconds)

        def parse() -> Call:
            return self.parse(parse_json_object(body), dialect, caller)

        return parse() if len(body) <= MAX_BYTES_ON_LOOP else await self.in_thread(parse, caller.tenant)

    def parse(self, given: Mapping[str, Any], dialect: Dialect, caller: Caller) -> Call:
        """Return the call of a body or batch line. The gate has not admitted it yet. ApiError for an invalid body."""
        name = given.get("model")
        alias = isinstance(name, str) and name not in self.models and name in self.gate.aliases()

        def find_model() -> ServedModel:
            if alias or (name is None and not dialect.body.model_fields["model"].is_required()):
                return self.model_for(caller)
            return self.model_of(name, self.models_of(caller))

        call = read_call(dialect, given, find_model, self.settings, caller)
        if alias:  # a router chooses the model later
            return replace(call, model=name)
        return self.model_of(call.model).with_sampling_defaults(call)

    def model_of(self, name: object, named: Collection[str] | None = None) -> ServedModel:
        """Return the model of this name; if there is none, raise an ApiError that lists the models in `named` (default:
        all).
        """
        if not isinstance(name, str) or name not in self.models:
            raise not_served(name, self.models if named is None else named)
        return self.models[name]

    def models_of(self, caller: Caller) -> dict[str, ServedModel]:
        """Return the models that a caller may use."""
        return {name: model for name, model in self.models.items() if self.gate.may_use(caller, name)}

    def model_for(self, caller: Caller, name: str | None = None) -> ServedModel:
        """Return the model `name`, or without a name the first model that the caller may use; ApiError if the caller
        may use none.
        """
        permitted = self.models_of(caller)
        found = next(iter(permitted), None) if name is None else name
        if found not in permitted:
            raise not_served(found, permitted)
        return permitted[found]

    # From a call to its pieces.

    def arrive(self, call: Call) -> CallRun:
        """Return the run of a call, which counts as arrived from now on; the caller must admit, start and settle the
        run. ApiError if the server takes no calls now.

        A stuck engine is checked after admission, since the gate may choose another model.
        """
        run = CallRun(call, self._admit, self._open, self._settled)
        self._runs[call.id] = run
        if why := self._closed():
            del self._runs[call.id]
            raise self._refusal("unavailable_error" if self.is_draining else "overloaded_error", why, call.model)
        return run

    def _refusal(self, kind: str, why: str, model: str) -> ApiError:
        self.metrics.refused(model)
        return ApiError(kind, f"{why}; ask again later", headers={"retry-after": str(RETRY_SECONDS)})

    async def begin(self, call: Call) -> CallRun:
        """Admit a call and return its run; the caller must start and settle the run. ApiError if the call is
        refused.
        """
        run = self.arrive(call)
        try:
            await run.admit()
        except BaseException:
            await run.settle()
            raise
        return run

    async def _admit(self, call: Call) -> Lease:
        lease = await self.gate.admit(call)
        if call.purpose != "tokenize":
            trace = self._runs[call.id].trace
            trace.is_moderated = lease.is_moderated
            self.traces.add(trace)
        return lease

    async def run(self, call: Call) -> list[Piece]:
        """Run a call without a waiting client; return all its pieces. Cancelling this coroutine cancels the call.
        ApiError if the call is refused or fails.
        """
        return await self.complete(await self.begin(call))

    async def complete(self, run: CallRun) -> list[Piece]:
        """Start an admitted run, return its pieces and settle it. Cancelling this coroutine cancels the call. ApiError
        if the call fails.
        """
        try:
            await run.start()
            pieces: list[Piece] = []
            while (fresh := await run.next()) is not None:
                pieces += fresh
            return pieces
        except ApiError as error:
            run.fail(error)
            raise
        finally:
            await run.settle()

    async def _open(self, trace: CallTrace) -> CallStream:
        call = trace.call
        model = self.model_of(call.model)
        if why := self.stuck(call.model):
            raise self._refusal("unavailable_error", why, call.model)
        in_thread = partial(self.in_thread, tenant=call.caller.tenant)
        if call.purpose == "tokenize":
            return TaskStream(lambda _: tokenize_prompts(call, model, in_thread, self.memory.turns))
        prepared = trace.prepared = await self._prepare(call)
        if call.purpose == "embed":
            rows, turn = [each.request.prompt_ids for each in prepared], self._embedding_turns[model.name]
            return TaskStream(lambda count: embed_prompts(call, rows, model, in_thread, turn, count))
        await self._try_grammar(call, prepared[0].request.sampling.response_format)
        settings = self.settings
        self.replays.enter(call.model, prepared)
        bridge = self._bridges[call.model]
        return EngineStream(call, model, prepared, bridge, trace.keep, settings.max_buffered_pieces, self.memory)

    async def _prepare(self, call: Call) -> list[PreparedPrompt]:
        """Return a call's prompts, reusing prompts prepared for the gate (ApiError if the call has ended meanwhile)."""
        run = self._runs.get(call.id)
        known = None if run is None else run.prepared
        if known is None or not _has_prompts_of(known[0], call):
            model = self.model_of(call.model)

            def prepare() -> list[PreparedPrompt]:
                if run is not None and run.has_ended:
                    raise ApiError("unavailable_error", "the call ended before its prompt was read")
                return model.prepare(call, self.memory.turns)

            known = call, await self.in_thread(prepare, call.caller.tenant)
            if run is not None:
                run.prepared = known
        caller = call.caller
        return [
            replace(each, request=replace(each.request, cache_salt=caller.cache_salt, tenant=caller.tenant))
            for each in known[1]
        ]

    async def _try_grammar(self, call: Call, wanted: ResponseFormat | None) -> None:
        """Compile a grammar in a child process first, and refuse it if the process does not survive (ApiError)."""
        if wanted is None or call.model not in self._trial.vocabularies:  # without a vocabulary the engine refuses it
            return
        check = partial(self._trial.check, call.model, wanted)
        try:
            if self._trial.knows(call.model, wanted):
                check()
            else:
                await self._trial_turns.run(call.caller.tenant, check)
        except TrialUnavailable as error:
            raise ApiError("unavailable_error", str(error)) from None
        except WorkbenchError as error:
            raise invalid(error) from None

    def _count_pages(self) -> PageUse:
        counts = [model.pages for model in self.models.values()]
        return PageUse(*(sum(each) for each in zip(*counts, strict=True)))

    async def in_thread(self, function: Callable[[], Result], tenant: str = "") -> Result:
        """Run `function()` outside of the event loop, when it is the tenant's turn, and return its result."""
        return await self._threads.run(tenant, function)

    def _settled(self, run: CallRun) -> None:
        self._runs.pop(run.call.id, None)
        self.traces.trim()
        self.metrics.observe(run.trace)
        if run.call.purpose == "answer":
            self._spans.export(run.trace)

    async def _tick(self) -> None:
        """Wake silent streams for a ping, and end the calls of a stuck engine."""
        while True:
            await asyncio.sleep(TICK_SECONDS)
            now = time.perf_counter()
            self.traces.trim()
            if self.settings.replay_folder is not None:
                self.spawn(self.in_thread(lambda: self.replays.write(wait=False)))
            for run in list(self.runs):
                if run.lease is not None and (why := self.stuck(run.call.model)):  # before, the gate may change it
                    run.fail(ApiError("unavailable_error", f"{why}; ask again later"))
                    run.abandon()
                elif now - run.silent_since > self.settings.ping_seconds:
                    run.wake()

    def spawn(self, work: Any) -> asyncio.Task[Any]:
        """Run a coroutine to its end, even if the request that started it ends."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


def _has_prompts_of(prepared: Call, call: Call) -> bool:
    """Return whether the prompts prepared for one call are valid for another call with the same id."""
    same = prepared.prompts is call.prompts and prepared.sampling is call.sampling
    return same and prepared.model == call.model


def as_api_error(error: BaseException) -> ApiError:
    """Return the client's error for any error; an unexpected error's message goes to the log only."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, WorkbenchError | ValidationError):
        return invalid(error)
    LOG.error("an answer failed", exc_info=error)
    return ApiError("api_error", SERVER_FAILED, detail=describe_error(error))
