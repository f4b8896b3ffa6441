"""Drive a notebook that is open in JupyterLab: run its cells, wait for them, and read its outputs."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.notebooks.browser import Browser
from workbench.errors import WorkbenchError
from workbench.lab.execute import CellError, cell_errors, code_cells
from workbench.lab.server import LIMIT_S, LabServer

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

# JupyterLab gives every output the name of its type but those that hold a widget.
VIEWS = ".jp-Cell-outputArea > .jp-OutputArea-child > .jp-OutputArea-output:not([data-mime-type])"
DRAW_TIMEOUT_S = 10.0  # for a widget to be drawn, and for the page to be still
MARGIN = 400  # pixels of JupyterLab's own bars above and below a notebook, and more
ERROR_TEXTS = ("Error displaying widget", "Error creating widget", "Error rendering", "Failed to load model")


@dataclass(frozen=True)
class WidgetOutput:
    """An output that contains a widget: its cell, and its CSS class `wb-...` (`widget` for other libraries'
    widgets)."""

    cell: int
    name: str

    def __str__(self) -> str:
        return f"cell {self.cell} ({self.name})"


class LabSession:
    """A JupyterLab server and a browser tab, used for many notebooks one after another.

    Every timeout is multiplied by `timeout_factor`, for slow machines and contention.
    """

    def __init__(self, server: LabServer, browser: Browser, timeout_factor: float = 1.0) -> None:
        self.server, self.browser, self.timeout_factor = server, browser, timeout_factor
        self.tab = tab = browser.tab(server.origin)
        tab.page.set_default_timeout(LIMIT_S * timeout_factor * 1000)
        tab.page.goto(f"{server.origin}/lab/workspaces/check?token={server.token}&reset")
        tab.page.wait_for_function("window.jupyterapp?.restored")
        tab.page.evaluate("window.jupyterapp.restored.then(() => null)")
        self._open: NotebookPage | None = None

    def write(self, name: str, source: str) -> str:
        """Write a notebook, given as percent text or .ipynb, into the server's root, and return its path there."""
        path = self.server.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
        return name

    def open(self, path: str) -> NotebookPage:
        """Open a notebook as a double click does, with a kernel of its own; the previous one is closed."""
        self.close()
        self._open = NotebookPage(self, path)
        return self._open

    def close(self) -> None:
        """Shut the kernel down and close the notebook; nothing is saved."""
        if self._open is not None:
            self._open = None
            self.tab.page.evaluate("bench.close()")

    def theme(self, name: str) -> None:
        """Set the theme, `light` or `dark`."""
        self.tab.page.evaluate("name => bench.theme(name)", f"JupyterLab {name.capitalize()}")

    def shown_offline(self, html: Path, outputs: list[tuple[str, int]]) -> tuple[list[bool], list[str]]:
        """View an exported page without a network.

        Returns whether each output (cell id, index) shows a picture, and the requests that the page made.
        """
        tab = self.browser.tab(None, offline=True)
        try:
            tab.page.goto(html.resolve().as_uri(), wait_until="load")
            return [
                tab.page.evaluate("output => bench.shown(output)", list(output)) for output in outputs
            ], tab.outside_requests
        finally:
            tab.close()


class NotebookPage:
    """An open notebook with an idle kernel. `tab` is Playwright's page, for anything that these methods do not
    offer."""

    def __init__(self, lab: LabSession, path: str) -> None:
        self.lab, self.path = lab, path
        self.tab: Page = lab.tab.page
        self._since = len(lab.tab.console_errors), len(lab.tab.outside_requests), len(lab.server.outside_requests())
        self.tab.evaluate("path => bench.open(path)", path)
        self.tab.wait_for_function("bench.kernel()?.status === 'idle'")
        self.root: Locator = self.tab.locator(f'[id="{self.tab.evaluate("bench.panel.id")}"]')

    def run_all(self, timeout_s: float | None = None) -> None:
        """Run every cell and wait until outputs have settled; a failing cell ends the run, as in JupyterLab."""
        self.begin_all()
        self.finish(timeout_s)

    def run_cell(self, cell: int, timeout_s: float | None = None) -> None:
        """Run one code cell, counted from 1."""
        self.begin_cell(cell)
        self.finish(timeout_s)

    def begin_all(self) -> None:
        """Start running every cell, without waiting."""
        self.tab.evaluate("bench.runAll()")

    def begin_cell(self, cell: int) -> None:
        """Start running one code cell, counted from 1, without waiting."""
        self.tab.evaluate("index => bench.runCell(index)", code_cells(self.document())[cell - 1][0])

    def finish(self, timeout_s: float | None = None) -> None:
        """Wait for the cells that were started.

        After `timeout_s` (ten minutes times the session's timeout factor by default) the kernel is interrupted, and a
        WorkbenchError names the cell still running.
        """
        from playwright.sync_api import TimeoutError as PlaywrightTimeout

        timeout_s = LIMIT_S * self.lab.timeout_factor if timeout_s is None else timeout_s
        try:
            self.tab.wait_for_function("bench.ran !== null", timeout=timeout_s * 1000)
        except PlaywrightTimeout:
            index = self.tab.evaluate("bench.running()")
            self.interrupt()
            number = next((n for n, (i, _) in enumerate(code_cells(self.document()), 1) if i == index), 0)
            raise WorkbenchError(f"{self.path}: cell {number} still runs after {timeout_s:g} s") from None
        self.settle()

    def settle(self, quiet_s: float = 0.3) -> bool:
        """Wait until the kernel has answered, widgets are drawn and nothing has changed for `quiet_s`; False on
        timeout.

        Once the console reports errors, undrawn widgets get the short timeout only.
        """
        limit_s = DRAW_TIMEOUT_S * self.lab.timeout_factor
        self.tab.evaluate("limit => bench.answered(limit)", limit_s * 1000)
        if not self._drawn(DRAW_TIMEOUT_S) and not self.console_errors:
            self._drawn(limit_s - DRAW_TIMEOUT_S)
        return self.tab.evaluate("([a, b]) => bench.settled(a, b)", [quiet_s * 1000, limit_s * 1000])

    def _drawn(self, limit_s: float) -> bool:
        """Wait until every widget is drawn, and return whether they are (`errors` names the others)."""
        from playwright.sync_api import TimeoutError as PlaywrightTimeout

        if limit_s <= 0:  # Playwright takes 0 for no limit
            return False
        with suppress(PlaywrightTimeout):
            self.tab.wait_for_function("bench.views().every(view => view.drawn)", timeout=limit_s * 1000)
            return True
        return False

    def interrupt(self) -> None:
        """Interrupt the kernel, as the stop button does."""
        self.tab.evaluate("bench.kernel().interrupt()")

    def save(self) -> None:
        """Save the notebook, as Ctrl+S does."""
        self.tab.evaluate("bench.save()")

    def restart(self) -> None:
        """Restart the kernel, without running anything."""
        self.tab.evaluate("bench.kernel().restart()")
        self.tab.wait_for_function("bench.kernel()?.status === 'idle'")

    def reopen(self) -> None:
        """Close the notebook and open it again; its kernel goes on."""
        self.tab.evaluate("path => bench.reopen(path)", self.path)
        self.tab.wait_for_function("bench.kernel()?.status === 'idle'")
        self.root = self.tab.locator(f'[id="{self.tab.evaluate("bench.panel.id")}"]')
        self.settle()

    def shut_down(self) -> None:
        """Shut the kernel down; the notebook stays open."""
        self.tab.evaluate("bench.panel.sessionContext.shutdown()")

    def evaluate(self, expression: str) -> str:
        """Evaluate an expression in the kernel, and return its repr."""
        answer = self.tab.evaluate("text => bench.ask(text)", expression)
        if answer["status"] != "ok":
            raise WorkbenchError(f"{self.path}: {expression}: {answer['ename']}: {answer['evalue']}")
        return answer["data"]["text/plain"]

    def document(self) -> dict[str, Any]:
        """Return the notebook as it would be saved now: nbformat, outputs included."""
        return self.tab.evaluate("bench.document()")

    def executed(self) -> tuple[int, int]:
        """Return the number of code cells that have run, and the number of all code cells."""
        cells = [cell for _, cell in code_cells(self.document()) if "".join(cell["source"]).strip()]
        return sum(cell["execution_count"] is not None for cell in cells), len(cells)

    def errors(self) -> list[CellError]:
        """Return the errors of cells, of their threads, of widgets' callbacks, and of widgets that could not be
        drawn."""
        called_back = [CellError(0, name, message) for name, message in self.tab.evaluate("bench.calledBack")]
        undrawn = [
            CellError(view["cell"], "Widget", view["text"] or "was not drawn", view["line"])
            for view in self.tab.evaluate("bench.views()")
            if not view["drawn"] or any(words in view["text"] for words in ERROR_TEXTS)
        ]
        return [*cell_errors(self.document()), *called_back, *undrawn]

    @property
    def console_errors(self) -> list[str]:
        return self.lab.tab.console_errors[self._since[0] :]

    @property
    def outside_requests(self) -> list[str]:
        """Return the refused requests of the page and the kernel to other machines."""
        kernel = [f"kernel: {host}" for host in self.lab.server.outside_requests()[self._since[2] :]]
        return self.lab.tab.outside_requests[self._since[1] :] + kernel

    def widget(self, name: str) -> Locator:
        """Return a Playwright locator of the widgets with this CSS class, such as `wb-pagemap`."""
        return self.root.locator(f".{name}")

    def views(self) -> Locator:
        """Return a Playwright locator of the outputs that contain a widget."""
        return self.root.locator(VIEWS)

    def widgets(self) -> list[WidgetOutput]:
        """Return the outputs that contain a widget, in order."""
        return [WidgetOutput(view["cell"], view["name"]) for view in self.tab.evaluate("bench.views()")]

    def screenshot(self, path: Path, of: Locator | None = None) -> Path:
        """Save a PNG of a locator's first match, or of the whole tab."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if of is None:
            self.tab.screenshot(path=path)
        else:
            box, size = of.first.bounding_box(), self.tab.viewport_size
            if box and size and box["height"] + MARGIN > size["height"]:  # else the notebook cuts it off
                self.tab.set_viewport_size({"width": size["width"], "height": round(box["height"]) + MARGIN})
            of.first.screenshot(path=path, animations="disabled")
            if size:
                self.tab.set_viewport_size(size)
        return path

    def close(self) -> None:
        self.lab.close()
