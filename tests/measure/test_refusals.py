"""A mistake in what is to be measured is refused in one line that says where, and leaves no folder."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

import workbench
from tests.helpers.refusals import refuses
from tests.measure import small
from tests.measure.small import asked
from workbench.bench.model import BenchCase, run_repetition, standard_cases, step_token_budget
from workbench.cli.quality import parse_variant
from workbench.engine.loaded_model import BUNDLED_MODELS
from workbench.experiment.build import runner_for
from workbench.experiment.experiment import Experiment
from workbench.kv_cache.pages import KVCacheGroup
from workbench.machine.ceilings import measure_gemm_rate, measure_read_bandwidth
from workbench.measure.prefill_interference import PrefillInterferenceWorkload, run_interference_round
from workbench.measure.quality.copying import generate_snippets
from workbench.measure.quality.teacher_forcing import ForcedText, score_texts
from workbench.measure.run import run
from workbench.measure.streaming import run_streaming_round
from workbench.memory.capacity import split_budget_into_pages
from workbench.prompt.tokenization.tokenizer import Tokenizer

RUN, QUALITY, SIMULATED, PROCESSES, AGENT, TINY = (
    small.RUN, small.QUALITY, small.SIMULATED, small.PROCESSES, small.AGENT, small.TINY,
)  # fmt: skip
ROWS = (
    (RUN, "model.name=demmo", "no model 'demmo'"),
    (RUN, "backend=egaer", "unknown backend"),
    (RUN, "model.device=cdua", "device 'cdua'"),
    (RUN, "model.name=shape:tiny", "workload.prompts: model 'shape:tiny' has no tokenizer"),
    (TINY, "measure.rounds=2", "measure.rounds"),
    (QUALITY, "variants={x: {cache.fromat: int8}}", "variants.x: cache.fromat: unknown key; did you mean 'format'"),
    (QUALITY, "variants={x: {question.a: 1}}", "variants.x.question.a: question is a value"),
    (QUALITY, "model={name: 'shape:tiny'}", "has no tokenizer"),
    (QUALITY, "workload.texts=[nowhere.py]", "nowhere.py: cannot be read"),
    (QUALITY, "workload.decode=2000", "must be below the model's context of 1024"),
    (QUALITY, "workload.speed={contexts: [1020]}", "exceed the model's context"),
    (QUALITY, "workload.context=99999", "workload.context 99999: above the model's own"),
    (QUALITY, "judge={path: 'unknown.module:it'}", "unknown.module cannot be imported"),
    (SIMULATED, "sampling.n=2", "2 samples or beams; a simulated request has one"),
    (SIMULATED, "sampling.beams=3", "3 samples or beams"),
    (SIMULATED, "batch_invariant=true", "a simulation computes no logits"),
    (SIMULATED, "schedule.overflow=cut_oldest", "overflow: cut_oldest is not simulated"),
    (SIMULATED, "schedule.preemption_mode=offload", "preemption_mode: offload is not simulated"),
    (SIMULATED, "executor.hardware=h1000", "no hardware 'h1000'; did you mean 'h100'"),
    (SIMULATED, "executor.router=fastest", "executor.router"),
    (SIMULATED, "model.name=shape:llama-3.1-70b",
     "131 GiB of weights on 1 x h100 with 74.5 GiB each; set more gpus"),
    (SIMULATED, "executor.gpus=3",
     "executor.gpus: 3 ranks cannot share llama-3.1-8b: layer 0: its num_heads of 32 is no"),
    (SIMULATED, "executor.pipeline=40", "pipeline 40: llama-3.1-8b has 32 layers"),
    (SIMULATED, "parallel.tensor=2",
     "parallel.tensor 2: a simulated instance has executor.gpus 1; remove parallel.tensor"),
    (SIMULATED, "speculate={kind: prompt_lookup}", "a simulation does not know which drafts are accepted"),
    (SIMULATED, "cache.offload=memory", "evict and offload are not simulated"),
    (SIMULATED, "executor.steps=nowhere", "no such folder"),
    (SIMULATED, "executor.failures=[{instance: 1, at: 0}]", "there are 0 to 0"),
    (SIMULATED, "workload.trace=nowhere.csv", "cannot be read"),
    (TINY, "sweep={axes: {cache.pages: [9]}}", "sweep: is run by `workbench sweep`; remove it from this experiment"),
    (PROCESSES, "executor.failures=[{instance: 2, at: 1}]", "instance 2; there are 0 to 1"),
    (PROCESSES, "executor.failures=[{instance: 0, at: 1, down: 3}]", "down"),
    (PROCESSES, "executor={kind: processes, router: prefix_aware, decode: {}}",
     "executor.router: prefix_aware; pools choose"),
    (PROCESSES, "executor={kind: processes, decode: {router: round_robin}}",
     "executor.decode.router: round_robin; pools"),
    (PROCESSES, "workload.arrivals={kind: closed_loop, clients: 2}",
     "closed_loop; a fleet of processes needs requests with"),
    (PROCESSES, "workload={kind: quality}", "kind quality is for one engine"),
    (PROCESSES, "measure.predict=true", "does not predict fleets; remove it and set `executor.predict`"),
    (PROCESSES, "variants={a: {}, b: {executor: {kind: real}}}", "kind real in one variant and processes in others"),
    (PROCESSES, "sampling.n=2", "2 samples or beams"),
    (AGENT, "workload.questions=[]", "workload"),
    (AGENT, "workload.questions={path: 'tests.measure.test_agent:not_questions'}",
     "returned a str, must return AgentQuestion"),
    (AGENT, "workload.tools=['nowhere:at_all']", "nowhere"),
    (AGENT, "workload.tool_choice=serach", "tool_choice"),
    (AGENT, "workload.limits.rounds=0", "limits.rounds"),
    (small.STREAMING, "model.name=shape:tiny", "has no tokenizer"),
    (small.SPECULATION, "workload.prompt_tokens=1020", "exceed the model's context of 1024"),
    (small.PREFIX, "workload.prefix_tokens=300", "context of 256"),
    (small.INTERFERENCE, "workload.output_tokens=4", "output_tokens 4: must be above `after`, 4"),
    (small.DETERMINISM, "workload.prompts=['def f(']", "has no tokenizer; give a number of random prompts"),
)  # fmt: skip


@pytest.mark.parametrize(("text", "change", "words"), ROWS, ids=[f"{row[1]}" for row in ROWS])
def test_an_experiment_is_refused_and_leaves_no_folder(text: str, change: str, words: str, tmp_path: Path) -> None:
    refuses(re.escape(words), lambda: run(asked(text, change), tmp_path, "wrong", progress=False))
    assert list(tmp_path.iterdir()) == []


def interfering(long_tokens: int, seqs: int) -> object:
    made: Experiment = asked(small.INTERFERENCE, "variants={}", f"workload.long_tokens={long_tokens}",
                             f"schedule.max_num_seqs={seqs}")  # fmt: skip
    assert isinstance(made.workload, PrefillInterferenceWorkload)
    return run_interference_round(runner_for(made), made.workload, 1)


def streaming() -> object:
    long = asked(small.STREAMING).variant("stream").with_("workload.prompt_tokens=5000")
    return run_streaming_round(runner_for(asked(small.STREAMING)), long, 0)


CALLS: tuple[tuple[Callable[[], object], str], ...] = (
    (lambda: parse_variant("int8"), "write PATH=VALUE"),
    (lambda: parse_variant("a='b"), "No closing quotation"),
    (lambda: measure_read_bandwidth(3), "working set of 3 bytes"),
    (lambda: measure_read_bandwidth(64, threads=0), "threads 0"),
    (lambda: measure_gemm_rate("int8", (2, 8, 4)), "int8"),
    (lambda: measure_gemm_rate("float33", (2, 8, 4)), "float33"),
    (lambda: measure_gemm_rate("float32", (1, 0, 1)), "GEMM shape"),
    (lambda: step_token_budget((BenchCase("prefill", 1, 100, prompt=64),)), "depth 100: must be a multiple of 64"),
    (lambda: step_token_budget((BenchCase("decode", 64, 0, prompt=64),)), "batch 64: must be below 64"),
    (lambda: run_repetition(tiny(), BenchCase("prefill", 1, 0, prompt=4000), 0), "leave no room in a context of 256"),
    (lambda: split_budget_into_pages((KVCacheGroup((0,)),), (10,), 49, 64, 16, 16),
     "holds no sequence of 64 tokens: one takes 50"),
    (lambda: interfering(200, 2), "3 requests did not run at once"),
    (lambda: interfering(500, 8), "long: "),
    (streaming, "5000 prompt tokens"),
    (lambda: score_texts(tiny(), [ForcedText((1,) * 300, 1, 299)], lambda *_: None), "text 0 of 300 tokens: "),
    (lambda: generate_snippets(cast(Any, Tokenizer.from_folder(BUNDLED_MODELS["demo"])), 1, 60,
                               (0.0,), seed=0), "are too short"),
)  # fmt: skip


def tiny() -> workbench.Runner:
    return workbench.load("shape:tiny", backend="eager")


@pytest.mark.parametrize(("call", "words"), CALLS, ids=[row[1] for row in CALLS])
def test_a_call_is_refused(call: Callable[[], object], words: str) -> None:
    refuses(re.escape(words), call)


def test_a_step_of_prefill_begins_at_every_depth() -> None:
    assert step_token_budget(standard_cases()) == 512
    assert step_token_budget((BenchCase("prefill", 1, 128, prompt=64),)) == 64
