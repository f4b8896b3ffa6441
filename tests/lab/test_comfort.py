"""Errors, interrupts and values in a cell, in a real JupyterLab."""

from __future__ import annotations

import re

from tests.browser import browser
from tests.patience import until
from tools.notebooks.page import LabSession

pytestmark = browser

CELLS = """# %%
import workbench
runner = workbench.load("demo", backend="eager")
runner

# %%
text, seen = "", None
while True:  # until it is stopped
    for event in runner.stream(["def fib(n):"] * 4, max_tokens=900, temperature=1.0, ignore_eos=True):
        text += event.text
        if seen is None and text:
            print("begun")
            seen = event

# %%
runner.load = workbench.load("dmo")

# %%
print("".join(event.text for event in runner.stream("def fib(n):", max_tokens=4, temperature=0)))
stream = runner.stream("def fib(n):", max_tokens=4)
kept = next(event for event in stream if event.kind == "decoded")
looked = runner.inspect(kept.request_id, positions=range(3))
stream.close()
looked

# %%
workbench.Experiment(question="What does <INT8> cost?", workload={"kind": "random"}, cache={"format": "int8"})

# %%
%tb
"""


def test_a_cell_is_stopped_an_error_is_one_line_and_values_are_tables(lab: LabSession) -> None:
    page = lab.open(lab.write("comfort.py", CELLS))
    page.run_cell(1)
    page.begin_cell(2)
    until(lambda: page.document()["cells"][1]["outputs"])
    page.interrupt()
    page.finish()
    (error,) = page.errors()
    assert error.name == "KeyboardInterrupt"
    assert page.evaluate("seen is not None and len(text) > 0") == "True"
    assert "requests: 0 running, 0 waiting; 0 of" in page.evaluate("runner")
    page.run_cell(3)
    errors = [output for output in page.document()["cells"][2]["outputs"] if output["output_type"] == "error"]
    plain = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in errors[0]["traceback"]]
    assert len(plain) == 1 and plain[0].startswith("WorkbenchError: no model 'dmo': not a folder here, nor one of demo")
    for cell in (4, 5, 6):
        page.run_cell(cell)
    assert page.root.locator(".wb-shown").count() == 3 and page.root.locator(".wb-shown img").count() == 24
    assert page.root.locator(".wb-shown details").count() == 1
    shown = [output for output in page.document()["cells"][5]["outputs"] if output["output_type"] == "error"]
    assert "engine/loaded_model.py" in "".join(shown[0]["traceback"])
    assert page.console_errors == [] and page.outside_requests == []
