"""Recurrent layers in the engine: a state follows its sequence through chunks, batches, preemption, forks, prefix hits
and rejected drafts, and every row is the oracle's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_kernels import Backend
from tests.engine.guesses import Guesses, drafts, plain, tokens
from tests.engine.recurrent_models import CONV, HYBRID, models
from tests.engine.tiny import Oracle, every_tensor, finals, model_of, request, runner_of
from tests.helpers.recorded import Changed
from tests.thorough import tries
from workbench.engine.runner import generate
from workbench.errors import WorkbenchError
from workbench.executors.requirements import Requirements
from workbench.executors.select import select_backends
from workbench.request import Request


@settings(max_examples=tries(40))
@given(st.data())
def test_every_row_is_the_oracles(data: st.DataObject) -> None:
    """Pages that run out, chunks of any length, CPU pages, prefixes, samples, beams and drafts, in any combination."""
    model, seed = model_of(data.draw(models())), data.draw(st.integers(0, 2**31))
    draw = data.draw
    asked = [request(f"{seed}-{i}", draw(st.integers(1, 22)), draw(st.integers(1, 14))) for i in range(3)]
    asked.append(Request("again", asked[2].prompt_ids, asked[2].sampling))
    asked.append(Request("longer", (*asked[1].prompt_ids, *asked[0].prompt_ids[:5]), asked[1].sampling))
    asked.append(request(f"{seed}-many", draw(st.integers(1, 14)), 8, n=draw(st.integers(1, 3)), temperature=0.8))
    if draw(st.booleans()):
        asked.append(request(f"{seed}-beams", draw(st.integers(1, 9)), 7, beams=2))
    shared = {
        "prefix": draw(st.sampled_from(["off", "radix", "radix"])),
        "max_num_seqs": draw(st.integers(2, 4)),
        "max_num_batched_tokens": draw(st.integers(4, 20)),
        "offload": draw(st.sampled_from(["none", {"kind": "memory", "bytes": 200_000}])),
    }
    wanted = plain(model, asked, **{**shared, "offload": "none", "pages": 90})
    runner = runner_of(model, **shared, pages=draw(st.integers(16, 30)))
    if draw(st.booleans()):
        answers = {name: end.token_ids for name, end in wanted.items()}
        guesses = Guesses(answers, seed, draw(st.floats(0, 1)))
        runner.core.set_speculator(drafts(guesses, draw(st.integers(1, 6)), accept="match"))
    Oracle(runner)
    assert tokens(generate(runner, asked)) == tokens(wanted)
    runner.reset_prefix_cache()
    assert all(pool.num_used == 0 and pool.num_free == pool.num_pages for pool in runner.scheduler.pools)


def test_a_step_that_failed_is_computed_again_from_the_same_states() -> None:
    """Half of a step's layers were computed when it failed: the other requests go on as if it had not begun."""
    model = model_of(HYBRID)
    asked = [request("a", 9, 8), request("b", 6, 8), request("bad", 7, 8)]
    wanted = finals(runner_of(model), asked)
    runner = runner_of(model)

    def failing(plan, rows):
        if any(s.sequence.request_id == "bad" and len(s.sequence.output_ids) == 3 for s in plan.spans):
            raise ValueError("after every state was written")
        return rows

    Changed(runner, failing)
    found = finals(runner, asked)
    assert {name: found[name] for name in "ab"} == {name: wanted[name] for name in "ab"}
    assert found["bad"] == wanted["bad"][:3]
    assert runner.scheduler.pages_in_use == 0


def test_a_prefix_hit_is_as_long_as_the_last_snapshot() -> None:
    model, long = model_of(HYBRID), request("a", 23, 1)
    runner = runner_of(model, prefix="radix", max_num_batched_tokens=64)
    ends = generate(runner, [long])
    again = generate(runner, [Request("b", (*long.prompt_ids[:14], 1, 2, 3), long.sampling)])
    assert ends["a"].cached_tokens == 0 and again["b"].cached_tokens == 12
    states = len(runner.store.groups) - 1
    cache = runner.kv_cache.manager.prefix_cache
    assert cache is not None
    cache.evict(states, 100)
    assert generate(runner, [Request("c", long.prompt_ids, long.sampling)])["c"].cached_tokens == 0


def test_bytes_are_those_of_the_formula() -> None:
    runner = runner_of(model_of(HYBRID))
    store = runner.store
    assert store.bytes == store.expected_bytes
    states = len(store.groups) - 1
    assert store.groups[states].is_recurrent and store.groups[states].layers == (0, 2)
    assert store.page_bytes(states) == 2 * CONV.state_bytes == 2 * 6 * 2 * 4
    assert sum(tensor.nbytes for tensor in every_tensor(store)) == store.bytes


def test_states_are_kept_in_float32_beside_low_precision() -> None:
    model = model_of(HYBRID, dtype=torch.bfloat16)
    runner = runner_of(model)
    assert {part.dtype for part in runner.store.page_tensors(1)} == {torch.float32}
    Oracle(runner)
    generate(runner, [request("a", 11, 6), request("b", 5, 6)])


def test_a_state_is_not_inspected() -> None:
    runner = runner_of(model_of(HYBRID))
    runner.submit(request("a", 5, 3))
    runner.step()
    with pytest.raises(WorkbenchError, match="layer 0 has a recurrent state"):
        runner.inspect("a")


def test_auto_takes_eager() -> None:
    backends = select_backends("auto", Requirements(HYBRID))
    assert {backends.decode, backends.blocks, backends.attention} == {Backend.EAGER}
