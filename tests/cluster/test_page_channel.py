"""Bytes of pages over gloo: a transfer is whole or not there, by its last pass, and what was dropped is not kept."""

from __future__ import annotations

import itertools
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.engine.tiny import layer, model_of, request, runner_of, spec_of
from tests.patience import until
from workbench.cluster.page_channel import PageReceiver, PageSender, transfer_number
from workbench.cluster.pool_messages import Connect
from workbench.engine.handover import ready_sequences
from workbench.engine.runner import Runner
from workbench.kv_cache.adoption import page_contents
from workbench.kv_cache.lending import HandedPages, TransferKey

NAMES = itertools.count()


@pytest.fixture(scope="module")
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))


@pytest.fixture(scope="module")
def prefilled() -> tuple[Runner, HandedPages]:
    """A prompt in a full layer and a windowed one."""
    runner = runner_of(model_of(spec_of(layer(2, 1, 8), layer(2, 1, 8, sliding_window=5))))
    runner.submit(request("r", 14, 4))
    while not (ready := list(ready_sequences(runner))):
        runner.step()
    manager = runner.kv_cache.manager
    return runner, HandedPages(ready[0].num_computed_tokens, manager.pages_to_hand_over(ready[0]))


def channel(store: dist.TCPStore) -> tuple[PageSender, PageReceiver, list[int]]:
    name, heard = f"channel {next(NAMES)}", []
    address = store.host, store.port
    receiver = PageReceiver(Connect(0, name, address, sends=False), lambda: heard.append(1))
    return PageSender(Connect(1, name, address, sends=True)), receiver, heard


def send(sender: PageSender, key: TransferKey, number: int, prefilled: tuple[Runner, HandedPages], layer: int) -> None:
    runner, handed = prefilled
    sender.send(key, number, layer, list(page_contents(runner.store, handed.pages, layer)))


def test_a_transfer_is_there_when_all_its_layers_are(store, prefilled) -> None:
    runner, handed = prefilled
    sender, receiver, heard = channel(store)
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


def test_what_was_dropped_is_not_kept(store, prefilled) -> None:
    sender, receiver, heard = channel(store)
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
