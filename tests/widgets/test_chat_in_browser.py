"""The chat as a person has it: in a real JupyterLab, with mouse and keyboard."""

from __future__ import annotations

from tests.browser import assert_no_errors, opened, says
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
"""
GROWN = "count => document.querySelectorAll('.wb-chat .wb-text span').length >= count"


def test_talk_stop_and_branch(lab: LabSession) -> None:
    page = opened(lab, "chat.py", NOTEBOOK)
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
    says(page, "chat.running", "False")
    shown = "".join(chat.locator(".wb-answer .wb-text span").all_text_contents())
    assert repr(shown) == page.evaluate("''.join(part.text for part in chat.last.parts)") and shown
    assert "stopped" in chat.inner_text() and page.evaluate("chat.last.stop_reason") == "'cancelled'"
    assert page.tab.evaluate("document.activeElement.className") == "wb-message"

    chat.get_by_role("button", name="edit message 1").click()
    until(lambda: field.input_value() == "add below: abxjk\ndd")
    assert "editing message 1" in chat.inner_text()
    field.fill("add below: abxjk, and more")
    field.press("Enter")
    until(lambda: page.evaluate("chat.running") == "True")
    chat.get_by_role("button", name="Stop").click()
    says(page, "chat.running", "False")
    assert "2/2" in chat.inner_text() and "editing" not in chat.inner_text()
    first, second = page.evaluate("chat.tree.get(1).question"), page.evaluate("chat.last.question")
    chat.get_by_role("button", name="the branch before").press("Enter")
    says(page, "chat.last.question", first)
    assert "1/2" in chat.inner_text() and second.strip("'") not in chat.locator(".wb-talk").inner_text()
    assert_no_errors(page)
