"""The view of a server as a person meets it in JupyterLab: live, with mouse and keyboard, in both themes."""

from __future__ import annotations

import pytest

from tests.browser import assert_no_errors
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
COLOUR = "getComputedStyle(document.querySelector('.wb-serverview .wb-pic')).color"
ENDED = "view.snapshot.requests['finished']"


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_requests_appear_and_are_chosen(lab: LabSession, theme: str) -> None:
    page = lab.open(lab.write(f"server-{theme}.py", NOTEBOOK))
    lab.theme(theme)
    try:
        page.run_all()
        shown = page.widget("wb-serverview").first
        rows = shown.locator("rect[data-key^='@']")
        until(lambda: page.evaluate(ENDED) == "4" and "4 finished" in shown.inner_text())
        assert rows.count() == 4 and "ended: length" not in shown.inner_text()
        assert "127.0.0.1" in shown.inner_text() and "pages of the KV cache" in shown.inner_text()

        rows.nth(1).hover()
        tip = page.tab.locator(".wb-tip:visible")
        assert "40 prompt tokens" in tip.inner_text() and "TTFT" in tip.inner_text()
        rows.nth(1).click()
        until(lambda: "ended: length" in shown.inner_text())
        chosen = page.evaluate("view.chosen").strip("'")
        assert chosen == (rows.nth(1).get_attribute("data-key") or "").removeprefix("@")
        tokens = shown.locator(".wb-answer span")
        assert str(tokens.count()) == page.evaluate("len(server.log.trace(view.chosen).tokens)")
        tokens.first.hover()
        assert "token 1, id" in tip.inner_text() and "after its arrival" in tip.inner_text()
        assert "admitted" in shown.locator(".wb-reasons").inner_text()

        rows.nth(1).focus()  # the picture is drawn anew meanwhile, and the keyboard stays where it was
        page.tab.keyboard.press("ArrowDown")
        page.tab.keyboard.press("Enter")
        until(lambda: page.evaluate("view.chosen").strip("'") not in ("", chosen))
        assert page.evaluate("'@' + view.chosen") == repr(rows.nth(2).get_attribute("data-key"))
        assert page.executed() == (2, 2), "the keys were not the notebook's"

        bright = [float(each) for each in page.tab.evaluate(COLOUR).removeprefix("rgb(").rstrip(")").split(",")[:3]]
        assert (sum(bright) < 384) == (theme == "light")
        assert_no_errors(page)
        assert page.evaluate("view.close() or server.log._watchers") == "[]"
        assert page.evaluate("server.stop() or server.is_running") == "False"
    finally:
        lab.theme("light")


def test_a_notebook_keeps_the_picture_of_when_the_server_was_last_at_work(lab: LabSession) -> None:
    page = lab.open(lab.write("server-kept.py", NOTEBOOK))
    page.run_all()
    until(lambda: "Server demo-chat: 4 finished" in _saved(page.document()))
    page.evaluate("server.stop()")


def _saved(document: dict) -> str:
    """Return the markup of a notebook's outputs, as it would be saved."""
    outputs = [output for cell in document["cells"] for output in cell.get("outputs", ())]
    return "".join("".join(output.get("data", {}).get("text/html", "")) for output in outputs)
