"""The decode backend of `auto`: the quickest that is right, remembered only where nothing disturbed the trial."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_kernels import Backend, backend_problems, rounds
from compiled_kernels.correct_backend import CorrectBackend
from compiled_kernels.masks import Causal
from compiled_kernels.result_cache import ResultCache
from tests.engine.tiny import VOCAB, layer, model_of, spec_of
from tests.thorough import tries
from workbench.batch import TokenBatch
from workbench.errors import WorkbenchError
from workbench.executors import autotune as trial
from workbench.executors import layout
from workbench.executors.build import CompileUnit
from workbench.executors.packing import pack_batch
from workbench.executors.programs.decode_step import MlirStep
from workbench.executors.reference import CacheLayout
from workbench.executors.select import Backends
from workbench.kv_cache.format import CacheFormat
from workbench.model.memory import cache_shapes
from workbench.model.quantized import WeightFormat
from workbench.model.spec import ModelSpec

BOTH = Backends(Backend.MLIR, Backend.INDUCTOR, Backend.MLIR, "auto")
SPEC, DENSE = spec_of(), WeightFormat()


class Clock:
    """Stands for the time module; executors move it on."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Timed:
    """A runner of eager steps, at the clock's pace, and wrong: `spoil` changes its rows, `change` its batch before it
    computes them, and where it is `blind` its layers have no windows."""

    def __init__(self, model, store, clock: Clock, seconds: float, spoil=None, change=None, blind: bool = False):
        self.model, self.store = model, store
        self.clock, self.seconds, self.blind = clock, seconds, blind
        self.spoil, self.change = spoil or (lambda rows: rows), change or (lambda batch: batch)

    def forward(self, plan):
        self.clock.now += self.seconds
        batch = self.change(pack_batch(plan, self.store.page_size, self.model.device))
        with pytest.MonkeyPatch.context() as patch:
            for block in self.model.blocks if self.blind else ():
                patch.setattr(block.attention, "mask", Causal())
            return self.spoil(self.model(batch, self.store))


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    kept = ResultCache(tmp_path / "backends.json")

    def run(
        mlir: float = 1.0,
        eager: float = 2.0,
        inductor: float = 1.5,
        model=None,
        unit: CompileUnit = "block",
        fails=(),
        **bad,
    ) -> Backends:
        clock = Clock()
        model = model or model_of(spec_of(layer(4, 2), layer(4, 2, sliding_window=5)))
        run.compiled = []

        def build_step_runner(model, store, backends, unit):
            run.compiled.append(backends.decode)
            if backends.decode in fails:
                raise fails[backends.decode]
            if backends.decode is Backend.MLIR:
                return Timed(model, store, clock, mlir, **bad)
            return Timed(model, store, clock, inductor)

        monkeypatch.setattr(trial, "build_step_runner", build_step_runner)
        monkeypatch.setattr(trial, "StepRunner", lambda program: Timed(program.model, program.store, clock, eager))
        monkeypatch.setattr(rounds, "time", clock)
        monkeypatch.setattr(
            trial, "first_correct_backend", lambda operator, arguments, backends: CorrectBackend(backends[0], "as set")
        )
        return trial.autotune_backend(BOTH, model, 4, unit, kept)

    return run, kept


def test_the_first_that_is_right_decodes_and_no_other_is_compiled(tried) -> None:
    run, _ = tried
    backends = run(mlir=0.001, eager=0.002, inductor=0.0001)
    assert (backends.decode, backends.blocks, backends.checked) == (Backend.MLIR, Backend.INDUCTOR, False)
    assert run.compiled == [Backend.MLIR]
    untried = "inductor not tried: mlir is right, no slower than eager, and compiled already"
    message = f"auto: a decode step takes mlir 1 ms, eager 2 ms, {untried}; attention of a prefill as set"
    assert backends.reason == message


@pytest.mark.parametrize(
    ("mlir", "inductor", "unit", "chosen", "compiled"),
    [
        (3.0, 1.5, "block", Backend.INDUCTOR, [Backend.MLIR, Backend.INDUCTOR]),
        (3.0, 9.0, "step", Backend.EAGER, [Backend.MLIR, Backend.INDUCTOR]),
        (2.2, 1.5, "block", Backend.MLIR, [Backend.MLIR]),  # a little slower is not clearly slower
    ],
)
def test_the_next_where_the_modules_as_written_are_clearly_quicker(tried, mlir, inductor, unit, chosen, compiled):
    run, _ = tried
    found = run(mlir=mlir, eager=2.0, inductor=inductor, unit=unit)
    assert (found.decode, run.compiled) == (chosen, compiled) and (found.checked or chosen != Backend.INDUCTOR)


def in_order(batch: TokenBatch) -> TokenBatch:
    """As if pages were handed out in order."""
    tables = tuple(torch.arange(1, table.shape[1] + 1, dtype=table.dtype)[None] for table in batch.page_tables)
    return replace(batch, page_tables=tables)


WRONG: dict[str, dict[str, Any]] = {
    "reads other pages": {"change": in_order},
    "reads a key less": {"change": lambda batch: replace(batch, context_lengths=batch.context_lengths - 1)},
    "writes elsewhere": {
        "change": lambda batch: replace(batch, slot_mapping=tuple(slots + 1 for slots in batch.slot_mapping))
    },
    "reads another token": {"change": lambda batch: replace(batch, token_ids=(batch.token_ids + 1) % VOCAB)},
    "has no windows": {"blind": True},
    "is not a number": {"spoil": lambda rows: rows * torch.nan},
    "is slightly wrong": {"spoil": lambda rows: rows * 1.001},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_backend_that_is_wrong_is_not_chosen(tried, wrong: str, dtype: torch.dtype) -> None:
    run, kept = tried
    model = model_of(spec_of(layer(4, 2), layer(4, 2, sliding_window=5)), dtype=dtype)
    assert run(model=model).decode == Backend.MLIR, "as it is it is right"
    kept.file.unlink()
    backends = run(model=model, **WRONG[wrong])
    if wrong == "is slightly wrong" and dtype == torch.bfloat16:
        assert backends.decode == Backend.MLIR, "a thousandth is rounding there"
        return
    assert backends.decode == Backend.INDUCTOR
    assert "mlir not chosen: its logits are" in backends.reason and "is allowed" in backends.reason


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (WorkbenchError("not for this model"), "not for this model"),
        (RuntimeError("LLVM ERROR:\n  out of luck"), "RuntimeError: LLVM ERROR: out of luck"),
    ],
)
def test_a_backend_that_fails_is_not_chosen(tried, error: Exception, message: str) -> None:
    run, _ = tried
    backends = run(fails={Backend.MLIR: error})
    assert backends.decode == Backend.INDUCTOR and f"mlir not chosen: {message}" in backends.reason


def test_a_fault_of_our_own_is_raised(tried) -> None:
    run, kept = tried
    with pytest.raises(TypeError, match="two arguments, not three"):
        run(fails={Backend.MLIR: TypeError("two arguments, not three")})
    assert not kept.load()


def test_blocks_that_cannot_decode_do_not_prefill(tried) -> None:
    run, _ = tried
    backends = run(fails={backend: RuntimeError(f"{backend} broke") for backend in (Backend.MLIR, Backend.INDUCTOR)})
    assert (backends.decode, backends.blocks, backends.attention) == (Backend.EAGER, Backend.EAGER, Backend.EAGER)
    assert "eager 2 s, mlir not chosen: RuntimeError: mlir broke, inductor not chosen" in backends.reason
    assert "inductor not chosen: RuntimeError: inductor broke, prefill on eager" in backends.reason


def test_units_are_tried_each(tried) -> None:
    run, _ = tried
    assert run(unit="block").decode == Backend.MLIR
    assert run(mlir=9.0, unit="step").decode == Backend.INDUCTOR, "what was found for blocks says nothing of steps"
    assert run(mlir=9.0, unit="block").decode == Backend.MLIR


def test_it_is_tried_once_and_a_damaged_memory_is_made_anew(tried) -> None:
    run, kept = tried
    run(mlir=1.0, eager=2.0)
    assert run(mlir=9.0, eager=2.0).decode == Backend.MLIR, "remembered"
    entries = json.loads(kept.file.read_text())["entries"]
    for damage in ({"seconds": {"mlir": -1}}, {"chosen": "mlir", "seconds": {}, "refused": {}, "untried": {}}):
        kept.file.write_text(json.dumps({"entries": dict.fromkeys(entries, damage)}))
        assert run(mlir=9.0, eager=2.0).decode == Backend.INDUCTOR
    kept.file.write_text("{")
    assert run(mlir=1.0, eager=2.0).decode == Backend.MLIR


@pytest.mark.parametrize(("mlir", "eager", "kept"), [(9.0, 1.0, False), (1.0, 4.0, False), (1.0, 4.1, True)])
def test_a_disturbed_trial_is_remembered_only_beyond_contention(tried, monkeypatch, mlir, eager, kept: bool) -> None:
    """It never speaks against what is compiled."""
    run, results = tried
    monkeypatch.setattr(rounds, "_agree", lambda samples: False)
    assert run(mlir=mlir, eager=eager).decode == Backend.MLIR
    assert results.file.exists() == kept


@pytest.mark.parametrize("error", [MemoryError("none left"), OSError(28, "No space left"), ImportError("gone")])
def test_a_backends_passing_failure_is_not_remembered(tried, error: Exception) -> None:
    run, kept = tried
    assert run(fails={Backend.MLIR: error}).decode == Backend.INDUCTOR and kept.load() == {}
    assert run(fails={Backend.MLIR: RuntimeError("it broke")}).decode == Backend.INDUCTOR and len(kept.load()) == 1


def test_what_is_remembered_can_be_listed(tried, monkeypatch: pytest.MonkeyPatch) -> None:
    run, kept = tried
    run(mlir=0.5, eager=2.0)
    (entry,) = trial.remembered_autotune_results(kept)
    assert (entry["chosen"], entry["seconds"], entry["valid"]) == ("mlir", {"mlir": 0.5, "eager": 2.0}, True)
    assert entry["model"] == "tiny" and "already" in entry["untried"]["inductor"] and entry["date"][:2] == "20"
    with monkeypatch.context() as patch:  # by another rule
        patch.setattr(trial, "AUTOTUNE_VERSION", trial.AUTOTUNE_VERSION + 1)
        assert trial.remembered_autotune_results(kept)[0]["valid"] is False
    kept.file.write_text(kept.file.read_text().replace('"code": "', '"code": "other'))
    assert trial.remembered_autotune_results(kept)[0]["valid"] is False


seconds = st.floats(1e-4, 1e-1)


def timed(mlir: float, eager: float, disturbance: Callable[[], float]) -> rounds.RoundTimes:
    """Time two steps on a clock that they alone move."""
    now = [0.0]

    def step(takes: float) -> Callable[[], None]:
        def run() -> None:
            now[0] += takes + disturbance()

        return run

    return rounds.time_in_rounds({Backend.MLIR: step(mlir), Backend.EAGER: step(eager)}, clock=lambda: now[0])


@settings(max_examples=tries(200))
@given(seconds, seconds, st.randoms(use_true_random=False), st.floats(0.1, 1.0))
def test_a_busy_machine_never_makes_the_slower_of_two_look_clearly_quicker(quick, more, draw, free) -> None:
    """The first backend is at least as quick as eager; each of its steps is let alone with a chance of `free`."""
    found = [
        timed(quick, quick + more, lambda: 0 if draw.random() < free else draw.choice((0.004, 0.02, 0.1)))
        for _ in range(trial.MAX_TRIALS)
    ]
    assert not all(trial._slower(Backend.MLIR, each) for each in found)


@given(seconds, seconds)
def test_on_a_quiet_machine_a_trial_is_short_and_exact(one: float, other: float) -> None:
    found = timed(one, other, lambda: 0)
    assert found.is_stable and found.rounds == rounds.MIN_ROUNDS
    assert found.seconds == {Backend.MLIR: pytest.approx(one), Backend.EAGER: pytest.approx(other)}


@given(seconds, st.floats(1.0, 1000.0))
def test_a_hopeless_step_runs_once_and_its_time_is_its_own(one: float, ratio: float) -> None:
    now = [0.0]
    calls: dict[Backend, int] = {Backend.MLIR: 0, Backend.EAGER: 0}

    def step(backend: Backend, takes: float) -> Callable[[], None]:
        def run() -> None:
            calls[backend] += 1
            now[0] += takes

        return run

    steps = {backend: step(backend, takes) for backend, takes in zip(calls, (one, ratio * one), strict=True)}
    found = rounds.time_in_rounds(steps, clock=lambda: now[0], hopeless=trial.HOPELESS_RATIO)
    assert found.seconds == {Backend.MLIR: pytest.approx(one), Backend.EAGER: pytest.approx(ratio * one)}
    if ratio > trial.HOPELESS_RATIO * 1.01:
        assert calls[Backend.EAGER] == 1 and not found.is_stable and trial._far_faster(Backend.MLIR, found)
    elif ratio < trial.HOPELESS_RATIO * 0.99:
        assert calls[Backend.EAGER] > rounds.MIN_AGREEING_ROUNDS and found.is_stable


@pytest.mark.parametrize("mlir, inductor", [(200.0, 300.0), (200.0, 1.0)])
def test_a_candidate_that_is_hopeless_beside_eager_is_not_chosen(tried, mlir: float, inductor: float) -> None:
    run, kept = tried
    chosen = run(mlir=mlir, inductor=inductor, eager=2.0).decode
    assert chosen is (Backend.INDUCTOR if inductor < 2 else Backend.EAGER)
    assert len(kept.load()) == 1


@given(seconds, st.permutations([0.0] * 3 + [0.15] * 4))
def test_three_quiet_rounds_are_enough_whichever_they_are(quick: float, delays: list[float]) -> None:
    of_steps = iter([0.0, 0.0, *(delay for delay in delays for _ in range(2))])  # first the untimed ones
    found = timed(quick, quick, lambda: next(of_steps, 0.0))
    assert found.is_stable and found.seconds == dict.fromkeys(found.seconds, pytest.approx(quick))


COMPILED = pytest.mark.skipif(
    any(backend_problems()[backend] for backend in (Backend.INDUCTOR, Backend.MLIR)), reason="auto has one backend here"
)


@COMPILED
@pytest.mark.parametrize("fault", [0.0, 0.01])
def test_a_compiled_step_is_tried(fault: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing stands in for anything: a right step is chosen, one whose logits are off by a hundredth is not."""
    right = MlirStep.__call__
    monkeypatch.setattr(MlirStep, "__call__", lambda self, plan: right(self, plan) + fault)
    model = model_of(spec_of(layer(4, 2), layer(4, 2, sliding_window=5)))
    backends = Backends(Backend.MLIR, Backend.EAGER, Backend.EAGER, "auto")
    found = trial.autotune_backend(backends, model, 4, remembered=ResultCache(tmp_path / "backends.json"))
    if fault:
        assert found.decode is Backend.EAGER and "mlir not chosen: its logits are 0.01" in found.reason
    else:
        assert re.search(r"mlir [0-9.]+ [mµ]?s", found.reason) and "not chosen" not in found.reason


def test_one_backend_needs_no_trial() -> None:
    alone = Backends.uniform(Backend.EAGER, "auto")
    assert trial.autotune_backend(alone, model_of(spec_of()), 4) is alone


def keys_of(
    spec: ModelSpec = SPEC, format: WeightFormat = DENSE, dtype: torch.dtype = torch.float32, size: int = 4,
    cache: CacheFormat | None = None, cache_dtype: torch.dtype = torch.float32, backends: Backends = BOTH,
    unit: CompileUnit = "block",
) -> tuple[str, str]:  # fmt: skip
    """Return the keys of a trial of backends, and of one of layouts."""
    model: Any = SimpleNamespace(spec=spec, format=format, dtype=dtype)
    held = CacheLayout(cache_shapes(spec, cache), size, cache_dtype)
    return trial._key(model, backends, held, unit), layout.trial_key(model, held)


FORMATS = [
    WeightFormat.parse(*cast(Any, each))
    for each in (("int8",), ("int8", "dense"), ("int8", None, 64, "int8"), ("int4",), ("int4", None, 32),
                 ("dense", None, 64, "float", "int4"), ("dense", None, 32, "float", "int4"))
]  # fmt: skip


def test_what_a_trial_depends_on_is_in_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    both: list[dict[str, Any]] = [
        {}, {"spec": spec_of(tied=False)}, {"dtype": torch.float64}, {"cache_dtype": torch.bfloat16}, {"size": 8},
        {"cache": CacheFormat(format="int8")}, {"cache": CacheFormat(format="int4")},
        *({"format": format} for format in FORMATS),
    ]  # fmt: skip
    found = [keys_of(**each) for each in both]
    assert keys_of() == found[0]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    found.append(keys_of())
    for module in (trial, layout):
        monkeypatch.setattr(module, "machine_key", lambda: {"cpu": "another"})
    found.append(keys_of())
    assert [len(set(keys)) for keys in zip(*found, strict=True)] == [len(found)] * 2
    others = [
        {"unit": "step"},
        {"backends": replace(BOTH, decode=Backend.EAGER)},
        {"backends": replace(BOTH, blocks=Backend.EAGER)},
    ]
    assert len({keys_of(**each)[0] for each in ({}, *others)}) == 4
    monkeypatch.setattr(trial, "AUTOTUNE_VERSION", 99)
    assert keys_of()[0] != found[-1][0] and keys_of()[1] == found[-1][1]
