"""A notebook that was saved, closed and opened again shows its widgets' pictures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.widgets import notebook
from tools.notebooks.page import LabSession, NotebookPage

CELLS = (
    "import workbench\nfrom workbench import widgets\nrunner = workbench.load('demo', backend='eager')",
    "tokens = widgets.TokenView('def fibonacci(n):')\ntokens",
    "memory = widgets.MemoryCalculator(context=400)\nmemory",
    "weights = [[[[1.0, 0.0], [0.5, 0.5]]]]\nimport numpy\nwidgets.AttentionView(numpy.array(weights))",
)


@pytest.fixture
def saved(lab: LabSession) -> Iterator[Path]:
    """Return the file of a notebook that ran and was saved, closed, its kernel shut down."""
    page = lab.open(lab.write("reopened.ipynb", notebook(CELLS)))
    page.run_all()
    assert page.errors() == []
    page.save()
    lab.close()
    yield lab.server.root / "reopened.ipynb"
    lab.close()


def pictures(page: NotebookPage) -> list[str]:
    """Return what the pictures in sight say, but for their style."""
    seen = [each for each in page.root.locator(".wb-pic").all() if each.is_visible()]
    say = "each => [...each.querySelectorAll('text, td, th')].map(inner => inner.textContent.trim()).join(' ')"
    return [each.evaluate(say) for each in seen]


def test_a_reopened_notebook_shows_what_was_saved(saved: Path, lab: LabSession) -> None:
    """Without the views, which no kernel has; then with them, when its cells have run."""
    page = lab.open("reopened.ipynb")
    page.settle()
    assert page.errors() == []
    assert page.evaluate("'runner' in globals()") == "False"
    assert len(pictures(page)) >= 3 and "characters a token" in pictures(page)[0]
    assert page.root.locator("img.wb-drawn").count() == 0, "what is trusted is drawn in the page, in its colours"
    colours = "each => getComputedStyle(each).backgroundColor"
    for theme, colour in (("dark", "rgb(17, 17, 17)"), ("light", "rgb(255, 255, 255)")):
        lab.theme(theme)
        assert {colour} == {each.evaluate(colours) for each in page.root.locator("svg.wb-pic").all()}
    assert page.widget("wb-tokenview").count() == 0
    page.run_all()
    assert page.errors() == []
    assert page.widget("wb-tokenview").is_visible()


def test_without_any_kernel(saved: Path, lab: LabSession) -> None:
    page = lab.open("reopened.ipynb")
    page.settle()
    page.shut_down()
    assert len(pictures(page)) >= 2 and "Error" not in page.root.inner_text()


def test_a_view_that_its_kernel_still_has_comes_back_alive(lab: LabSession) -> None:
    page = lab.open(lab.write("alive.ipynb", notebook(CELLS)))
    page.run_all()
    page.save()
    page.reopen()
    assert page.errors() == []
    assert page.widget("wb-tokenview").is_visible()
    assert page.evaluate("'runner' in globals()") == "True"


def test_in_a_notebook_that_is_not_trusted_a_picture_is_an_image(saved: Path, lab: LabSession) -> None:
    document = json.loads(saved.read_text())
    document["cells"][0]["source"] = "another = 'that no kernel here has run'"
    saved.write_text(json.dumps(document))
    page = lab.open("reopened.ipynb")
    page.settle()
    text = "".join(page.root.locator(".jp-OutputArea-output").all_inner_texts())
    assert text and not any(words in text for words in ("Error displaying", "TokenView(", "MemoryCalculator("))
    images = page.root.locator(".jp-OutputArea-output img")
    shown = images.evaluate_all("all => all.map(each => each.complete && each.naturalWidth > 0)")
    assert shown == [True, True], "the bars of the memory, the heads and their map; tokens are words"
    assert "characters a token" in text and "weights 15.2" not in text, "no letters of a drawing without the drawing"


def test_after_a_restart_what_was_shown_stays(lab: LabSession) -> None:
    """And is saved, and shown again."""
    page = lab.open(lab.write("restarted.ipynb", notebook(CELLS[:3])))  # a live map of weights is no drawing
    page.run_all()
    before = pictures(page)
    page.restart()
    page.settle()
    assert pictures(page) == before
    hint = "element => getComputedStyle(element, '::after').content"
    assert "run the cell" in page.widget("wb-memorycalculator").first.evaluate(hint)
    page.save()
    page.reopen()
    assert page.errors() == []
    assert pictures(page) == before
    lab.close()
    page = lab.open("restarted.ipynb")
    page.settle()
    assert page.errors() == []
    assert pictures(page) == before
