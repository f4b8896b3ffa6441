"""A notebook that shows a server keeps its last picture."""

from __future__ import annotations

from tests.browser import opened
from tests.patience import until
from tools.notebooks.page import LabSession

NOTEBOOK = r"""
# %%
import torch
torch.set_num_threads(1)
import json, threading, urllib.request
import workbench
from workbench import widgets
runner = workbench.load("demo-chat", backend="eager", prefix="radix", page_size=16, max_num_seqs=2)
server = workbench.serve(runner)
view = widgets.ServerView(server)
view

# %%
def ask(number):
    body = {"model": "demo-chat", "prompt": list(range(5, 45)), "max_tokens": 8 + number, "ignore_eos": True}
    headers = {"content-type": "application/json"}
    asked = urllib.request.Request(f"{server.url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(asked) as answer:
        return json.load(answer)["id"]

threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
for each in threads:
    each.start()
for each in threads:
    each.join()
"""


def test_a_notebook_keeps_the_picture_of_when_the_server_was_last_at_work(lab: LabSession) -> None:
    page = opened(lab, "server-kept.py", NOTEBOOK)
    until(lambda: "Server demo-chat: 4 finished" in _saved(page.document()))
    page.evaluate("server.stop()")


def _saved(document: dict) -> str:
    """Return the markup of a notebook's outputs, as it would be saved."""
    outputs = [output for cell in document["cells"] for output in cell.get("outputs", ())]
    return "".join("".join(output.get("data", {}).get("text/html", "")) for output in outputs)
