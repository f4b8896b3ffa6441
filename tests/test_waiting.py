"""While a cell waits, a real kernel answers its widgets; what else was asked of it runs afterwards, in order."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

from tests.patience import limit
from workbench.waiting import wait_and_serve

SETUP = """
import threading, ipywidgets
from workbench.waiting import wait_and_serve
order, done = [], threading.Event()
button, slider = ipywidgets.Button(), ipywidgets.IntSlider()
slider.observe(lambda change: order.append(change["new"]), "value")

def press(_):
    print("pressed")
    order.append("pressed")
    done.set()

button.on_click(press)
def fail(*_):
    raise ValueError("a widget's mistake")
wrong = ipywidgets.IntSlider()
wrong.observe(fail, "value")
again = ipywidgets.Button()
again.on_click(lambda _: order.append(wait_and_serve(done.wait)))
names = [each.comm.comm_id for each in (button, slider, wrong, again)]
"""
WAIT = "print('waits', flush=True)\norder.append(wait_and_serve(done.wait))\nprint('over')"


@pytest.fixture
def client() -> Iterator[BlockingKernelClient]:
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel()
    client = manager.blocking_client()
    client.start_channels()
    client.wait_for_ready(timeout=limit(60))
    yield client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def run(client: BlockingKernelClient, code: str, **more: Any) -> Any:
    """Run code and wait for the reply."""
    return cast(Any, client).execute(code, reply=True, timeout=limit(60), **more)


def asked(client: BlockingKernelClient, expression: str) -> Any:
    reply = run(client, "", user_expressions={"x": expression})
    return eval(reply["content"]["user_expressions"]["x"]["data"]["text/plain"])


def sent(client: BlockingKernelClient, comm: str, data: dict[str, Any]) -> str:
    message = client.session.msg("comm_msg", {"comm_id": comm, "data": data})
    client.shell_channel.send(message)
    return message["header"]["msg_id"]


def pressed(client: BlockingKernelClient, comm: str) -> str:
    return sent(client, comm, {"method": "custom", "content": {"event": "click"}})


def moved(client: BlockingKernelClient, comm: str, value: int) -> str:
    return sent(client, comm, {"method": "update", "state": {"value": value}, "buffer_paths": []})


def heard(client: BlockingKernelClient, until: Any) -> list[dict[str, Any]]:
    """Read what the kernel publishes, up to the message for which `until` is true."""
    messages = []
    while not messages or not until(messages[-1]):
        messages.append(client.get_iopub_msg(timeout=limit(60)))
    return messages


def prints(text: str) -> Any:
    return lambda message: message["msg_type"] == "stream" and text in message["content"]["text"]


def ends(request: str) -> Any:
    return lambda message: (
        message["content"].get("execution_state") == "idle" and message["parent_header"]["msg_id"] == request
    )


@pytest.mark.processes
def test_widgets_answer_while_a_cell_waits_and_cells_keep_their_order(client: BlockingKernelClient) -> None:
    run(client, SETUP)
    button, slider, wrong, _ = asked(client, "names")
    waits = client.execute(WAIT)
    queued = [client.execute(f"order.append('cell {n}')") for n in range(2)]
    heard(client, prints("waits"))
    queued += [client.execute(f"order.append('cell {n}')") for n in range(2, 5)]
    slid = [moved(client, slider, value) for value in (3, 4)]
    mistake = moved(client, wrong, 1)
    queued += [client.execute(f"order.append('cell {n}')") for n in range(5, 7)]
    press = pressed(client, button)
    messages = heard(client, ends(queued[-1]))
    assert asked(client, "order") == [3, 4, "pressed", True, *(f"cell {n}" for n in range(7))]
    # Each message has its busy and idle; prints and errors are the callback's, and the cell's are its own.
    for request in (*slid, mistake, press, *queued):
        states = [
            each["content"]["execution_state"]
            for each in messages
            if each["parent_header"]["msg_id"] == request and each["msg_type"] == "status"
        ]
        assert states == ["busy", "idle"]
    assert [each["content"]["ename"] for each in messages if each["parent_header"]["msg_id"] == mistake
            and each["msg_type"] == "error"] == ["ValueError"]  # fmt: skip
    streams = [each for each in messages if each["msg_type"] == "stream"]
    said = {each["parent_header"]["msg_id"]: each["content"]["text"] for each in streams}
    assert said[press] == "pressed\n" and said[waits] == "over\n"


LAST_LOOK = """
from pathlib import Path
from time import sleep as pause

def wait(seconds):
    if 3 not in order:
        return False
    print("last look", flush=True)
    while not Path(flag).exists():
        pause(0.01)
    pause(0.5)  # another thread of the kernel takes in what was sent before
    return True
"""


@pytest.mark.processes
def test_a_cell_that_comes_after_the_last_look_runs_after_those_before(
    client: BlockingKernelClient, tmp_path: Path
) -> None:
    flag = tmp_path / "go"
    run(client, SETUP + f"flag = {str(flag)!r}\n" + LAST_LOOK)
    slider = asked(client, "names")[1]
    client.execute("wait_and_serve(wait)")
    client.execute("order.append('first')")
    moved(client, slider, 3)
    heard(client, prints("last look"))
    last = client.execute("order.append('second')")
    flag.touch()
    heard(client, ends(last))
    run(client, "")
    assert asked(client, "order") == [3, "first", "second"]


@pytest.mark.processes
def test_a_wait_inside_a_callback_serves_too(client: BlockingKernelClient) -> None:
    run(client, SETUP)
    button, _, _, again = asked(client, "names")
    client.execute(WAIT)
    last = client.execute("order.append('cell')")
    heard(client, prints("waits"))
    pressed(client, again)
    pressed(client, button)
    heard(client, ends(last))
    assert asked(client, "order") == ["pressed", True, True, "cell"]


@pytest.mark.processes
def test_an_interrupted_wait_ends_and_cells_behind_it_are_dropped_as_ever(client: BlockingKernelClient) -> None:
    run(client, SETUP)
    names = asked(client, "names")
    client.execute(WAIT)
    heard(client, prints("waits"))
    client.execute("order.append('dropped')")
    _, slider, _, _ = names
    heard(client, ends(moved(client, slider, 3)))  # the cell to be dropped has been read by now
    cast(KernelManager, client.parent).interrupt_kernel()
    assert client.get_shell_msg(timeout=limit(60))["content"]["ename"] == "KeyboardInterrupt"
    assert client.get_shell_msg(timeout=limit(60))["content"]["status"] == "aborted"
    run(client, "order.append('next')")
    assert asked(client, "order") == [3, "next"]


def test_outside_a_notebook_it_is_the_wait_itself() -> None:
    done = threading.Event()
    assert not wait_and_serve(done.wait, 0.01)
    threading.Timer(0.01, done.set).start()
    assert wait_and_serve(done.wait)
