"""Prefill and decode in two engines: a sequence that is handed over goes on as if it had stayed, in every cache format,
and no page is lost."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_kernels import Backend
from tests.engine.apart import engines_apart
from tests.engine.handovers import FORMATS, LAYERS, WINDOWS, drawn_requests
from tests.engine.recurrent_models import models as recurrent_models
from tests.engine.tiny import Oracle, finals, layer, model_of, request, runner_of, spec_of
from tests.patience import until
from tests.thorough import tries
from workbench.cluster.apart.page_channel import GlooLink, PageReceiver, PageSender, SendingExecutor
from workbench.cluster.apart.pool_messages import Adopt, Connect
from workbench.engine.cache import describe_layout
from workbench.engine.config import EngineConfig
from workbench.engine.handover import adopt, hand_over, pop_returned, ready_sequences, take_back
from workbench.errors import WorkbenchError
from workbench.kv_cache.adoption import BorrowedPages, page_contents
from workbench.kv_cache.lending import TransferKey
from workbench.kv_cache.pages import NULL_PAGE
from workbench.kv_cache.shared_memory import SharedMemory
from workbench.model.attention_spec import MLASpec
from workbench.model.spec import LayerSpec
from workbench.trace.events import Decoded

LATENT = MLASpec(num_heads=2, kv_lora_rank=12, qk_rope_head_dim=4, qk_nope_head_dim=3, v_head_dim=5)
MODELS = (
    WINDOWS,
    spec_of(layer(2, 1, 8), layer(2, 1, 8)),
    spec_of(LayerSpec(attention=LATENT, intermediate_size=12), layer(2, 1, 8, sliding_window=6)),
)


@settings(max_examples=tries(60), deadline=None)
@given(st.data())
def test_two_engines_give_what_one_gives(data: st.DataObject) -> None:
    """Any format, windows, prefix hits on both sides, pages that run out, and handovers that come late."""
    draw = data.draw
    spec = draw(st.sampled_from(MODELS))
    model, formats = model_of(spec), FORMATS[:3] if spec is MODELS[-1] else FORMATS  # latent rows have no other form
    cache = dict(draw(st.sampled_from(formats)), prefix=draw(st.sampled_from(["off", "radix"])))
    chosen = {
        "cache": cache,
        "page_size": draw(st.sampled_from([8, 16])),
        "max_num_batched_tokens": draw(st.sampled_from([5, 16])),
    }
    asked = drawn_requests(data, f"{draw(st.integers(0, 99))}-")
    alone = finals(runner_of(model, **chosen), asked)
    few = {"pages": draw(st.sampled_from([8, 40]))}
    apart = engines_apart(model, draw(st.booleans()), few, **chosen, pages=40)
    hold = draw(st.integers(0, 3))
    assert apart.run(asked, hold) == alone
    assert {name: tuple(ids) for name, ids in apart.emitted.items()} == alone, "each token is emitted once"
    apart.check_no_page_leaks()


@settings(max_examples=tries(40), deadline=None)
@given(st.data())
def test_states_of_recurrent_layers_go_along(data: st.DataObject) -> None:
    model = model_of(data.draw(recurrent_models()))
    chosen = {"cache": {"prefix": data.draw(st.sampled_from(["off", "radix"]))}, "page_size": 4}
    asked = drawn_requests(data, f"{data.draw(st.integers(0, 99))}-")
    apart = engines_apart(model, data.draw(st.booleans()), {"pages": data.draw(st.sampled_from([12, 40]))}, **chosen)
    Oracle(apart.prefill)
    Oracle(apart.decode)
    found = apart.run(asked, data.draw(st.integers(0, 2)))
    assert found == finals(runner_of(model, **chosen), asked)
    apart.check_no_page_leaks()


def test_bits_are_those_of_one_engine() -> None:
    """Under `batch_invariant` log-probabilities too are equal, whatever shares the steps, the chunks and the pages."""
    chosen = {"batch_invariant": True, "backend": "mlir", "page_size": 8, "cache": {"prefix": "radix"}}
    model = model_of(LAYERS, backend=Backend.EAGER)
    asked = [request(f"r{i}", 9 + 5 * i, 8, temperature=0.7, seed=i, logprobs=2) for i in range(4)]
    same = [replace(asked[1], request_id="again"), asked[0]]

    def logprobs_of(events) -> dict:
        found = [event for event in events if isinstance(event, Decoded)]
        return {(each.request_id, each.index): (each.token_id, each.logprob, each.top_logprobs) for each in found}

    alone = logprobs_of(runner_of(model, **chosen).stream([*asked, same[0]]))
    for shares_memory in (True, False):
        apart = engines_apart(model, shares_memory, **chosen)
        apart.run([*asked[::-1], same[0]], hold=2)
        assert logprobs_of(apart.events) == alone and apart.num_moved == 5
        apart.check_no_page_leaks()


def test_a_page_that_the_prefix_cache_has_is_not_filled_again() -> None:
    """Copies: of a prompt that the decode engine knows only the last pages are written."""
    apart = engines_apart(model_of(spec_of()), False, cache={"prefix": "radix"}, page_size=4)
    apart.run([request("r", 18, 4)])
    known = apart.decode.scheduler.pools[0].num_available
    apart.submit([replace(request("r", 18, 4), request_id="again")])
    while not apart.decode.has_unfinished_requests:
        apart.prefill.step()
        for sequence in list(ready_sequences(apart.prefill)):
            made, adoption = apart._hand_over(sequence)
            sent = sum(page != NULL_PAGE for page in adoption.handed.pages[0])
            adopt(apart.decode, made, adoption, apart._queue)
    [waiting] = apart.decode.scheduler.waiting
    assert sent == 5 and len(waiting.pages[0]) == 5
    assert apart.decode.cached_tokens(made.prompt_ids) == 16
    assert known - apart.decode.scheduler.pools[0].num_available == 5, "four of them were idle, one was free"
    while apart.step():
        pass
    assert apart.finished["again"].token_ids == apart.finished["r"].token_ids
    apart.check_no_page_leaks()


def test_the_first_layer_has_arrived_before_the_last_is_computed() -> None:
    """Over gloo: the last block waits until the other end has the bytes of the first."""
    model = model_of(WINDOWS)
    runner = runner_of(model, page_size=8)
    first = GlooLink(Connect(0, sends=True), "127.0.0.1", lambda found: second.meet(found.address))
    second = GlooLink(Connect(0, sends=False), "127.0.0.1", lambda found: first.meet(found.address))
    heard: list[int] = []
    receiver, given = PageReceiver(second, lambda: heard.append(1), lambda error: None), []

    class Sender(PageSender):
        def send(self, key, number, layer, contents) -> None:
            given.append(layer)
            super().send(key, number, layer, contents)

    sender, key = Sender(first, lambda error: None), TransferKey("r", 1)
    sending = SendingExecutor(runner.executor, runner, lambda sequence: (key, sender))
    runner.set_executor(sending)
    waited: list[tuple[tuple[int, ...], int]] = []

    def wait(*_) -> None:
        if runner.has_unfinished_requests and is_last_chunk():
            if given:  # else nothing would come
                until(lambda: heard, lives=lambda: sender.error is None and receiver.error is None)
            waited.append((tuple(given), len(heard)))

    def is_last_chunk() -> bool:
        [sequence] = runner.scheduler.running
        return sequence.num_computed_tokens + 16 >= 30

    model.blocks[-1].register_forward_pre_hook(wait)
    runner.submit(request("r", 30, 4))
    while not (ready := list(ready_sequences(runner))):
        runner.step()
    offer = sending.hand_over(ready[0], key, 0)
    until(lambda: len(heard) == 3)
    [(layers, arrived)] = waited
    assert layers == (0, 1) and arrived >= 1, "a layer is sent as soon as it is computed"
    assert receiver.pop(key, offer.sent_pass, offer.handed, runner.store) is not None
    sender.close()


def test_through_a_shared_memory_only_page_numbers_travel() -> None:
    """A page's message has the same length whatever it holds, and the other engine reads those very bytes."""
    lengths = []
    for head_dim in (8, 64):
        apart = engines_apart(model_of(spec_of(layer(2, 1, head_dim), layer(2, 1, head_dim))), True)
        apart.submit([request("r", 26, 6)])
        while not (ready := list(ready_sequences(apart.prefill))):
            apart.prefill.step()
        made = hand_over(apart.prefill, ready[0])
        lengths.append(len(pickle.dumps(Adopt(TransferKey("r", 1), made.request, made.handed))))
        adopt(apart.decode, made.request, BorrowedPages(made.handed), apart._queue)
        [sequence] = apart.decode.scheduler.waiting
        assert [tuple(pages) for pages in sequence.pages] == list(made.handed.pages), "its pages are the prompt's"
        for mine, its in zip(page_contents(apart.prefill.store, made.handed.pages),
                             page_contents(apart.decode.store, made.handed.pages), strict=True):  # fmt: skip
            assert torch.equal(mine, its)
        while apart.step():
            pass
        apart.check_no_page_leaks()
    assert lengths[0] == lengths[1]


def test_layers_are_sent_while_later_ones_compute() -> None:
    """The bytes that a layer's hook copies out are those in the pages at the end, and come before the next layer."""
    model = model_of(WINDOWS)
    runner = runner_of(model, page_size=8)
    sent = []

    class Channel:
        def send(self, key, number, layer, contents) -> None:
            sent.append((number, layer, [part.clone() for part in contents], len(computed)))

    computed: list[int] = []
    for number, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda *_, number=number: computed.append(number))
    key = TransferKey("r", 1)
    sending = SendingExecutor(runner.executor, runner, lambda sequence: (key, Channel()))
    runner.set_executor(sending)
    runner.submit(request("r", 30, 4))
    while not (ready := list(ready_sequences(runner))):
        computed.clear()
        runner.step()
    whole = list(page_contents(runner.store, runner.kv_cache.manager.pages_to_hand_over(ready[0])))
    assert [layer for _, layer, *_ in sent] == [0, 1, 2] and [after for *_, after in sent] == [1, 2, 3]
    found = [part for _, _, contents, _ in sent for part in contents]
    assert len(found) == len(whole) and all(torch.equal(*pair) for pair in zip(found, whole, strict=True))


def test_layouts_are_compared_and_what_differs_is_named() -> None:
    model, base = model_of(WINDOWS), dict[str, Any](page_size=8)
    mine = describe_layout(model, EngineConfig.build(**base))
    others: tuple[tuple[dict[str, Any], str], ...] = (
        ({"page_size": 16}, "cache.page_size 8 and 16"),
        ({"page_size": 8, "cache": {"format": "int8", "quant_group": 8}}, "cache groups"),
        ({"page_size": 8, "cache": {"dtype": "bfloat16"}}, "pages .* float32 .* bfloat16"),
    )
    for changed, words in others:
        with pytest.raises(WorkbenchError, match=words):
            mine.check_equal(describe_layout(model, EngineConfig.build(**changed)))
    with pytest.raises(WorkbenchError, match="the models or their weights differ"):
        mine.check_equal(describe_layout(model_of(WINDOWS, seed=1), EngineConfig.build(**base)))
    with pytest.raises(WorkbenchError, match=r"leave out cache\.evict"):
        describe_layout(model, EngineConfig.build(**base, cache={"evict": {"kind": "window", "ratio": 0.5}}))


def test_a_request_that_fails_or_ends_early_leaves_no_loan() -> None:
    """A refused id, a cancellation before and after it was adopted, a step that fails: the pages go back."""
    apart = engines_apart(model_of(spec_of()), True)

    def moved(name: str):
        apart.submit([request(name, 9, 9)])
        while not (ready := list(ready_sequences(apart.prefill))):
            apart.prefill.step()
        return apart._hand_over(ready[0])

    adopt(apart.decode, *moved("r"), apart._queue)
    adopt(apart.decode, *moved("r"), apart._queue)  # taken
    apart.decode.cancel("r")
    adopt(apart.decode, *moved("r"), apart._queue)
    apart.decode.step()
    apart.give_back()
    inner = apart.decode.executor

    class Broken:
        compiles, kernel_seconds, artifacts = 0, None, {}

        def forward(self, plan):
            raise ValueError("planted")

    apart.decode.set_executor(Broken())
    apart.decode.step()
    sound, tainted = pop_returned(apart.decode)
    assert not any(sound) and any(tainted), "what the failed request may have written is to be zeroed"
    take_back(apart.prefill, tainted, tainted=True)
    for group, pages in enumerate(tainted):
        assert not any(tensor[pages].float().abs().sum() for tensor in apart.prefill.store.page_tensors(group))
    apart.decode.set_executor(inner)
    apart.check_no_page_leaks()


def test_a_memory_ends_with_its_processes_and_is_opened_by_address_alone() -> None:
    memory = SharedMemory.create(8192)
    other = SharedMemory.open(memory.address)
    memory.tensor()[5] = 7
    assert other.tensor()[5] == 7 and not [each for each in Path("/dev/shm").iterdir() if "workbench" in each.name]
    address = memory.address
    memory.close()
    with pytest.raises(WorkbenchError, match="which owns them, cannot be reached|its owner has ended"):
        SharedMemory.open(address)
    assert other.tensor()[5] == 7, "what is mapped stays"


@pytest.mark.parametrize("shares_memory", [True, False])
def test_a_request_that_lost_its_engine_is_handed_over_again(shares_memory: bool) -> None:
    """It comes back with the tokens that were emitted, and the prefix cache may know all of it but one token."""
    model, chosen = model_of(spec_of()), {"cache": {"prefix": "radix"}, "page_size": 4}
    asked = request("r", 15, 12, temperature=0.9, repetition_penalty=1.2)
    alone = finals(runner_of(model, **chosen), [asked])
    for emitted in range(12):
        for again in range(2):  # the second time from what the first left in the prefix caches
            apart = engines_apart(model, shares_memory, **chosen) if not again else apart
            name = f"r{emitted}{again}"
            ids = alone["r"][:emitted]
            found = apart.run([replace(asked, request_id=name, generated_ids=ids)])
            assert found[name] == alone["r"]
        apart.check_no_page_leaks()


@pytest.mark.parametrize("speculate", [{"kind": "prompt_lookup", "num_speculative_tokens": 3}])
@pytest.mark.parametrize("shares_memory", [True, False])
def test_drafts_are_verified_on_pages_that_came(shares_memory: bool, speculate: dict) -> None:
    model = model_of(WINDOWS)
    asked = [request(f"r{i}", 20 + i, 12) for i in range(3)]
    apart = engines_apart(model, shares_memory, page_size=8, speculate=speculate)
    assert apart.run(asked) == finals(runner_of(model, page_size=8), asked)
    apart.check_no_page_leaks()
