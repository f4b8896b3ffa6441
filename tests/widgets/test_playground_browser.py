"""The playground and the token view as a person has them: in a real JupyterLab, with mouse and keyboard."""

from __future__ import annotations

from tests.browser import assert_no_errors
from tests.patience import until
from tools.notebooks.page import LabSession, NotebookPage
from workbench.experiment.experiment import Experiment

NOTEBOOK = r"""
# %%
import torch
torch.set_num_threads(1)
from workbench import widgets
view = widgets.TokenView("a", beside="bytes")
view

# %%
play = widgets.Playground(prompt="def f(x):\n")
play
"""
GROWN = "count => document.querySelectorAll('.wb-playground .wb-tokens b').length >= count"
IDLE = """() => [...document.querySelectorAll(".wb-playground button")].some(
  button => button.innerText.trim() === "Stop" && button.disabled)"""


def test_press_run_and_stop_and_take_it_away(lab: LabSession) -> None:
    page = lab.open(lab.write("playground.py", NOTEBOOK))
    page.run_all()
    typed(page)
    play = page.widget("wb-playground")
    many = play.get_by_label("max_tokens", exact=True)
    many.fill("900")
    many.press("Tab")
    run, stop = play.get_by_role("button", name="Run"), play.get_by_role("button", name="Stop")

    run.press("Enter")
    page.tab.wait_for_function(GROWN, arg=5)
    stop.click()
    page.tab.wait_for_function(IDLE)
    page.settle()
    said = page.evaluate("play.played.text()")
    tokens = int(page.evaluate("play.played.num_tokens"))
    assert page.evaluate("play.played.finish_reasons") == "{0: 'cancelled'}" and 5 <= tokens < 900 and run.is_enabled()
    shown = play.locator(".wb-tokens b").all_text_contents()
    assert len(shown) == tokens and repr("".join(shown) + page_rest(page)) == said
    first = play.locator(".wb-tokens b").first
    first.hover()
    assert "id " in page.tab.locator(".wb-tip:visible").inner_text()
    first.focus()
    first.press("ArrowRight")
    assert page.tab.evaluate("document.activeElement.dataset.key") == "0.1"

    run.click()
    # The kernel is asked: the page may still show the tokens, and the buttons, of the run before.
    until(lambda: page.evaluate("not play.played.finish_reasons and play.played.num_tokens >= 5") == "True")
    page.interrupt()  # no cell runs: the kernel's stop button ends what plays
    until(lambda: page.evaluate("play.played.finish_reasons") == "{0: 'cancelled'}")
    page.tab.wait_for_function(IDLE)
    page.settle()

    page.tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    play.get_by_role("button", name="Copy as YAML").click()
    play.get_by_text("copied", exact=True).wait_for()
    yaml = page.tab.evaluate("navigator.clipboard.readText()")
    assert Experiment.from_yaml(yaml).sampling.max_tokens == 900 and repr(yaml) == page.evaluate("play.last.to_yaml()")

    play.get_by_label("temperature", exact=True).fill("1")
    play.get_by_label("beams", exact=True).fill("2")
    stops = play.get_by_label("stop", exact=True).and_(page.tab.locator("input"))
    stops.fill("x")
    stops.press("Tab")
    play.get_by_role("alert").wait_for()
    assert "give stop_token_ids" in play.get_by_role("alert").inner_text() and run.is_disabled()
    play.get_by_role("button", name="Reset").click()
    page.settle()
    assert run.is_enabled() and play.locator(".wb-tokens b").count() == 0
    assert_no_errors(page)


SHOWN_TWICE = r"""
# %%
import torch
torch.set_num_threads(1)
from workbench import widgets
play = widgets.Playground(prompt="def f(x):\n")
play

# %%
play

# %%
a, b, c = 1, 2, 3
"""
WHERE = """() => {
  const outside = [...document.querySelectorAll("*")].filter((each) => !each.closest(".wb-playground"));
  const settings = document.querySelector(".wb-playground .widget-toggle-buttons");
  return [outside.map((each) => each.scrollTop).filter((top) => top > 0), settings.getBoundingClientRect().top];
}"""


def test_the_page_and_the_settings_stay_where_they_are_while_text_comes(lab: LabSession) -> None:
    page = lab.open(
        lab.write("still.py", SHOWN_TWICE.replace("# %%\nplay\n", "# %% [markdown]\n" + "# text\n#\n" * 60))
    )
    page.run_all()
    play = page.widget("wb-playground")
    play.get_by_label("max_tokens", exact=True).fill("600")  # many more lines than the place has, whatever the seed
    play.get_by_label("ignore_eos", exact=True).check()
    page.settle()
    play.get_by_role("button", name="Run").evaluate("each => each.scrollIntoView({block: 'start'})")
    play.get_by_role("button", name="Run").click()
    places = [page.tab.evaluate(WHERE)]
    page.tab.wait_for_function(GROWN, arg=8)
    while page.evaluate("play.running") == "True":
        places.append(page.tab.evaluate(WHERE))
    page.settle()
    places.append(page.tab.evaluate(WHERE))
    assert page.evaluate("play.played.num_tokens") == "600" and len(places) > 3
    assert all(place == places[0] for place in places)
    place = play.locator(".wb-text-place")
    assert place.evaluate("each => each.scrollHeight > each.clientHeight")
    ends = "each => each.getBoundingClientRect().bottom"
    assert play.locator(".wb-tokens b").last.evaluate(ends) <= place.evaluate(ends)  # the end of the text is in sight


def test_a_view_shown_by_two_cells_outlives_the_first_ones_next_run(lab: LabSession) -> None:
    page = lab.open(lab.write("twice.py", SHOWN_TWICE))
    page.run_all()
    assert page.widget("wb-playground").count() == 2
    page.evaluate("globals().update(first=play)")
    page.run_cell(1)
    second = page.widget("wb-playground").last
    second.get_by_label("max_tokens", exact=True).fill("900")  # so that there is something to stop on any machine
    second.get_by_label("ignore_eos", exact=True).check()
    page.settle()
    second.get_by_role("button", name="Run").click()
    until(lambda: page.evaluate("first.played.num_tokens > 5") == "True")
    second.locator(".wb-tokens b").nth(3).wait_for()
    second.get_by_role("button", name="Stop").click()
    until(lambda: page.evaluate("first.running") == "False")
    assert page.widget("wb-playground").count() == 2
    assert_no_errors(page)


def typed(page: NotebookPage) -> None:
    """Letters typed into the token view are cut up by the kernel."""
    view = page.widget("wb-tokenview")
    view.locator("textarea").press("End")
    view.locator("textarea").press_sequentially("é = 1")
    page.tab.wait_for_function("() => document.querySelectorAll('.wb-tokenview .wb-side b').length >= 8")
    page.settle()
    assert page.evaluate("view.text") == repr("aé = 1")
    assert view.locator(".wb-side").nth(1).locator("b").count() == len("aé = 1".encode())


def page_rest(page: NotebookPage) -> str:
    return page.evaluate("play.played.trailing_text.get(0, '')").strip("'")
