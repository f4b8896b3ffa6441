"""The next token's distribution and speculation in a real JupyterLab: a slider, a token and a check, touched."""

from __future__ import annotations

from tests.browser import assert_no_errors, pressed
from tools.notebooks.page import LabSession

CELLS = """# %%
import workbench
from workbench.widgets import SamplingExplorer, SpeculationView

runner = workbench.load("demo", backend="eager")
w = SamplingExplorer(runner, "def f(x):\\n    return", max_tokens=6, top_k=40).wait()
w

# %%
PROMPT = "def read(path):\\n    with open(path) as f:\\n        return f.read()\\n\\ndef write(path):\\n"
s = SpeculationView(runner, PROMPT, speculate="prompt_lookup", max_tokens=24, rounds=1).wait()
s
"""


def test_a_slider_a_token_and_a_check(lab: LabSession) -> None:
    page = lab.open(lab.write("sampling.py", CELLS))
    page.run_all()
    assert_no_errors(page)
    explorer = page.widget("wb-samplingexplorer")
    readouts = explorer.locator(".widget-readout").all_inner_texts()
    assert "40" in readouts and explorer.get_by_text("top k 40").count() == 1
    handle = explorer.locator(".noUi-handle").nth(1)  # temperature, top k
    assert pressed(page, handle, "ArrowLeft", "w.top_k") == "39" and explorer.get_by_text("top k 39").count() == 1
    explorer.locator("[data-key='t3']").click()
    page.settle()
    assert page.evaluate("w.position") == "3" and explorer.get_by_text("Position 3:").count() == 1
    row = explorer.locator("[data-key^='c']").first
    row.hover()
    assert "after filter 1" in page.tab.locator(".wb-tip:visible").first.inner_text()
    row.click()
    page.settle()
    assert int(page.evaluate("w.token")) >= 0
    explorer.get_by_role("button", name="Draw again").click()
    page.settle()
    assert page.evaluate("w.seed") == "1000"

    view = page.widget("wb-speculationview")
    last = int(page.evaluate("s.verification"))
    assert view.get_by_text(f"Verification {last} of {last}").count() == 1 and last > 1
    handle = view.locator("input[type=range]")
    assert pressed(page, handle, "ArrowLeft", "s.verification") == str(last - 1)
    assert view.get_by_text(f"Verification {last - 1} of {last}").count() == 1
    view.locator("[data-key='k1']").first.click()
    page.settle()
    assert page.evaluate("s.verification") == "1"
    assert_no_errors(page)
