"""Screenshots of widgets as files for a README: one a widget, in the light theme and optionally the dark one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workbench.lab.page import NotebookPage


class WidgetScreenshots:
    """Screenshots of widgets in a folder.

    `pagemap.png` is the first `wb-pagemap`; later ones have their notebook's name as well.
    """

    def __init__(self, folder: Path, dark: bool = False) -> None:
        self.folder, self.dark = folder, dark
        self.taken: list[Path] = []

    def take(self, page: NotebookPage) -> None:
        names = [self._name(widget.name, Path(page.path).stem) for widget in page.widgets()]
        self._shoot(page, names, "")
        if self.dark:
            page.lab.theme("dark")
            page.settle()
            self._shoot(page, names, "-dark")
            page.lab.theme("light")

    def _name(self, widget: str, notebook: str) -> str:
        plain = widget.removeprefix("wb-")
        wanted = [plain, f"{plain}-{notebook}", *(f"{plain}-{notebook}-{n}" for n in range(2, 1000))]
        if widget == "widget":
            wanted = wanted[1:]
        name = next(name for name in wanted if self.folder / f"{name}.png" not in self.taken)
        self.taken.append(self.folder / f"{name}.png")
        return name

    def _shoot(self, page: NotebookPage, names: list[str], suffix: str) -> None:
        for place, name in enumerate(names):
            output = page.views().nth(place)
            ours = output.locator('[class*="wb-"]')
            page.screenshot(self.folder / f"{name}{suffix}.png", ours.first if ours.count() else output)
