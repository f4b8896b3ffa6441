"""Prefill and decode in two engines: a sequence that is handed over goes on as if it had stayed, in every cache format,
and no page is lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cluster.apart import engines_apart, prefilled
from tests.cluster.handovers import FORMATS, WINDOWS, drawn_requests
from tests.engine.recurrent_models import models as recurrent_models
from tests.engine.tiny import Oracle, finals, layer, model_of, request, runner_of, spec_of
from tests.patience import until
from tests.thorough import tries
from workbench.cluster.apart.adoption import page_contents
from workbench.cluster.apart.handover import adopt, pop_returned, ready_sequences, take_back
from workbench.cluster.apart.lending import TransferKey
from workbench.cluster.apart.page_channel import GlooLink, LayerSending, PageReceiver, PageSender
from workbench.cluster.apart.page_layout import describe_layout
from workbench.cluster.apart.pool_messages import Connect
from workbench.cluster.apart.shared_memory import SharedMemory
from workbench.engine.config import EngineConfig
from workbench.errors import WorkbenchError
from workbench.kv_cache.pages import NULL_PAGE
from workbench.model.attention_spec import MLASpec
from workbench.model.spec import LayerSpec

LATENT = MLASpec(num_heads=2, kv_lora_rank=12, qk_rope_head_dim=4, qk_nope_head_dim=3, v_head_dim=5)
MODELS = (
    WINDOWS,
    spec_of(layer(2, 1, 8), layer(2, 1, 8)),
    spec_of(LayerSpec(attention=LATENT, intermediate_size=12), layer(2, 1, 8, sliding_window=6)),
)


LOOKUP = {"kind": "prompt_lookup", "num_speculative_tokens": 3, "accept": "match"}


@settings(max_examples=tries(90))
@given(st.data())
def test_two_engines_give_what_one_gives(data: st.DataObject) -> None:
    """Any format, windows, states of recurrent layers, prefix hits on both sides, pages that run out, drafts, and
    handovers that come late."""
    draw = data.draw
    recurrent = draw(st.sampled_from([None, None, recurrent_models()]))
    spec = draw(st.sampled_from(MODELS) if recurrent is None else recurrent)
    # Latent rows have no other form.
    formats = FORMATS[:1] if recurrent is not None else FORMATS[:3] if spec is MODELS[-1] else FORMATS
    chosen = {
        "cache": dict(draw(st.sampled_from(formats)), prefix=draw(st.sampled_from(["off", "radix"]))),
        "page_size": 4 if recurrent is not None else draw(st.sampled_from([8, 16])),
        "max_num_batched_tokens": draw(st.sampled_from([5, 16])),
    }
    model, asked = model_of(spec), drawn_requests(data, f"{draw(st.integers(0, 99))}-")
    alone = finals(runner_of(model, **chosen), asked)
    few = {"pages": draw(st.sampled_from([12 if recurrent is not None else 8, 40]))}
    chosen["speculate"] = draw(st.sampled_from(["none", LOOKUP])) if recurrent is None else "none"
    apart = engines_apart(model, draw(st.booleans()), few, **chosen, pages=40)
    if recurrent is not None:
        Oracle(apart.prefill)
        Oracle(apart.decode)
    assert apart.run(asked, draw(st.integers(0, 3))) == alone
    assert {name: tuple(ids) for name, ids in apart.emitted.items()} == alone, "each token is emitted once"
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


def test_what_a_filled_page_held_is_on_the_cpu_before() -> None:
    """Bytes fill pages between two steps; what the prefix cache had in them is swapped out first."""
    cache = {"prefix": "radix", "offload": {"kind": "memory", "bytes": 200_000}}
    apart = engines_apart(model_of(spec_of()), False, {"pages": 10}, cache=cache)
    asked = [request(name, 18, 4) for name in ("0a", "0b", "4a", "4b")]
    for each in asked:
        expected = apart.run([each])
    assert finals(apart.decode, asked) == expected


def test_the_first_layer_has_arrived_before_the_last_is_computed() -> None:
    """Over gloo: the last block waits until the other end has the bytes of the first; all are those in the pages."""
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
    sending = LayerSending(runner, lambda sequence: (key, sender))
    runner.core.executor.hooks.append(sending)
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
    sequence = prefilled(runner)
    whole = list(page_contents(runner.store, runner.kv_cache.manager.export_pages(sequence)))
    offer = sending.hand_over(sequence, key, 0)
    until(lambda: len(heard) == 3)
    [(layers, arrived)] = waited
    assert layers == (0, 1) and arrived >= 1, "a layer is sent as soon as it is computed"
    found = receiver.pop(key, offer.sent_pass, offer.handed, runner.store)
    assert found is not None and all(torch.equal(*pair) for pair in zip(found.contents, whole, strict=True))
    sender.close()


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
        return apart._hand_over(prefilled(apart.prefill))

    adopt(apart.decode, *moved("r"), apart._queue)
    adopt(apart.decode, *moved("r"), apart._queue)  # taken
    apart.decode.cancel("r")
    adopt(apart.decode, *moved("r"), apart._queue)
    apart.decode.step()
    apart.give_back()

    def broken(forward, plan):
        raise ValueError("planted")

    apart.decode.core.executor.hooks.append(broken)
    apart.decode.step()
    returned = pop_returned(apart.decode)
    assert any(returned), "what the failed request may have written is zero"
    for group, pages in enumerate(returned):
        assert not any(tensor[pages].float().abs().sum() for tensor in apart.prefill.store.page_tensors(group))
    take_back(apart.prefill, returned)
    apart.decode.core.executor.hooks.clear()
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
