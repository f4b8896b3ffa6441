"""The inductor backend: compilation that is bounded and counted. More of its rows: tests/laws."""

from __future__ import annotations

import pytest

from compiled_kernels import Backend, backend_problems
from tests.engine.tiny import Oracle, finals, layer, model_of, request, runner_of, spec_of
from tests.thorough import THOROUGH
from workbench.engine.runner import Runner, generate
from workbench.executors.packing import DECODE_BUCKETS, bucket_for
from workbench.inspect.forward_pass import ForwardPass
from workbench.request import Request, SamplingParameters
from workbench.trace.events import Decoded
from workbench.widgets import TokenPath

BUCKETS = len([rows for rows in DECODE_BUCKETS if rows <= 4])
KINDS = (layer(4, 2, sliding_window=5, bias=True), *([layer(4, 2, bias=True)] if THOROUGH else []))
# For each kind of layer two sides, the reads of one decode and of several beside a prefill, and a block a bucket;
# a head a bucket.
GRAPHS = len(KINDS) * (2 + 2 + BUCKETS) + BUCKETS

problem = backend_problems()[Backend.INDUCTOR]


def test_buckets() -> None:
    assert [bucket_for(rows) for rows in (1, 2, 3, 16, 33, 64, 65, 129)] == [1, 2, 4, 16, 64, 64, 128, 192]
    assert all(bucket_for(rows) >= rows for rows in range(1, 300))


@pytest.mark.skipif(problem is not None, reason=f"inductor backend: {problem}; install a compiler to run this")
def test_compiled_rows_are_the_oracles_and_graphs_are_bounded() -> None:
    """Three decodes are padded to a bucket of four; layers have biases, and a window."""
    spec = spec_of(KINDS[0], KINDS[-1])
    runner = runner_of(model_of(spec, backend=Backend.INDUCTOR), max_num_seqs=3)
    executor = runner.core.executor
    Oracle(runner)
    asked = [request("a", 5, 12), request("b", 19, 4), request("c", 3, 7)]
    generate(runner, asked)
    before = runner.core.executor.compiles
    assert 0 < before <= GRAPHS
    generate(runner, asked)
    assert runner.core.executor.compiles == before, "the same work again adds no graph"
    assert not executor._guard.changed, "nor does it change the model"  # type: ignore[union-attr]
    generate(runner, [request("d", 11, 9), request("e", 30, 6), request("f", 7, 3)])
    assert runner.core.executor.compiles <= GRAPHS, "new lengths must not compile anew"
    again = runner_of(model_of(spec, seed=1, backend=Backend.INDUCTOR), max_num_seqs=3)
    Oracle(again)
    generate(again, [request("a", 5, 12), request("b", 19, 4), request("c", 3, 7)])
    path = TokenPath(again, asked[0].prompt_ids, section="ablation", max_tokens=12, temperature=0, ignore_eos=True)
    path.wait()
    assert path.continuations()[0] == finals(again, asked)["a"], "the text that it continues is the served one"
    _is_followed(path.forward_pass, again)
    path.close()
    assert again.core.executor.compiles == 0, "a model alike must share what is compiled"


def _is_followed(found: ForwardPass, runner: Runner) -> None:
    """Assert that a recorded pass has the log probabilities of the compiled step, within what its type rounds."""
    asked = Request("seen", found.token_ids, SamplingParameters(max_tokens=1, temperature=0, logprobs=5))
    (event,) = (each for each in runner.stream([asked]) if isinstance(each, Decoded))
    exact = found.values("logits")[-1].double().log_softmax(-1)
    assert all(abs(logprob - float(exact[token])) < 1e-4 for token, logprob in event.top_logprobs)
    assert len(event.top_logprobs) == 5


@pytest.mark.skipif(problem is not None, reason=f"inductor backend: {problem}; install a compiler to run this")
def test_a_whole_step_is_one_graph() -> None:
    spec = spec_of(layer(4, 2, sliding_window=5), *([layer(4, 2)] if THOROUGH else []))
    runner = runner_of(model_of(spec, backend=Backend.INDUCTOR), compile="step")
    Oracle(runner)
    generate(runner, [request("a", 5, 3)])
    before = runner.core.executor.compiles
    generate(runner, [request("b", 9, 12)])
    assert runner.core.executor.compiles == before
    block = runner_of(model_of(spec, backend=Backend.INDUCTOR))
    generate(block, [request("a", 5, 3)])
    assert block.core.executor.compiles > 0, "blocks are other graphs than the whole step"
