"""The notebook check: every kind of fault has a notebook that has it, and a good notebook has none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser import browser
from tests.lab.notebooks import PICTURED
from tools.notebooks.check import NotebookVisit, WidgetScreenshots, visit_notebook
from tools.notebooks.page import LabSession

pytestmark = browser

BLANK = PICTURED.replace("<rect width='120' height='80'/></svg>", "</svg>")
# One cell for every kind of fault, the last of which ends the run.
FAULTY = f"""# %%
import ipywidgets
ipywidgets.IntSlider()

{BLANK}
# %%
class Confetti(anywidget.AnyWidget):
    _esm = 'import confetti from "https://esm.sh/canvas-confetti@1.6.0"; export default {{render({{el}}) {{}}}}'
Confetti()

# %%
import altair
altair.Chart({{'values': [{{'a': 1}}]}}).mark_point().encode(x='a:Q')

# %%
import urllib.request
try:
    urllib.request.urlopen("https://huggingface.co/gpt2")
except OSError as refused:
    print(refused)

# %%
import threading
thread = threading.Thread(target=lambda: [].pop())
thread.start(), thread.join()

# %%
# the last that runs
1 / 0

# %%
never = 0
"""


def test_a_good_notebook_has_no_faults_and_its_widgets_are_pictured(lab: LabSession, tmp_path: Path) -> None:
    album = WidgetScreenshots(tmp_path / "pictures", dark=True)
    found = visit_notebook(lab, lab.write("pictured.py", f"{PICTURED}\n# %%\nSquare()\n"), tmp_path, album)
    assert found.faults == [] and found.widgets == ("wb-square",) * 2 and (found.num_run, found.num_cells) == (2, 2)
    names = sorted(path.name for path in album.folder.iterdir())
    assert names == ["square-dark.png", "square-pictured-dark.png", "square-pictured.png", "square.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in album.folder.iterdir())


@pytest.fixture(scope="module")
def faulty(lab: LabSession, tmp_path_factory: pytest.TempPathFactory) -> NotebookVisit:
    return visit_notebook(lab, lab.write("faulty.py", FAULTY), tmp_path_factory.mktemp("faulty"))


@pytest.mark.parametrize(
    "fault",
    [
        "no picture in the exported page: cell 1 (widget)",
        "no picture in the exported page: cell 2 (wb-square)",
        "cell 3 (class Confetti(anywidget.AnyWidget):): Widget: was not drawn",
        "asked another machine: https://esm.sh/canvas-confetti@1.6.0",
        "console: [anywidget] Failed to initialize model.",
        "asked another machine: https://cdn.jsdelivr.net/npm/vega@6?noext",
        "asked another machine: the exported page: https://cdn.jsdelivr.net/npm/vega@6?noext",
        "asked another machine: kernel: huggingface.co",
        "cell 6 (import threading): stderr: IndexError: pop from empty list",
        "cell 7 (# the last that runs): ZeroDivisionError: division by zero",
        "7 of 8 cells ran",
    ],
)
def test_a_fault_is_reported(faulty: NotebookVisit, fault: str) -> None:
    assert fault in faulty.faults
