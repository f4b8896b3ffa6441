"""Compare's choosers as a person has them: in a real JupyterLab, with the keyboard."""

from __future__ import annotations

from tests.browser import browser
from tools.notebooks.page import LabSession

pytestmark = browser

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
    assert "against " in view.inner_text() and page.console_errors == [] and page.errors() == []
