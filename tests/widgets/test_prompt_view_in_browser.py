"""The prompt view as a person has it: in a real JupyterLab, with mouse and keyboard."""

from __future__ import annotations

from tests.browser import assert_no_errors, opened, says
from tools.notebooks.page import LabSession

NOTEBOOK = r"""
# %%
import torch
torch.set_num_threads(1)
import workbench
from workbench import widgets
runner = workbench.load("demo", backend="eager", prefix="radix")
talk = workbench.Conversation(system="Be brief.", turns=["one <|end|> two", ])
longer = talk.answer("Three.", thinking="Count.").user("And then?")
forgetful = runner.chat_template.text.replace("message.reasoning_content ~", "('' if not loop.last) ~")
view = widgets.PromptView(runner, longer, previous=talk, templates={"forgetful": forgetful})
view
"""
FOCUSED = "document.activeElement.dataset.key"


def test_choose_a_segment_and_a_template(lab: LabSession) -> None:
    page = opened(lab, "prompt.py", NOTEBOOK)
    view = page.widget("wb-promptview").first
    rows = view.locator(".wb-row[data-key]")
    user = rows.filter(has_text="one <|end|> two")
    user.click()
    says(page, "view.chosen", "3")
    assert view.locator(".wb-side b").count() == int(page.evaluate("view.read().bands[3].num_tokens"))
    assert view.locator(".wb-side b.ctl").count() == 0 and user.get_attribute("aria-expanded") == "true"

    rows.first.focus()
    rows.first.press("ArrowDown")
    assert page.tab.evaluate(FOCUSED) == "band:1"
    page.tab.keyboard.press("Enter")
    says(page, "view.chosen", "1")
    assert page.tab.evaluate(FOCUSED) == "band:1"  # the keyboard stays where it was
    assert page.executed() == (1, 1)

    view.get_by_label("template", exact=True).select_option("forgetful")
    says(page, "view.template", "'forgetful'")
    view.get_by_role("button", name="text", exact=True).click()
    page.settle()
    assert view.locator("pre.wb-prompt").inner_text().startswith("<|begin|>")
    arguments = view.get_by_label("arguments")
    arguments.fill("a")
    arguments.press("Enter")
    assert "no JSON object" in view.locator("[role=alert]").inner_text()
    assert_no_errors(page)
