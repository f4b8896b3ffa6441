"""Measure the widgets in a real JupyterLab and a real Chromium: `python -m tools.lab_bars [--record]`.

Four limits: `import workbench.widgets` and every name in it, beyond torch; from a press on Run to the first token on
the screen, warm; a redraw of 1,000 pages and 64 requests, in the kernel and in the browser; the size of a notebook in
which 2,000 tokens were generated.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from tools.notebooks.browser import Browser
from tools.notebooks.page import LabSession, NotebookPage
from workbench.lab.server import LabServer
from workbench.machine.environment import environment
from workbench.runs.folder import write_dated_record

ROUNDS = 5
BARS = {"import_s": 2.0, "first_token_s": 1.0, "redraw_ms": 100.0, "notebook_bytes": 5_000_000}
IMPORTS = """
import time, torch
began = time.perf_counter()
from workbench import widgets
[getattr(widgets, name) for name in dir(widgets)]
print(time.perf_counter() - began)
"""
PLAYGROUND = """
# %%
from workbench import widgets
playground = widgets.Playground(prompt="def fibonacci(n):\\n")
playground

# %%
playground.experiment
"""
PAGES = """
# %%
import workbench
from workbench import widgets
runner = workbench.load("demo", backend="eager", max_num_seqs=64, pages=1000, page_size=16)
pages = widgets.PageMap(runner)
pages

# %%
from workbench.request import Request, SamplingParameters
long = SamplingParameters(max_tokens=12, ignore_eos=True)
requests = [Request(f"r{n}", tuple(range(5, 235)), long, prompt="") for n in range(64)]
events = list(runner.stream(requests))
len(pages.snapshots)

# %%
timeline = widgets.Timeline(events)
timeline
"""
# From the press to the frame that shows the first token.
PRESS = """async root => {
  const run = [...root.querySelectorAll("button")].find(b => b.textContent.trim() === "Run");
  const began = performance.now();
  run.click();
  for (;;) {
    await new Promise(requestAnimationFrame);
    if (run.disabled && root.querySelector(".wb-tokens [data-grows] b")) return performance.now() - began;
    if (performance.now() - began > 60000) return null;
  }
}"""
IDLE = "root => ![...root.querySelectorAll('button')].find(b => b.textContent.trim() === 'Run').disabled"
# The browser's time to lay out and paint new markup.
REDRAW = """async root => {
  const view = root.querySelector(".wb-picture > div");
  const markup = view.innerHTML;
  await new Promise(requestAnimationFrame);
  const began = performance.now();
  view.innerHTML = markup;
  view.getBoundingClientRect();
  const drawn = performance.now() - began;
  await new Promise(requestAnimationFrame);
  return [drawn, markup.length];
}"""


def import_s() -> float:
    """Return the seconds of importing the widgets beyond torch, the median over fresh processes."""
    command = [sys.executable, "-c", IMPORTS]
    found = (subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(ROUNDS))
    return median(map(float, found))


def first_token_s(lab: LabSession) -> list[float]:
    """Return the seconds from each press on Run to its first token; a first press as a warm-up is left out."""
    page = lab.open(lab.write("press.py", PLAYGROUND))
    page.run_all()
    root = page.widget("wb-playground").first
    found = []
    for _ in range(ROUNDS + 1):
        found.append(root.evaluate(PRESS) / 1000)
        page.tab.wait_for_function(IDLE, arg=root.element_handle())
    return found[1:]


def notebook_bytes(lab: LabSession, tokens: int = 2000) -> int:
    """Return the saved size in bytes of a notebook with a playground that has generated `tokens` tokens.

    Two samples generate them, as the demo model's context holds 1,024.
    """
    page = lab.open(lab.write("long.py", PLAYGROUND))
    page.run_all()
    _set(page, tokens)
    page.evaluate("playground.run()")
    while page.evaluate("playground.running") == "True":
        time.sleep(0.5)
    page.settle()
    made = int(page.evaluate("playground.played.num_tokens"))
    if made < tokens:
        raise SystemExit(f"only {made} of {tokens} tokens were generated")
    return len(json.dumps(page.document(), indent=1, ensure_ascii=False).encode())


def _set(page: NotebookPage, tokens: int) -> None:
    change = f'"sampling": {{"n": 2, "max_tokens": {tokens // 2}, "ignore_eos": True, "temperature": 0.8, "seed": 1}}'
    page.evaluate(f"playground.settings.write(playground.experiment.model_dump(mode='json') | {{{change}}})")


def redraws(lab: LabSession) -> dict[str, Any]:
    """Return the milliseconds of one redraw in the kernel and in the browser, and the length of the markup, for each
    widget."""
    page = lab.open(lab.write("pages.py", PAGES))
    page.run_all()
    page.evaluate("setattr(pages, 'step', pages.snapshots[len(pages.snapshots) // 2].step)")
    page.settle()
    found: dict[str, Any] = {}
    for name, css in (("pages", "wb-pagemap"), ("timeline", "wb-timeline")):
        kernel = float(
            page.evaluate(f"min(__import__('timeit').repeat({name}.picture, number=1, repeat={ROUNDS})) * 1000")
        )
        drawn = [page.widget(css).first.evaluate(REDRAW) for _ in range(ROUNDS)]
        browser = median(ms for ms, _ in drawn)
        found[name] = {"kernel_ms": kernel, "browser_ms": browser, "both_ms": kernel + browser, "letters": drawn[0][1]}
    return found


def main(record: Annotated[bool, typer.Option("--record", help="keep it in experiments/records")] = False) -> None:
    found: dict[str, Any] = {"import_s": import_s()}
    with ExitStack() as stack:
        server = stack.enter_context(LabServer())
        lab = LabSession(server, stack.enter_context(Browser()))
        presses = first_token_s(lab)
        found |= {"first_token_s": median(presses), "first_token_each_s": presses}
        found["redraw"] = redraws(lab)
        found["redraw_ms"] = max(each["both_ms"] for each in found["redraw"].values())
        found["notebook_bytes"] = notebook_bytes(lab)
    found["bars"] = {name: {"bar": bar, "met": found[name] < bar} for name, bar in BARS.items()}
    print(json.dumps(found, indent=2))
    if record:
        kept = {"date": datetime.now(UTC).isoformat(), "summary": found, "environment": environment()}
        print(write_dated_record(kept, Path(__file__).parents[1] / "experiments" / "records", "lab_bars"))


if __name__ == "__main__":
    typer.run(main)
