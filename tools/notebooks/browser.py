"""Run a headless Chromium with a separate profile, and tabs that record errors and requests to other machines."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from workbench.lab.start import chromium, missing_browser, require

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, ConsoleMessage, Page, Playwright, Route, WebSocket

ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
             "--disable-component-update", "--disable-sync")  # fmt: skip
LOCAL_SCHEMES = ("data", "blob", "about", "chrome", "chrome-error")
DRIVER = Path(__file__).with_name("driver.js")


@dataclass
class Tab:
    """One tab of the browser. Requests of its page to other machines are refused and recorded in `outside_requests`."""

    page: Page
    console_errors: list[str] = field(default_factory=list)
    outside_requests: list[str] = field(default_factory=list)

    def close(self) -> None:
        self.page.context.close()


class _Driver:
    """Playwright's own process, of which a Python process may have one: shared by all browsers that are open."""

    users = 0
    playwright: Playwright

    @classmethod
    def enter(cls) -> Playwright:
        if not cls.users:
            from playwright.sync_api import sync_playwright

            cls.playwright = sync_playwright().start()
        cls.users += 1
        return cls.playwright

    @classmethod
    def leave(cls) -> None:
        cls.users -= 1
        if not cls.users:
            cls.playwright.stop()


class Browser:
    """A browser to use as `with Browser() as browser: tab = browser.tab("http://127.0.0.1:8888")`."""

    def __enter__(self) -> Browser:
        require(missing_browser())
        playwright = _Driver.enter()
        try:
            self._chromium = playwright.chromium.launch(
                executable_path=chromium(), headless=True, args=list(ARGUMENTS)
            )
        except BaseException:
            _Driver.leave()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._chromium.close()
        _Driver.leave()

    def tab(self, origin: str | None, width: int = 1400, height: int = 1600, offline: bool = False) -> Tab:
        """Open a tab that may connect to `origin` only; with None it reads local files and nothing else."""
        context = self._chromium.new_context(viewport={"width": width, "height": height}, offline=offline)
        context.add_init_script(path=DRIVER)
        tab = Tab(context.new_page())
        _watch(context, tab, origin)
        return tab


def _watch(context: BrowserContext, tab: Tab, origin: str | None) -> None:
    def is_here(url: str) -> bool:
        parts = urlsplit(url)
        if parts.scheme in LOCAL_SCHEMES or (origin is None and parts.scheme == "file"):
            return True
        return origin is not None and parts.netloc == urlsplit(origin).netloc

    def refuse(route: Route) -> None:
        tab.outside_requests.append(route.request.url)
        route.abort("internetdisconnected")

    def hear(message: ConsoleMessage) -> None:
        if message.type == "error":
            tab.console_errors.append(message.text)

    def connect(socket: WebSocket) -> None:
        if not is_here(socket.url):
            tab.outside_requests.append(socket.url)

    context.route(lambda url: not is_here(url), refuse)
    context.on("console", hear)
    context.on("weberror", lambda failure: tab.console_errors.append(str(failure.error)))
    tab.page.on("websocket", connect)
