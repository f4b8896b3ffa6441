"""A model on several ranks: the tokens of one process, within the bound of its arithmetic; the same bits as threads and
on each transport; and the end of each process."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_kernels import Backend, backend_problems
from tests.engine.invariant import ROW_BUCKETS
from tests.helpers.recorded import Recorded, Rows
from tests.patience import limit, until
from tests.tensor_parallel.bound import allowed
from tests.tensor_parallel.in_threads import runner_of_ranks
from tests.tensor_parallel.left_behind import MARK, LeftBehind
from tests.thorough import some
from workbench.engine.config import EngineConfig
from workbench.engine.loaded_model import LoadedModel
from workbench.engine.runner import Runner, generate
from workbench.errors import WorkbenchError
from workbench.experiment.build import requests_of, runner_for
from workbench.experiment.experiment import Experiment
from workbench.memory.ranks import rank_memories
from workbench.model.transformer import Transformer
from workbench.request import Request, SamplingParameters
from workbench.runs.record import Record
from workbench.tensor_parallel.executor import memory_of_ranks
from workbench.tensor_parallel.processes import LOOPBACK, RankProcesses
from workbench.tensor_parallel.rows import RankRows
from workbench.tensor_parallel.transformer import TensorParallelTransformer
from workbench.testing.family_checkpoints import CONFIGS, random_checkpoint
from workbench.trace.events import Finished

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "key/value heads fewer than ranks, tied": ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "mixture": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "latent": ("deepseek_v3", CONFIGS["deepseek_v3"][0]),
    "windows and norms after": ("gemma2", {"head_dim": 24, "query_pre_attn_scalar": 20, "sliding_window": 7}),
    "norms over all heads": ("olmo2", {}),
    "ALiBi": ("bloom", {}),
}
TRANSPORTS = ("shared_memory", "gloo")


# Small pages, small steps and few pages: prompts are cut, pages copied at forks, requests preempted.
SMALL: dict[str, Any] = {
    "page_size": 4, "pages": 24, "max_num_batched_tokens": 16, "max_num_seqs": 4, "prefix": {"kind": "radix"},
}  # fmt: skip


def settings(**changes: Any) -> dict[str, Any]:
    return {"backend": "eager", "dtype": "float32", **SMALL, **changes}


@pytest.fixture
def closing() -> Iterator[list[Runner]]:
    """Runners whose processes end with the test."""
    runners: list[Runner] = []
    yield runners
    for runner in runners:
        runner.close()


def run(runner: Runner, seed: int = 0) -> tuple[dict[str, tuple[int, ...]], Rows]:
    """Return the tokens of some requests, and the logits after each text that was sampled from."""
    recorded, draw = Recorded(runner), random.Random(seed)
    common = [draw.randrange(4, 100) for _ in range(9)]
    requests = [
        Request(f"r{number}", tuple(common + [draw.randrange(4, 100) for _ in range(number * 4)]),
                SamplingParameters(temperature=0, max_tokens=12, ignore_eos=True, n=1 + number % 2))
        for number in range(5)
    ]  # fmt: skip
    ends = generate(runner, requests)
    assert all(end.reason == "length" for end in ends.values()), {end.error for end in ends.values()}
    return {name: tuple(end.token_ids) for name, end in ends.items()}, recorded.rows


CASES = [
    *((case, Backend.EAGER) for case in FAMILIES),
    *((case, Backend.MLIR) for case in (
        "biases", "key/value heads fewer than ranks, tied", "mixture", "norms over all heads")),
]  # fmt: skip


@pytest.mark.parametrize(("case", "backend"), CASES)
def test_ranks_give_the_tokens_of_one_process(
    case: str, backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits are as near to those in float64 as the arithmetic of one process allows, and tokens are equal where the
    margin between the two best exceeds twice that. A step takes several calls of few rows; of some the first has all
    logits."""
    monkeypatch.setattr(RankRows, "SIZES", ROW_BUCKETS)
    if problem := backend_problems()[backend]:
        pytest.skip(f"backend {backend}: {problem}")
    pytest.importorskip("transformers", reason="transformers is not installed: pip install 'transformers>=5'")
    family, changes = FAMILIES[case]
    random_checkpoint(family, changes).save_pretrained(tmp_path)
    first = Runner(EngineConfig.build(tmp_path, **settings()))
    alone, plain = run(first)
    spec, state = first.model.spec, first.model.dense_state(torch.float32)
    with runner_of_ranks(spec, state, first.model.format, 2, backend, **SMALL) as shared:
        together, found = run(shared)
    wide = Transformer.from_state(spec, first.model.dense_state(torch.float64))
    exact = {text: wide.logits(list(text))[-1] for text in plain}
    bound = allowed(torch.stack(list(plain.values())), torch.stack(list(exact.values())))
    margins = [float(top[0] - top[1]) for top in (row.topk(2).values for row in exact.values())]
    assert min(margins) > 2 * bound, "draw another text: a tie decides here"
    assert together == alone and found.keys() == plain.keys()
    assert all((found[text] - exact[text]).abs().max() <= bound for text in exact)


@pytest.mark.processes
@pytest.mark.parametrize("transport", [pytest.param(TRANSPORTS[0], marks=pytest.mark.smoke), TRANSPORTS[1]])
def test_processes_have_the_bits_of_ranks_in_threads(transport: str, closing: list[Runner]) -> None:
    first = Runner(EngineConfig.build("shape:tiny", **settings()))
    closing.append(shared := Runner(EngineConfig.build("shape:tiny", **settings(tensor=2, transport=transport))))
    state = first.model.dense_state(torch.float32)
    with runner_of_ranks(first.model.spec, state, first.model.format, 2, Backend.EAGER, **SMALL) as in_threads:
        (tokens, rows), (others, found) = run(shared), run(in_threads)
    assert tokens == others and all(torch.equal(rows[text], found[text]) for text in rows)


@pytest.mark.processes
@pytest.mark.parametrize(("model", "changes"), [
    ("demo", {}), ("demo", {"weights": "int8"}),
    ("demo", {"weights": "int4", "weight_group": 32, "cache": {"format": "int8", "quant_group": 8}, "page_size": 8}),
])  # fmt: skip
def test_a_rank_holds_what_the_calculator_says(model: str, changes: dict[str, Any], closing: list[Runner]) -> None:
    """Within 3% of what each process has; and that is a share of the whole, but for norms, which all have."""
    size = 2
    closing.append(shared := Runner(EngineConfig.build(model, **settings(**changes, tensor=size))))
    alone = Runner(EngineConfig.build(model, **settings(**changes)))
    held = memory_of_ranks(shared.model, shared.store)  # type: ignore[arg-type]
    assert len(held) == size
    tokens = (alone.store.num_pages[0] + 1) * alone.store.page_size
    predicted = rank_memories(alone.model.spec, "float32", alone.model.format, shared.config.cache, tensor=size)
    for (weights, cache), rank in zip(held, predicted, strict=True):
        assert weights == pytest.approx(rank.memory.weight_bytes, rel=0.03)
        assert cache == pytest.approx(tokens * sum(part.bytes_per_token for part in rank.parts), rel=0.03)
        assert weights == pytest.approx(sum(p.nbytes for p in alone.model.parameters()) / size, rel=0.03)
        assert cache == pytest.approx(alone.store.bytes / size, rel=0.03)


@pytest.mark.processes
def test_two_runners_of_one_shared_model_have_pages_of_their_own(closing: list[Runner]) -> None:
    config = EngineConfig.build("shape:tiny", **settings(tensor=2))
    closing.append(first := Runner(config))
    second = Runner(config, first.loaded_model)
    before = run(first)[0]
    assert run(second, seed=1)[0] != before
    assert run(first)[0] == before  # its prefixes are still in the pages of all ranks
    assert isinstance(first.model, TensorParallelTransformer)
    with pytest.raises(WorkbenchError, match="only in the runner's steps"):
        first.model.logits([1, 2, 3])


@pytest.mark.processes
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_killed_rank_ends_the_request_with_its_reason_and_the_others(transport: str, closing: list[Runner]) -> None:
    changes = {"tensor": 4, "pages": 80, "transport": transport}
    closing.append(runner := Runner(EngineConfig.build("demo", **settings(**changes))))
    processes = runner.loaded_model.processes
    assert isinstance(processes, RankProcesses)
    events = runner.stream("def fib(n):", max_tokens=200, temperature=0, ignore_eos=True)
    for _ in range(20):
        next(events)
    processes.processes[1].kill()
    (last,) = (event for event in events if isinstance(event, Finished))
    assert "rank 2 ended (signal 9" in (last.error or "") and "load the model again" in (last.error or "")
    assert all(process.poll() is not None for process in processes.processes)
    (last,) = (event for event in runner.stream("again", max_tokens=2) if isinstance(event, Finished))
    assert "rank 2 ended" in (last.error or "")


@pytest.mark.processes
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_hangs_ends_the_request_in_time(transport: str, closing: list[Runner]) -> None:
    changes = {"tensor": 2, "rank_timeout": limit(0.1), "transport": transport}
    closing.append(runner := Runner(EngineConfig.build("shape:tiny", **settings(**changes))))
    processes = runner.loaded_model.processes
    assert isinstance(processes, RankProcesses)
    processes.processes[0].send_signal(signal.SIGSTOP)
    request = Request("one", (5, 6, 7), SamplingParameters(max_tokens=4, ignore_eos=True))
    (last,) = (event for event in runner.stream([request]) if isinstance(event, Finished))
    assert f"did not answer for {limit(0.1):g} s; load the model again" in (last.error or "")
    assert all(process.poll() is not None for process in processes.processes)


CODEC = "tests.engine.tiny:Halved"


def test_what_is_not_carried_out_is_refused_before_any_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    for changes, message in (
        ({"tensor": 3}, r"3 ranks cannot share target.*num_heads of 4 .* fit: 2, 4"),
        ({"tensor": 2, "backend": "inductor", "compile": "step"}, "not with compile: ranks compile block by block"),
        ({"tensor": 2, "batch_invariant": True}, "batch_invariant: backend 'eager' cannot keep it"),
        ({"tensor": 2, "backend": "triton"}, "backend 'triton'"),
        ({"tensor": 2, "offload": {"kind": "memory"}}, "parallel.tensor: not with cache.offload"),
        (
            {"tensor": 2, "evict": {"kind": "snapkv", "budget": 64}, "prefix": {"kind": "off"}},
            "parallel.tensor: not with cache.evict",
        ),
        ({"tensor": 2, "cache": {"codec": CODEC}}, "not with cache.codecs: a codec may read all heads"),
        ({"tensor": 2, "transport": "nccl"}, "with transport nccl and model.device cpu: nccl is for device: cuda"),
        ({"tensor": 2, "device": "cuda"}, "with transport shared_memory and model.device cuda"),
        ({"tensor": 0}, "parallel.tensor: Input should be greater than or equal to 1"),
    ):
        with pytest.raises(WorkbenchError, match=message):
            Runner(EngineConfig.build("demo", **settings(**changes)))
    if not torch.cuda.is_available():
        with pytest.raises(WorkbenchError, match="nccl: a CUDA device for each of 2 ranks, and here are 0; take"):
            Runner(EngineConfig.build("demo", **settings(tensor=2, transport="nccl", device="cuda")))
    one = LoadedModel.load(EngineConfig.build("demo", **settings()))
    with pytest.raises(WorkbenchError, match="give no model in memory"):
        Runner(EngineConfig.build("demo", **settings(tensor=2)), one)


@pytest.mark.processes
def test_a_model_that_ranks_cannot_load_is_an_error_of_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = LeftBehind()
    monkeypatch.setenv(MARK, left.mark)
    with pytest.raises(WorkbenchError):
        Runner(EngineConfig.build(tmp_path, tensor=2))
    assert not left.processes()


TORCHRUN = "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "--local-addr", "127.0.0.1"


@pytest.mark.processes
@pytest.mark.sampled(1)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_torchrun_starts_the_ranks(tmp_path: Path, transport: str) -> None:
    """Its processes join rank 0, which is the command line, and leave with it; the record is that of one process."""
    values = {"backend": "eager", "model.dtype": "float32", "sampling.temperature": "0", "sampling.max_tokens": "8",
              "parallel.tensor": "2", "parallel.transport": transport}  # fmt: skip
    left = LeftBehind()
    sets = [part for name, value in values.items() for part in ("--set", f"{name}={value}")]
    environment = left.environment | {"GLOO_SOCKET_IFNAME": LOOPBACK}
    command = [sys.executable, "-m", *TORCHRUN, "-m", "workbench", "run", "experiments/first_light.yaml", *sets]
    ran = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr
    until(lambda: not left.processes() and not left.names())
    (folder,) = (each for each in tmp_path.iterdir() if each.is_dir())
    record = Record.open(folder)
    plain = Experiment.from_yaml(record.experiment_text).with_("parallel.tensor=1")
    runner = runner_for(plain)
    ends = generate(runner, requests_of(plain, runner.tokenizer, runner.model.spec.vocab_size))
    found = {row["request_id"]: tuple(row["token_ids"]) for row in record.requests.to_pylist()}
    assert found == {name: tuple(end.token_ids) for name, end in ends.items()}


SCRIPT = """
import sys
import workbench
from workbench.request import Request, SamplingParameters
runner = workbench.load("shape:tiny", backend="eager", tensor=2, transport=sys.argv[1], report=lambda line: None)
request = Request("one", (1, 2, 3), SamplingParameters(max_tokens=50))
print("loaded", flush=True)
while True:
    for event in runner.stream([request]):
        print("an event", flush=True)
"""


@pytest.mark.processes
def test_nothing_is_left_after_any_kill(tmp_path: Path) -> None:
    """Kills at random moments, of rank 0 or of the other, while they load and while they compute, on both
    transports: no process of any name and nothing in /dev/shm. Moments are counted in looks and events, not seconds."""
    draw = random.Random(1)
    for number in some(range(10), 4):
        left = LeftBehind()
        command = [sys.executable, "-c", SCRIPT, TRANSPORTS[number % 4 // 2]]
        with (said := tmp_path / f"{number}").open("wb") as errors:
            first = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=left.environment)
        assert first.stdout is not None
        until(lambda: len(left.processes()) > 1, lambda: first.poll() is None)  # noqa: B023 (called in this round)
        if number % 3:
            assert first.stdout.readline() == b"loaded\n", said.read_text()
            assert all(first.stdout.readline() == b"an event\n" for _ in range(draw.randrange(200)))
        for _ in range(draw.randrange(40)):
            left.processes()
        if number % 2:
            for other in set(left.processes()) - {first.pid}:
                os.kill(other, signal.SIGKILL)
            # Its requests end with an error; so does the next load of a script that began while it loaded.
            for _ in range(draw.randrange(20)):
                left.processes()
        first.send_signal(draw.choice([signal.SIGKILL, signal.SIGTERM]))
        first.wait()
        first.stdout.close()
        until(lambda: not left.processes())  # noqa: B023
        until(lambda: not left.names())  # noqa: B023
