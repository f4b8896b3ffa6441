"""A click and a key reach what they were meant for, once, whatever is drawn or made anew while it is pressed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.browser import assert_no_errors
from tools.notebooks.page import LabSession, NotebookPage

CELLS = """# %%
import ipywidgets
from workbench import svg
from workbench.widgets.view import PictureWidget

class Pressed(PictureWidget):
    def __init__(self):
        super().__init__()
        self.drawn, self.heard = 0, []
        self.button = ipywidgets.Button(description="a button")
        self.button.on_click(lambda _: self.heard.append("button"))
        self.shown.on_pick(self.heard.append)
        self.show(self.button)

    def picture(self):
        cells = [svg.rect(20 * n, 2 + self.drawn, 16, 16, key=f"c{n}", tabindex=0) for n in range(3)]
        drawing = svg.document(100, 60, *cells, title=f"three cells, drawn {self.drawn} times")
        fold = svg.tag("details", svg.tag("summary", f"fold {self.drawn}"), "unfolded", data_fold="f")
        return svg.html(fold + drawing)

    def draw_again(self):
        self.drawn += 1
        self.redraw()

    def make_again(self):
        self.drawn += 1
        self.keep()

view = Pressed()
view
"""
STOPS = {"cell": "rect[data-key=c1]", "button": "button", "fold": "summary"}
NEW = ("draw_again", "make_again")  # the markup is replaced by the widget; the whole view by JupyterLab


@pytest.fixture(scope="module")
def page(lab: LabSession) -> Iterator[NotebookPage]:
    page = lab.open(lab.write("pressed.py", CELLS))
    page.run_all()
    page.tab.evaluate("addEventListener('toggle', ({target}) => (window.toggled ??= []).push(target.open), true)")
    yield page
    assert_no_errors(page)


def heard(page: NotebookPage) -> list[str | bool]:
    """Return what the kernel heard of, and folds that opened or closed, since it was last looked at."""
    page.settle()
    picks = eval(page.evaluate("[view.heard.pop(0) for _ in tuple(view.heard)]"))
    return [*picks, *page.tab.evaluate("(window.toggled ?? []).splice(0)")]


def place(page: NotebookPage, stop: str) -> tuple[float, float]:
    box = page.widget("wb-pressed").locator(STOPS[stop]).bounding_box()
    assert box is not None
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def is_open(page: NotebookPage) -> bool:
    return page.widget("wb-pressed").locator("details").evaluate("each => each.open")


@pytest.mark.parametrize("anew", ["", *NEW])
@pytest.mark.parametrize("stop", STOPS)
def test_a_click_arrives_once(page: NotebookPage, stop: str, anew: str) -> None:
    was_open, folds = is_open(page), stop == "fold"
    page.tab.mouse.move(*place(page, stop))
    page.tab.mouse.down()
    if anew:
        page.evaluate(f"view.{anew}()")
        page.settle()
        assert heard(page) in ([], [True]) and is_open(page) == was_open  # a fold drawn open says so
    page.tab.mouse.up()
    assert heard(page) == [{"cell": "c1", "button": "button", "fold": not was_open}[stop]]
    assert is_open(page) == (was_open != folds)


@pytest.mark.parametrize("anew", NEW)
def test_a_pointer_that_leaves_what_it_pressed_clicks_nothing(page: NotebookPage, anew: str) -> None:
    x, y = place(page, "cell")
    page.tab.mouse.move(x, y)
    page.tab.mouse.down()
    page.evaluate(f"view.{anew}()")
    page.settle()
    page.tab.mouse.move(x + 60, y)
    page.tab.mouse.up()
    assert [each for each in heard(page) if isinstance(each, str)] == []


@pytest.mark.parametrize("anew", NEW)
@pytest.mark.parametrize("stop", STOPS)
def test_the_keyboard_stays_and_space_is_not_lost(page: NotebookPage, stop: str, anew: str) -> None:
    was_open = is_open(page)
    page.widget("wb-pressed").locator(STOPS[stop]).focus()
    page.tab.keyboard.down("Space")
    page.evaluate(f"view.{anew}()")
    page.settle()
    page.tab.keyboard.up("Space")
    picks = [each for each in heard(page) if isinstance(each, str)]
    assert page.widget("wb-pressed").locator(STOPS[stop]).evaluate("each => each === document.activeElement")
    assert picks == {"cell": ["c1"], "button": ["button"], "fold": []}[stop]
    assert is_open(page) == (was_open != (stop == "fold"))
