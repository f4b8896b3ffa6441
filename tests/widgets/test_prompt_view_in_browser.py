"""The prompt view as a person has it: in a real JupyterLab, with mouse and keyboard, in both themes."""

from __future__ import annotations

import pytest

from tests.browser import assert_no_errors
from tests.patience import until
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
BACKGROUND = "getComputedStyle(document.querySelector('.wb-promptview .wb-pic')).backgroundColor"


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_choose_a_segment_and_a_template(lab: LabSession, theme: str) -> None:
    page = lab.open(lab.write(f"prompt-{theme}.py", NOTEBOOK))
    lab.theme(theme)
    try:
        page.run_all()
        view = page.widget("wb-promptview").first
        rows = view.locator(".wb-row[data-key]")
        user = rows.filter(has_text="one <|end|> two")
        user.click()
        until(lambda: page.evaluate("view.chosen") == "3")
        page.settle()
        assert view.locator(".wb-side b").count() == int(page.evaluate("view.read().bands[3].num_tokens"))
        assert view.locator(".wb-side b.ctl").count() == 0 and user.get_attribute("aria-expanded") == "true"

        rows.first.focus()
        rows.first.press("ArrowDown")
        assert page.tab.evaluate(FOCUSED) == "band:1"
        page.tab.keyboard.press("Enter")
        until(lambda: page.evaluate("view.chosen") == "1")
        page.settle()
        assert page.tab.evaluate(FOCUSED) == "band:1"  # the keyboard stays where it was
        assert page.executed() == (1, 1)

        view.get_by_label("template", exact=True).select_option("forgetful")
        until(lambda: page.evaluate("view.template") == "'forgetful'")
        view.get_by_role("button", name="text", exact=True).click()
        page.settle()
        assert view.locator("pre.wb-prompt").inner_text().startswith("<|begin|>")
        arguments = view.get_by_label("arguments")
        arguments.fill("a")
        arguments.press("Enter")
        assert "no JSON object" in view.locator("[role=alert]").inner_text()
        channels = page.tab.evaluate(BACKGROUND).removeprefix("rgb(").removesuffix(")").split(",")
        assert (sum(map(float, channels[:3])) > 384) == (theme == "light")
        assert_no_errors(page)
    finally:
        lab.theme("light")
