"""The chat as a person has it: in a real JupyterLab, with mouse and keyboard, in both themes."""

from __future__ import annotations

import pytest

from tests.browser import assert_no_errors
from tests.patience import until
from tools.notebooks.page import LabSession

NOTEBOOK = r"""
# %%
import torch
torch.set_num_threads(1)
import threading
import workbench
from workbench import widgets
runner = workbench.load("demo", backend="eager", prefix="radix", page_size=16)
chat = widgets.Chat(runner, system="Answer briefly, and say so if you do not know it.", max_tokens=300, ignore_eos=True)
chat

# %%
hanging = threading.Event()
def wait_for(name: str) -> str:
    "Wait for a person."
    hanging.wait()
    return "came"
caller = widgets.Chat(
    runner, [wait_for], tool_choice="required", max_tokens=60, temperature=0, limits={"rounds": 1},
    thinking={"budget_tokens": 4},
)
caller
"""
GROWN = "count => document.querySelectorAll('.wb-chat .wb-text span').length >= count"
COLOUR = "getComputedStyle(document.querySelector('.wb-chat .wb-pic')).color"


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_talk_stop_and_branch(lab: LabSession, theme: str) -> None:
    page = lab.open(lab.write(f"chat-{theme}.py", NOTEBOOK))
    lab.theme(theme)
    try:
        page.run_all()
        chat = page.widget("wb-chat").first
        field = chat.get_by_label("message", exact=True)
        field.click()
        cells = len(page.document()["cells"])
        page.tab.keyboard.type("add below: abxjk")  # letters by which a notebook makes, cuts and moves between cells
        page.tab.keyboard.press("Shift+Enter")
        page.tab.keyboard.type("dd")
        assert field.input_value() == "add below: abxjk\ndd"
        assert len(page.document()["cells"]) == cells and page.executed() == (2, 2)
        page.tab.keyboard.press("Enter")
        page.tab.wait_for_function(GROWN, arg=3)
        assert field.input_value() == "" and chat.get_by_role("button", name="Stop").is_enabled()
        assert chat.get_by_role("button", name="edit message 1").is_disabled()
        page.tab.keyboard.press("Escape")  # the keyboard is still in the field
        until(lambda: page.evaluate("chat.running") == "False")
        page.settle()
        shown = "".join(chat.locator(".wb-answer .wb-text span").all_text_contents())
        assert repr(shown) == page.evaluate("''.join(part.text for part in chat.last.parts)") and shown
        assert "stopped" in chat.inner_text() and page.evaluate("chat.last.stop_reason") == "'cancelled'"
        assert page.tab.evaluate("document.activeElement.className") == "wb-message"

        chat.get_by_role("button", name="edit message 1").click()
        until(lambda: field.input_value() == "add below: abxjk\ndd")
        until(lambda: "editing message 1" in chat.inner_text())  # the notice comes behind the text
        field.fill("add below: abxjk, and more")
        field.press("Enter")
        until(lambda: page.evaluate("chat.running") == "True")
        chat.get_by_role("button", name="Stop").click()
        until(lambda: page.evaluate("chat.running") == "False")
        page.settle()
        assert "2/2" in chat.inner_text() and "editing" not in chat.inner_text()
        first, second = page.evaluate("chat.tree.get(1).question"), page.evaluate("chat.last.question")
        chat.get_by_role("button", name="the branch before").press("Enter")
        until(lambda: page.evaluate("chat.last.question") == first)
        page.settle()
        assert "1/2" in chat.inner_text() and second.strip("'") not in chat.locator(".wb-talk").inner_text()
        bright = [float(each) for each in page.tab.evaluate(COLOUR).removeprefix("rgb(").rstrip(")").split(",")[:3]]
        assert (sum(bright) < 384) == (theme == "light")
        assert_no_errors(page)
    finally:
        lab.theme("light")


def test_a_tool_that_hangs_is_shown_and_stopped(lab: LabSession) -> None:
    page = lab.open(lab.write("chat-tools.py", NOTEBOOK))
    page.run_all()
    chat = page.widget("wb-chat").nth(1)
    field = chat.get_by_label("message", exact=True)
    field.fill("Is anyone there?")
    field.press("Enter")
    until(lambda: "running …" in chat.locator(".wb-talk").inner_text())
    assert "wait_for" in chat.locator(".wb-call").first.inner_text()
    thought = chat.locator("details.thought").first
    assert thought.get_attribute("open") is None
    summary = thought.locator("summary")
    summary.focus()
    summary.press("Enter")
    assert thought.get_attribute("open") is not None
    assert page.executed()[0] == 2  # the key was not the notebook's
    chat.get_by_role("button", name="Stop").click()
    until(lambda: page.evaluate("caller.running") == "False")
    page.settle()
    assert "stopped" in chat.inner_text() and thought.get_attribute("open") is not None  # drawn again, open as it was
    thought.locator("summary").click()
    assert thought.get_attribute("open") is None
    assert page.evaluate("caller.conversation.unanswered_calls") == "[]"
    page.evaluate("hanging.set()")
    assert_no_errors(page)
