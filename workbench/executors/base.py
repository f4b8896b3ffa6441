"""Execute a step's plan: eager modules, blocks compiled by Inductor, or a compiled step; choose between them.

Where `auto` chose the backend, `FallbackExecutor` finds out at the first long prefill whether blocks compile and run
here. A decode step through MLIR needs no blocks, so they are not compiled before a prefill is too long for it. Only
errors are detected: results are not compared with the eager modules.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal, Protocol

import torch
from torch import Tensor

from compiled_kernels import Backend, BackendError
from compiled_kernels.correct_backend import COMPILER_ERRORS
from workbench.errors import WorkbenchError
from workbench.executors.capabilities import Requirements, unsupported
from workbench.executors.contention import StepThreads
from workbench.executors.cuda_graph import CudaGraphExecutor
from workbench.executors.early_layers import LayerTap
from workbench.executors.evicting import EvictingExecutor, Evictor, observe_store
from workbench.executors.guards import ModelGuard
from workbench.executors.inductor import InductorExecutor
from workbench.executors.mlir import MlirStep, check_mlir_step
from workbench.executors.packing import bucket_for, pack_batch, synchronized, verify_bucket_for
from workbench.executors.prefill import PrefillExecutor, weights_in_panels
from workbench.executors.select import Backends
from workbench.executors.token_parallel import TokenParallelExecutor
from workbench.kv_cache.store import KVStore
from workbench.model.transformer import Transformer
from workbench.scheduler.plan import StepPlan

CompileUnit = Literal["block", "step"]
# The most tokens of a step that go through the compiled step as rows. A call takes TOKEN_PARALLEL_BUCKETS[-1] of them
# and reads the weights anew. One call was quicker than blocks in panels in every case measured (0.5 to 0.9 of their
# time at 64 tokens), two about even (0.9 to 1.1 at 128), three or more slower (1.0 to 1.3 at 192). Measured with demo
# and shape:smollm2-135m, float32 and bfloat16, v3, v4 and v4+bf16 alike (experiments/LOG.md, 2026-11-22).
MAX_TOKEN_PARALLEL_TOKENS = 128
MAX_TOKEN_PARALLEL_TOKENS_WITHOUT_PANELS = 256  # up to here rows of the step were quicker than Inductor's blocks
TOKEN_PARALLEL_BUCKETS = (8, 16, 32, 64)
MAX_MESSAGE_CHARACTERS = 300  # of a compiler's message


class Executor(Protocol):
    """An executor of plans. `forward` returns logits of each span's last `num_logits` tokens, in order: [sample,
    vocab], and where the plan names layers their states as further columns (see early_layers.py)."""

    @property
    def compiles(self) -> int: ...

    @property
    def kernel_seconds(self) -> float | None: ...

    @property
    def artifacts(self) -> Mapping[str, str]: ...

    def forward(self, plan: StepPlan) -> Tensor: ...


class EagerExecutor:
    """Run the modules as written."""

    compiles = 0
    kernel_seconds: float | None = None
    artifacts: Mapping[str, str] = MappingProxyType({})

    def __init__(self, model: Transformer, store: KVStore):
        self.model, self.store = model, store

    def forward(self, plan: StepPlan) -> Tensor:
        rows = len(plan.spans) + plan.padding_rows if plan.padding_rows else None
        batch = pack_batch(plan, self.store.page_size, self.model.device, rows)
        if plan.layers:
            tap = LayerTap(plan.layers, batch.logits_indices)
            logits = synchronized(tap.beside(self.model(batch, self.store, tap)))
        else:
            logits = synchronized(self.model(batch, self.store))
        self.model.count_experts(plan.num_tokens)
        return logits


class MlirExecutor:
    """Run decodes, and steps of few tokens, as one compiled function per bucket; other steps by blocks."""

    def __init__(self, model: Transformer, store: KVStore, rest: Executor, threads: StepThreads | None = None):
        check_mlir_step(model, store)
        self.model, self.store, self.threads = model, store, threads or StepThreads()
        panels = weights_in_panels(model)
        self.prefill_executor = PrefillExecutor(model, store, self._rows) if panels else rest
        self.decode_steps: dict[int, MlirStep] = {}
        self.verify_steps: dict[int, MlirStep] = {}  # rows may be of one sequence
        self.max_token_parallel_tokens = (
            MAX_TOKEN_PARALLEL_TOKENS if panels else MAX_TOKEN_PARALLEL_TOKENS_WITHOUT_PANELS
        )
        self.token_parallel: TokenParallelExecutor | None = None
        self.kernel_seconds: float | None = None
        self._made, self._watch = 0, ModelGuard(model)

    @property
    def compiles(self) -> int:
        return (
            self.prefill_executor.compiles + self._made + (self.token_parallel.compiles if self.token_parallel else 0)
        )

    @property
    def artifacts(self) -> Mapping[str, str]:
        ours = {f"decode {rows}": step.artifact for rows, step in self.decode_steps.items()}
        ours |= {f"check {rows}": step.artifact for rows, step in self.verify_steps.items()}
        return {
            **self.prefill_executor.artifacts,
            **(self.token_parallel.artifacts if self.token_parallel else {}),
            **ours,
        }

    def forward(self, plan: StepPlan) -> Tensor:
        self.kernel_seconds = None
        if plan.phase != "decode" and self._watch.changed:
            self.decode_steps, self.verify_steps, self._watch = {}, {}, ModelGuard(self.model)
        if plan.layers:  # the compiled step is one kernel
            return self.prefill_executor.forward(plan)
        together = plan.num_draft_tokens > 0
        plan = plan.as_decode_rows(self.store.residual_length)
        if not plan.decode_only:
            return (
                self.prefill_executor.forward(plan)
                if plan.num_tokens > self.max_token_parallel_tokens
                else self._as_rows(plan)
            )
        count, steps = len(plan.spans), self.verify_steps if together else self.decode_steps
        rows = verify_bucket_for(count) if together else bucket_for(count + plan.padding_rows)
        if rows not in steps:
            steps[rows] = MlirStep(self.model, self.store, rows, together, self.threads)
            self._made += 1
        with torch.inference_mode():
            logits = steps[rows](plan)
            self.kernel_seconds = steps[rows].kernel_seconds
            # A slice where every sequence samples, which is nearly always: a selection would copy all logits.
            sampled = [row for row, span in enumerate(plan.spans) if span.num_logits]
            if len(sampled) == count:
                return logits[:count]
            return logits.index_select(0, torch.tensor(sampled, dtype=torch.int64))

    def _rows(self) -> TokenParallelExecutor:
        self.token_parallel = self.token_parallel or TokenParallelExecutor(
            self.model, self.store, TOKEN_PARALLEL_BUCKETS, self.threads
        )
        return self.token_parallel

    def _as_rows(self, plan: StepPlan) -> Tensor:
        few = self._rows()
        if (
            max(span.length for span in plan.spans) > few.max_tokens_per_call < TOKEN_PARALLEL_BUCKETS[-1]
        ):  # it would take many small calls
            return self.prefill_executor.forward(plan)
        logits, self.kernel_seconds = few.forward(plan), few.kernel_seconds
        return logits


def build_executor(
    model: Transformer,
    store: KVStore,
    backends: Backends,
    compile_unit: CompileUnit = "block",
    batch_invariant: bool = False,
    on_fallback: Callable[[str], None] = lambda why: None,
    threads: StepThreads | None = None,
) -> Executor:
    """Build the executor of `model`, whose modules are on `backends.blocks`, as `backends` were selected.

    Args:
        on_fallback: as in `FallbackExecutor`.
        threads: runs compiled steps.

    Raises:
        WorkbenchError: where `backends` have a compiled step, and the model or its cache cannot.
    """
    if batch_invariant:
        return TokenParallelExecutor(model, store, threads=threads)
    codecs = any(spec.codec for spec in store.specs)  # any Python, which no graph holds
    if model.device.type == "cuda" and model.backend is Backend.TRITON and not codecs:
        return CudaGraphExecutor(model, store)
    if model.backend is Backend.INDUCTOR:
        blocks: Executor = InductorExecutor(model, store, backends.attention, compile_unit)
    else:
        blocks = EagerExecutor(model, store)
    if backends.decode is not Backend.MLIR or backends.decodes_by_blocks:
        return blocks
    if not backends.checked:
        blocks = FallbackExecutor(model, blocks, lambda: EagerExecutor(model, store), on_fallback)
    return MlirExecutor(model, store, blocks, threads)


def with_eviction(
    model: Transformer,
    store: KVStore,
    backends: Backends,
    fast: Executor,
    evictor: Evictor | None,
    fell_back: Callable[[str], None] = lambda why: None,
) -> Executor:
    """Return an executor that runs steps on `fast`, and on the model's blocks the steps whose queries the evictor must
    see; without an evictor, `fast` itself.

    The blocks are compiled separately, so they get a `FallbackExecutor` of their own unless the backends were checked.
    `fell_back` is called with the reason if it falls back.
    """
    if evictor is None:
        return fast
    wanted = Requirements(uneven_heads=evictor.uneven)
    for backend in {backends.decode, backends.blocks, backends.attention} if evictor.uneven else ():
        if refusal := unsupported(backend, wanted):
            raise WorkbenchError(f"cache.evict: backend {str(backend)!r} {refusal}")
    seen, layers = observe_store(store)
    if model.backend is Backend.INDUCTOR:
        blocks: Executor = InductorExecutor(model, seen, backends.attention)
        if not backends.checked:
            blocks = FallbackExecutor(model, blocks, lambda: EagerExecutor(model, seen), fell_back)
    else:
        blocks = EagerExecutor(model, seen)
    return EvictingExecutor(fast, blocks, layers, evictor)


class FallbackExecutor:
    """Run `blocks`, and fall back to the eager modules with a warning if the first step fails there and not here.

    The step is then computed again, over the same slots of the cache. If both fail, nothing changes and the first error
    is raised. Results are not compared.
    """

    def __init__(
        self,
        model: Transformer,
        blocks: Executor,
        build_fallback: Callable[[], Executor],
        on_fallback: Callable[[str], None] = lambda why: None,
    ):
        """Wrap `blocks`.

        Args:
            model: the model.
            blocks: the executor to check.
            build_fallback: builds the eager executor.
            on_fallback: receives one line, the reason of the fallback.
        """
        self.model, self.executor, self._plain, self._fell_back = model, blocks, build_fallback, on_fallback
        self._vetted = False

    @property
    def compiles(self) -> int:
        return self.executor.compiles

    @property
    def kernel_seconds(self) -> float | None:
        return self.executor.kernel_seconds

    @property
    def artifacts(self) -> Mapping[str, str]:
        return self.executor.artifacts

    def forward(self, plan: StepPlan) -> Tensor:
        """Return logits as `Executor` does."""
        if self._vetted:
            return self.executor.forward(plan)
        try:
            logits = self.executor.forward(plan)
        except (WorkbenchError, BackendError):
            raise
        except COMPILER_ERRORS as error:
            logits = self._by_modules(plan, error)
        self._vetted = True
        return logits

    def _by_modules(self, plan: StepPlan, error: Exception) -> Tensor:
        """Compute the step by the eager modules and keep them if that works; raise `error` otherwise."""
        failed, blocks = self.model.backend, self.executor
        self.model.set_backend(Backend.EAGER)
        try:
            self.executor = self._plain()
            logits = self.executor.forward(plan)
        except BaseException as another:
            self.model.set_backend(failed)
            self.executor = blocks
            if isinstance(another, Exception):
                raise error from None
            raise
        words = " ".join(f"{type(error).__name__}: {error}".split())[:MAX_MESSAGE_CHARACTERS]
        message = f"{failed} does not compile here, prefill on eager ({words})"
        self._vetted = True
        self._fell_back(message)
        warnings.warn(f"backend auto: {message}", stacklevel=3)
        return logits
