"""A notebook that is open in JupyterLab, in the words of the person in front of it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import WorkbenchError
from workbench.lab.browser import Browser
from workbench.lab.cells import CellError, cell_errors, code_cells
from workbench.lab.server import LIMIT_S, LabServer

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

# JupyterLab gives every output the name of its type but those that hold a widget.
VIEWS = ".jp-Cell-outputArea > .jp-OutputArea-child > .jp-OutputArea-output:not([data-mime-type])"
DRAWN_S = 10.0  # for a widget to be drawn, and for the page to be still
BROKEN = ("Error displaying widget", "Error creating widget", "Error rendering", "Failed to load model")


@dataclass(frozen=True)
class Shown:
    """An output that holds a widget: its cell, and its class `wb-...` (`widget` for anybody else's)."""

    cell: int
    name: str

    def __str__(self) -> str:
        return f"cell {self.cell} ({self.name})"


class Lab:
    """A server and a browser that stay for many notebooks.

    Every limit is `patience` times as long as usual: for a machine that is slow, or busy with something else.
    """

    def __init__(self, server: LabServer, browser: Browser, patience: float = 1.0) -> None:
        self.server, self.browser, self.patience = server, browser, patience
        self.tab = tab = browser.tab(server.origin)
        tab.page.set_default_timeout(LIMIT_S * patience * 1000)
        tab.page.goto(f"{server.origin}/lab/workspaces/check?token={server.token}&reset")
        tab.page.wait_for_function("window.jupyterapp?.restored")
        tab.page.evaluate("window.jupyterapp.restored.then(() => null)")
        self._open: NotebookPage | None = None

    def write(self, name: str, source: str) -> str:
        """Put a notebook, as percent text or .ipynb, into the server's root; its path there comes back."""
        path = self.server.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
        return name

    def open(self, path: str) -> NotebookPage:
        """Open a notebook as a double click does, with a kernel of its own; the one before it is closed."""
        self.close()
        self._open = NotebookPage(self, path)
        return self._open

    def close(self) -> None:
        """Shut the kernel down and close the notebook; nothing is saved."""
        if self._open is not None:
            self._open = None
            self.tab.page.evaluate("bench.close()")

    def theme(self, name: str) -> None:
        """`light` or `dark`."""
        self.tab.page.evaluate("name => bench.theme(name)", f"JupyterLab {name.capitalize()}")

    def shown_offline(self, html: Path, outputs: list[tuple[str, int]]) -> tuple[list[bool], list[str]]:
        """Whether each of an exported page's outputs (cell id, place) shows a picture without a network, and what the
        page asked for."""
        tab = self.browser.tab(None, offline=True)
        try:
            tab.page.goto(html.resolve().as_uri(), wait_until="load")
            return [
                tab.page.evaluate("output => bench.shown(output)", list(output)) for output in outputs
            ], tab.outside_requests
        finally:
            tab.close()


class NotebookPage:
    """A notebook, open, with an idle kernel. `tab` is Playwright's page for whatever these verbs do not say."""

    def __init__(self, lab: Lab, path: str) -> None:
        self.lab, self.path = lab, path
        self.tab: Page = lab.tab.page
        self._since = len(lab.tab.console_errors), len(lab.tab.outside_requests), len(lab.server.outside_requests())
        self.tab.evaluate("path => bench.open(path)", path)
        self.tab.wait_for_function("bench.kernel()?.status === 'idle'")
        self.root: Locator = self.tab.locator(f'[id="{self.tab.evaluate("bench.panel.id")}"]')

    def run_all(self, timeout_s: float | None = None) -> None:
        """Run every cell and wait until what it shows has settled; a failing cell ends the run, as in JupyterLab."""
        self.begin_all()
        self.finish(timeout_s)

    def run_cell(self, cell: int, timeout_s: float | None = None) -> None:
        """Run one code cell, counted from 1."""
        self.begin_cell(cell)
        self.finish(timeout_s)

    def begin_all(self) -> None:
        """Run every cell, and wait for none."""
        self.tab.evaluate("bench.runAll()")

    def begin_cell(self, cell: int) -> None:
        """Run one code cell, counted from 1, and do not wait for it."""
        self.tab.evaluate("index => bench.runCell(index)", code_cells(self.document())[cell - 1][0])

    def finish(self, timeout_s: float | None = None) -> None:
        """Wait for what was begun. Raise an error that names the cell still running after `timeout_s` (without it:
        after ten minutes, times the lab's patience), and interrupt it."""
        from playwright.sync_api import TimeoutError as PlaywrightTimeout

        timeout_s = LIMIT_S * self.lab.patience if timeout_s is None else timeout_s
        try:
            self.tab.wait_for_function("bench.ran !== null", timeout=timeout_s * 1000)
        except PlaywrightTimeout:
            index = self.tab.evaluate("bench.running()")
            self.interrupt()
            number = next((n for n, (i, _) in enumerate(code_cells(self.document()), 1) if i == index), 0)
            raise WorkbenchError(f"{self.path}: cell {number} still runs after {timeout_s:g} s") from None
        self.settle()

    def settle(self, quiet_s: float = 0.3) -> bool:
        """Wait until the kernel has answered, widgets are drawn and nothing has changed for `quiet_s`; False where it
        never was still. What is not drawn while the console tells of errors is waited for less patiently."""
        limit_s = DRAWN_S * self.lab.patience
        self.tab.evaluate("limit => bench.answered(limit)", limit_s * 1000)
        if not self._drawn(DRAWN_S) and not self.console_errors:
            self._drawn(limit_s - DRAWN_S)
        return self.tab.evaluate("([a, b]) => bench.settled(a, b)", [quiet_s * 1000, limit_s * 1000])

    def _drawn(self, limit_s: float) -> bool:
        """Wait until every widget is; whether they are (`errors` says which are not)."""
        from playwright.sync_api import TimeoutError as PlaywrightTimeout

        if limit_s <= 0:  # Playwright takes 0 for no limit
            return False
        with suppress(PlaywrightTimeout):
            self.tab.wait_for_function("bench.views().every(view => view.drawn)", timeout=limit_s * 1000)
            return True
        return False

    def interrupt(self) -> None:
        """The stop button."""
        self.tab.evaluate("bench.kernel().interrupt()")

    def ask(self, expression: str) -> str:
        """What the kernel says of an expression, as its repr: the other end of a widget."""
        answer = self.tab.evaluate("text => bench.ask(text)", expression)
        if answer["status"] != "ok":
            raise WorkbenchError(f"{self.path}: {expression}: {answer['ename']}: {answer['evalue']}")
        return answer["data"]["text/plain"]

    def document(self) -> dict[str, Any]:
        """The notebook as it would be saved now: nbformat, outputs included."""
        return self.tab.evaluate("bench.document()")

    def executed(self) -> tuple[int, int]:
        """How many code cells have run, and how many there are."""
        cells = [cell for _, cell in code_cells(self.document()) if "".join(cell["source"]).strip()]
        return sum(cell["execution_count"] is not None for cell in cells), len(cells)

    def errors(self) -> list[CellError]:
        """Errors of cells, of threads they started, of widgets' callbacks, and of widgets that could not be drawn."""
        called_back = [CellError(0, name, message) for name, message in self.tab.evaluate("bench.calledBack")]
        undrawn = [
            CellError(view["cell"], "Widget", view["text"] or "was not drawn", view["line"])
            for view in self.tab.evaluate("bench.views()")
            if not view["drawn"] or any(words in view["text"] for words in BROKEN)
        ]
        return [*cell_errors(self.document()), *called_back, *undrawn]

    @property
    def console_errors(self) -> list[str]:
        return self.lab.tab.console_errors[self._since[0] :]

    @property
    def outside_requests(self) -> list[str]:
        """What the page and the kernel asked of other machines; all of it was refused."""
        kernel = [f"kernel: {host}" for host in self.lab.server.outside_requests()[self._since[2] :]]
        return self.lab.tab.outside_requests[self._since[1] :] + kernel

    def widget(self, name: str) -> Locator:
        """The widgets with this CSS class, such as `wb-pagemap`."""
        return self.root.locator(f".{name}")

    def views(self) -> Locator:
        """The outputs that hold a widget."""
        return self.root.locator(VIEWS)

    def widgets(self) -> list[Shown]:
        """The outputs that hold a widget, in order."""
        return [Shown(view["cell"], view["name"]) for view in self.tab.evaluate("bench.views()")]

    def screenshot(self, path: Path, of: Locator | None = None) -> Path:
        """A PNG of a locator's first match, or of the whole tab."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if of is None:
            self.tab.screenshot(path=path)
        else:
            of.first.screenshot(path=path, animations="disabled")
        return path

    def close(self) -> None:
        self.lab.close()
