"""Compare's choosers as a person has them: in a real JupyterLab, with the keyboard."""

from __future__ import annotations

import struct
import xml.etree.ElementTree as ET
from pathlib import Path

from tests.browser import assert_no_errors
from tools.notebooks.page import LabSession

NOTEBOOK = r"""
# %%
import torch
torch.set_num_threads(1)
import tempfile
from workbench import widgets
from workbench.experiment.experiment import Experiment
from workbench.measure.run import run
asked = {
    "question": "Which?", "model": {"name": "shape:tiny", "dtype": "float32"}, "backend": "eager",
    "workload": {
        "kind": "traffic", "requests": 2, "arrivals": {"kind": "poisson", "rate": 3000},
        "lengths": {"kind": "fixed", "prompt": 4, "output": 2},
    },
    "measure": {"warmup": 0, "ceilings": False},
}
folder = tempfile.mkdtemp()
for seqs, name in enumerate(("alpha", "beta", "gamma", "delta"), 1):
    run(Experiment.from_values(asked | {"schedule": {"max_num_seqs": seqs}}), folder, name, progress=False)
view = widgets.Compare(folder, force=True)
view
"""


def test_choosers_answer_the_keyboard_and_the_notebook_does_not(lab: LabSession) -> None:
    page = lab.open(lab.write("compare.py", NOTEBOOK))
    page.run_all()
    view = page.widget("wb-compare")
    names = [name.rsplit("/", 1)[-1] for name in eval(page.evaluate("view._names"))]
    cells = page.tab.locator(".jp-Cell").count()
    dropdown = view.locator("select").first
    dropdown.focus()
    assert page.evaluate("view.baseline").endswith(names[0] + "'")
    for _ in range(2):
        dropdown.press("ArrowDown")
    page.settle()
    assert page.evaluate("view.baseline").endswith(names[2] + "'")
    dropdown.press("ArrowUp")
    page.settle()
    assert page.evaluate("view.baseline").endswith(names[1] + "'") and dropdown.evaluate(
        "each => each.matches(':focus')"
    )
    for letter in "bgd":  # by its first letter, where JupyterLab has commands
        dropdown.press(letter)
        page.tab.wait_for_timeout(1200)  # until the browser takes the next letter for a first one
        page.settle()
        assert f"/{letter}" in page.evaluate("view.baseline")
    assert page.tab.locator(".jp-Cell").count() == cells, "letters made or deleted cells"
    assert "against " in view.inner_text()
    assert_no_errors(page)


def test_a_table_is_sorted_by_heads_and_saved_as_files(lab: LabSession) -> None:
    page = lab.open(lab.write("compare_table.py", NOTEBOOK))
    page.run_all()
    view = page.widget("wb-compare")
    view.get_by_role("button", name="table", exact=True).click()
    page.settle()
    cells = page.tab.locator(".jp-Cell").count()
    head = view.locator("th[aria-sort]").nth(1)
    given = view.locator("tbody th").all_inner_texts()
    head.get_by_role("button").click()
    page.settle()
    assert head.get_attribute("aria-sort") == "ascending"
    rising = view.locator("tbody th").all_inner_texts()
    button = head.get_by_role("button")
    assert button.evaluate("each => each.matches(':focus')"), "the head lost the keyboard when the table was redrawn"
    button.press("Enter")
    page.settle()
    assert head.get_attribute("aria-sort") == "descending"
    assert sorted(rising) == sorted(given) and view.locator("tbody th").all_inner_texts() != rising
    button.press("ArrowRight")
    assert view.locator("th[aria-sort]").nth(2).get_by_role("button").evaluate("each => each.matches(':focus')")
    assert page.tab.locator(".jp-Cell").count() == cells

    with page.tab.expect_download() as found:
        view.get_by_role("button", name="Save as CSV").click()
    assert found.value.suggested_filename == "comparison.csv"
    content = found.value.path().read_text()
    assert content == eval(page.evaluate("view.csv()")) and " [s]," in content.splitlines()[0]
    for way in ("table", "lines", "ratios", "two measures"):
        view.get_by_role("button", name=way, exact=True).click()
        page.settle()
        with page.tab.expect_download() as found:
            view.get_by_role("button", name="Save as PNG").click()
        size, pixels = _png(found.value.path())
        assert size == tuple(int(2 * float(each)) for each in _size(eval(page.evaluate("view._image()"))))
        assert len(pixels) > 2000, f"{way}: an empty picture was saved"
    assert_no_errors(page)


def _png(path: Path) -> tuple[tuple[int, int], bytes]:
    """Width and height of a PNG, and its compressed pixels."""
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    return struct.unpack(">II", content[16:24]), content[33:]


def _size(picture: str) -> tuple[str, str]:
    root = ET.fromstring(picture)
    return root.attrib["width"], root.attrib["height"]
