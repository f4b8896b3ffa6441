"""Bytes of pages over gloo: a transfer is whole or not there, by its last pass, and what was dropped is not kept."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.engine.tiny import layer, model_of, request, runner_of, spec_of
from tests.patience import until
from workbench.cluster.apart import channels, page_channel, pool_engine
from workbench.cluster.apart.adoption import page_contents
from workbench.cluster.apart.channels import PageChannels
from workbench.cluster.apart.handover import ready_sequences
from workbench.cluster.apart.lending import HandedPages, TransferKey
from workbench.cluster.apart.page_channel import GlooLink, PageReceiver, PageSender, transfer_number
from workbench.cluster.apart.pool_engine import PoolEngine
from workbench.cluster.apart.pool_messages import Adopt, Connect, Disconnect
from workbench.engine.runner import Runner

NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def prefilled() -> tuple[Runner, HandedPages]:
    """A prompt in a full layer and a windowed one."""
    runner = runner_of(model_of(spec_of(layer(2, 1, 8), layer(2, 1, 8, sliding_window=5))))
    runner.submit(request("r", 14, 4))
    while not (ready := list(ready_sequences(runner))):
        runner.step()
    manager = runner.kv_cache.manager
    return runner, HandedPages(ready[0].num_computed_tokens, manager.export_pages(ready[0]))


def channel() -> tuple[PageSender, PageReceiver, list[int], list[str]]:
    """Both ends of a channel in one process, what the receiver heard, and the errors of both."""
    number, heard, errors = next(NUMBERS), [], []
    first = GlooLink(Connect(number, sends=True), "127.0.0.1", lambda found: second.meet(found.address))
    second = GlooLink(Connect(number, sends=False), "127.0.0.1", lambda found: first.meet(found.address))
    receiver = PageReceiver(second, lambda: heard.append(1), errors.append)
    return PageSender(first, errors.append), receiver, heard, errors


def send(sender: PageSender, key: TransferKey, number: int, prefilled: tuple[Runner, HandedPages], layer: int) -> None:
    runner, handed = prefilled
    sender.send(key, number, layer, list(page_contents(runner.store, handed.pages, layer)))


def test_a_transfer_is_there_when_all_its_layers_are(prefilled) -> None:
    runner, handed = prefilled
    sender, receiver, heard, _ = channel()
    key = TransferKey("r", 1)
    send(sender, key, 7, prefilled, 0)
    send(sender, key, 8, prefilled, 1)  # of another pass
    until(lambda: len(heard) == 2)
    assert receiver.pop(key, 7, handed, runner.store) is None and receiver.pop(key, 8, handed, runner.store) is None
    send(sender, key, 8, prefilled, 0)
    until(lambda: len(heard) == 3)
    found = receiver.pop(key, 8, handed, runner.store)
    assert found is not None and receiver.pop(key, 8, handed, runner.store) is None
    whole = list(page_contents(runner.store, handed.pages))
    assert len(whole) == len(found.contents) and all(map(torch.equal, whole, found.contents))
    assert receiver.error is None and sender.error is None


@pytest.mark.parametrize("is_sent", [False, True])
def test_a_prompt_is_handed_over_once_its_bytes_were_sent(monkeypatch: pytest.MonkeyPatch, is_sent: bool) -> None:
    engine: Any = SimpleNamespace(runner=None, moving={"r": 0}, attempts={"r": 2})
    ready = [SimpleNamespace(request_id="r"), SimpleNamespace(request_id="stays")]
    monkeypatch.setattr(pool_engine, "ready_sequences", lambda runner: ready)
    engine.sending = SimpleNamespace(has_sent=lambda of, key: is_sent, hand_over=lambda of, key, channel: key)
    assert PoolEngine._hand_over(engine) == [TransferKey("r", 2)] * is_sent


def test_what_was_dropped_is_not_kept(prefilled) -> None:
    sender, receiver, heard, _ = channel()
    first, second = TransferKey("r", 1), TransferKey("r", 2)
    send(sender, first, 1, prefilled, 0)
    until(lambda: len(heard) == 1)
    receiver.drop(first)
    send(sender, first, 1, prefilled, 1)
    send(sender, second, 1, prefilled, 0)
    until(lambda: len(heard) == 3)
    assert list(receiver._layers) == [transfer_number(second)]


def test_transfers_have_numbers_of_their_own() -> None:
    keys = [TransferKey(name, number) for name in ("r", "r1", "s") for number in range(3)]
    assert len({transfer_number(key) for key in keys}) == len(keys)
    assert all(0 <= transfer_number(key) < 2**63 for key in keys)


def test_what_was_sent_arrives_though_the_sender_leaves(prefilled) -> None:
    runner, handed = prefilled
    sender, receiver, heard, errors = channel()
    for number in range(2):
        send(sender, TransferKey("r", 1), 1, prefilled, number)
    until(lambda: sender.link.is_joined and receiver.link.is_joined)
    sender.close()
    until(lambda: receiver.error is not None and sender.error is not None)
    assert len(heard) == 2 and len(errors) == 1, "the receiver alone lost its channel"
    assert receiver.pop(TransferKey("r", 1), 1, handed, runner.store) is not None
    send(sender, TransferKey("r", 2), 1, prefilled, 0)
    assert sender._queue.empty(), "nothing is kept for a channel that has ended"


@pytest.mark.parametrize("sends", [True, False])
def test_an_end_whose_other_end_does_not_come_gives_up(monkeypatch, sends: bool) -> None:
    monkeypatch.setattr(page_channel, "JOIN_SECONDS", 0.2)
    errors: list[str] = []
    link = GlooLink(Connect(next(NUMBERS), sends), "127.0.0.1", lambda found: None)
    end = PageSender(link, errors.append) if sends else PageReceiver(link, lambda: None, errors.append)
    until(lambda: errors)
    assert end.error == errors[0] and not link.is_joined


def arriving(prefilled, connects: bool = True) -> tuple[PageChannels, Adopt]:
    """A process that waits for the bytes of a transfer over a channel whose other end never comes."""
    runner, handed = prefilled
    made = PageChannels("127.0.0.1", lambda message: None, lambda: None)
    if connects:
        made.connect(Connect(3, sends=False))
    adopt = Adopt(TransferKey("r", 1), request("r", 14, 4), handed, channel=3, sent_pass=1)
    made.expect(adopt)
    return made, adopt


def test_a_transfer_that_cannot_arrive_is_computed_again(monkeypatch, prefilled) -> None:
    """Unless it was cancelled; of it nothing is kept that comes late."""
    store = prefilled[0].store
    made, adopt = arriving(prefilled)
    assert list(made.pop_arrived(store)) == [] and made.is_waiting
    made.disconnect(Disconnect(3))
    assert list(made.pop_arrived(store)) == [(adopt, None)] and not made.is_waiting
    made, adopt = arriving(prefilled, connects=False)
    assert list(made.pop_arrived(store)) == [(adopt, None)], "a channel that it has never had"
    made, adopt = arriving(prefilled)
    assert list(made.cancel("r")) == [adopt] and not made.is_waiting
    assert transfer_number(adopt.key) in made._receivers[3]._dropped
    made, adopt = arriving(prefilled)
    monkeypatch.setattr(channels, "STALL_SECONDS", -1.0)
    assert list(made.pop_arrived(store)) == [(adopt, None)], "for too long no layer came"


def test_an_end_that_closes_before_it_joined_waits_no_longer() -> None:
    errors: list[str] = []
    link = GlooLink(Connect(next(NUMBERS), sends=True), "127.0.0.1", lambda found: None)
    sender = PageSender(link, errors.append)
    sender.close()
    until(lambda: errors)
    assert not link.is_joined
