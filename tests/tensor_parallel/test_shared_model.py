"""A model on several processes: the tokens of one, within the bound of its arithmetic; and the end of each process."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_kernels import Backend, backend_problems
from tests.patience import until
from workbench.engine.config import EngineConfig
from workbench.engine.loaded_model import LoadedModel
from workbench.engine.runner import Runner, generate
from workbench.errors import WorkbenchError
from workbench.executors.base import Executor
from workbench.request import Request, SamplingParameters
from workbench.scheduler.plan import StepPlan
from workbench.tensor_parallel.transformer import TensorParallelTransformer
from workbench.testing.family_checkpoints import CONFIGS, random_checkpoint
from workbench.trace.events import Finished

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "key/value heads fewer than ranks, tied": ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "mixture": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "latent": ("deepseek_v3", CONFIGS["deepseek_v3"][0]),
    "windows and norms after": ("gemma2", {"head_dim": 24, "query_pre_attn_scalar": 20, "sliding_window": 7}),
}
MODULE = "workbench.engine.rank_process"


def settings(**changes: Any) -> dict[str, Any]:
    """Small pages, small steps and few pages: prompts are cut, pages copied at forks, requests preempted."""
    values = {"backend": "eager", "dtype": "float32", "page_size": 4, "pages": 24, "max_num_batched_tokens": 16,
              "max_num_seqs": 4, "prefix": {"kind": "radix"}}  # fmt: skip
    return {**values, **changes}


@pytest.fixture
def closing() -> Iterator[list[Runner]]:
    """Runners whose processes end with the test."""
    runners: list[Runner] = []
    yield runners
    for runner in runners:
        runner.close()


class Recorded:
    """An executor, and the logits that it gave."""

    def __init__(self, executor: Executor):
        self.executor, self.compiles, self.kernel_seconds, self.artifacts = executor, 0, None, {}
        self.steps: list[Tensor] = []

    def forward(self, plan: StepPlan) -> Tensor:
        self.steps.append(self.executor.forward(plan).clone())
        return self.steps[-1]


def run(runner: Runner) -> tuple[dict[str, tuple[int, ...]], list[Tensor]]:
    recorded = Recorded(runner.executor)
    runner.set_executor(recorded)
    draw = random.Random(0)
    common = [draw.randrange(4, 100) for _ in range(9)]
    requests = [
        Request(f"r{number}", tuple(common + [draw.randrange(4, 100) for _ in range(number * 4)]),
                SamplingParameters(temperature=0, max_tokens=12, ignore_eos=True, n=1 + number % 2))
        for number in range(5)
    ]  # fmt: skip
    ends = generate(runner, requests)
    return {name: tuple(end.token_ids) for name, end in ends.items()}, recorded.steps


CASES = [*((case, "eager") for case in FAMILIES), ("biases", "mlir"), ("mixture", "mlir")]


@pytest.mark.parametrize(("case", "backend"), CASES)
def test_a_shared_model_gives_the_tokens_of_one_process(
    case: str, backend: str, tmp_path: Path, closing: list[Runner]
) -> None:
    if problem := backend_problems()[Backend(backend)]:
        pytest.skip(f"backend {backend}: {problem}")
    pytest.importorskip("transformers", reason="transformers is not installed: pip install 'transformers>=5'")
    family, changes = FAMILIES[case]
    random_checkpoint(family, changes).save_pretrained(tmp_path)
    alone, rows = run(Runner(EngineConfig.build(tmp_path, **settings())))
    closing.append(shared := Runner(EngineConfig.build(tmp_path, **settings(tensor=2, backend=backend))))
    together, found = run(shared)
    # 2**-17 of the largest logit is 64 times the rounding of float32; a mistake is near 1.
    bound = 2**-17 * max(1.0, *(float(row.abs().max()) for row in rows if len(row)))
    margins = torch.cat([row.topk(2).values for row in rows])
    assert float((margins[:, 0] - margins[:, 1]).min()) > 2 * bound, "draw another text: a tie decides here"
    assert together == alone and len(found) == len(rows)
    assert all((mine - right).abs().max() <= bound for mine, right in zip(found, rows, strict=True) if len(right))


def test_a_rank_holds_its_share_of_weights_and_cache(closing: list[Runner]) -> None:
    """Within 3%, of all that is cut; norms are whole everywhere."""
    alone = Runner(EngineConfig.build("demo", **settings()))
    closing.append(shared := Runner(EngineConfig.build("demo", **settings(tensor=2))))
    assert shared.store.bytes == alone.store.bytes / 2
    weights = [sum(p.nbytes for p in runner.model.parameters()) for runner in (alone, shared)]
    assert weights[0] / 2 <= weights[1] <= 1.03 * weights[0] / 2
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in shared.model.parameters()}
    assert sum(storages.values()) <= 1.03 * weights[0] / 2  # not views of something larger


def test_a_killed_rank_ends_the_request_with_its_reason_and_the_others(closing: list[Runner]) -> None:
    closing.append(runner := Runner(EngineConfig.build("demo", **settings(tensor=4, pages=80))))
    processes = runner._loaded.processes
    assert processes is not None
    events = runner.stream("def fib(n):", max_tokens=200, temperature=0, ignore_eos=True)
    for _ in range(20):
        next(events)
    processes.processes[1].kill()
    (last,) = (event for event in events if isinstance(event, Finished))
    assert "rank 2 ended (signal 9), and so were the others; load the model again" in (last.error or "")
    assert all(process.poll() is not None for process in processes.processes)
    (last,) = (event for event in runner.stream("again", max_tokens=2) if isinstance(event, Finished))
    assert "rank 2 ended" in (last.error or "")


def test_what_is_not_carried_out_is_refused_before_any_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    for changes, message in (
        ({"tensor": 3}, r"3 ranks cannot share target.*num_heads of 4 .* fit: 2, 4"),
        ({"tensor": 2, "backend": "inductor"}, "backend 'inductor' cannot be shared by ranks: 2 ranks: its graphs"),
        ({"tensor": 2, "batch_invariant": True, "backend": "auto"}, "batch_invariant: backend 'mlir' cannot be shared"),
        ({"tensor": 2, "offload": {"kind": "memory"}}, "parallel.tensor: 2 ranks beside cache.offload"),
        ({"tensor": 0}, "parallel.tensor: Input should be greater than or equal to 1"),
    ):
        with pytest.raises(WorkbenchError, match=message):
            Runner(EngineConfig.build("demo", **settings(**changes)))
    one = LoadedModel.load(EngineConfig.build("demo", **settings()))
    with pytest.raises(WorkbenchError, match="give no model in memory"):
        Runner(EngineConfig.build("demo", **settings(tensor=2)), one)


def test_a_model_that_ranks_cannot_load_is_an_error_of_loading(tmp_path: Path) -> None:
    with pytest.raises(WorkbenchError):
        Runner(EngineConfig.build(tmp_path, tensor=2))
    assert not children(os.getpid())


def test_outside_of_steps_a_shared_model_says_so(closing: list[Runner]) -> None:
    closing.append(runner := Runner(EngineConfig.build("demo", **settings(tensor=2))))
    assert isinstance(runner.model, TensorParallelTransformer)
    with pytest.raises(WorkbenchError, match="in the runner's steps alone"):
        runner.model.logits([1, 2, 3])


def children(parent: int) -> list[int]:
    """Return the processes that run a rank of `parent`."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().decode().split("\0") if entry.name.isdigit() else []
            status = (entry / "status").read_text() if MODULE in words else ""
        except OSError:
            continue
        if f"PPid:\t{parent}\n" in status:
            found.append(int(entry.name))
    return found


SCRIPT = """
import workbench
from workbench.request import Request, SamplingParameters
runner = workbench.load("shape:tiny", backend="eager", tensor=2, report=lambda line: None)
request = Request("one", (1, 2, 3), SamplingParameters(max_tokens=50))
print("loaded", flush=True)
while True:
    for event in runner.stream([request]):
        pass
    print("again", flush=True)
"""


def test_nothing_is_left_after_any_kill() -> None:
    """Ten kills at random moments, of rank 0 or of the other: no process and nothing in /dev/shm."""
    draw, before = random.Random(1), set(os.listdir("/dev/shm"))
    for number in range(10):
        first = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert first.stdout is not None
        until(lambda: children(first.pid), lambda: first.poll() is None)  # noqa: B023 (called within this round)
        if number % 3:
            assert first.stdout.readline() == b"loaded\n"
        (other,) = children(first.pid)
        time.sleep(draw.random() * 0.3)
        if number % 2:
            os.kill(other, signal.SIGKILL)
            # Its requests end with an error; so does the next load of a script that began while it loaded.
            time.sleep(draw.random() * 0.1)
            first.kill()
        else:
            first.kill()
        first.wait()
        first.stdout.close()
        until(lambda: not Path(f"/proc/{other}").exists() or zombie(other))  # noqa: B023
    assert {name for name in os.listdir("/dev/shm") if "workbench" in name} <= before


def zombie(process: int) -> bool:
    """Return whether a process has ended and waits for the system's first process to notice."""
    try:
        return "State:\tZ" in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return True
