"""Draw pages as cells: a rectangle with a tooltip for each, and one path for all marks of a kind."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from workbench import svg
from workbench.display import truncate_text
from workbench.widgets.pages.data import PageSnapshot

MAX_NAMED_OWNERS = 6  # sequences of a page with their names in its tooltip; the others have letters only
MAX_NAME_LETTERS = 24  # letters of a name in a tooltip


def letters(number: int) -> str:
    """Return the letters for the number of an owner: A, B, ... Z, AA, AB, ..."""
    caption = ""
    number += 1
    while number:
        number, rest = divmod(number - 1, 26)
        caption = chr(65 + rest) + caption
    return caption


class PageCells:
    """A collection of cells for the pages of one panel of a snapshot; `page` adds a cell, `markup` returns all
    cells."""

    def __init__(self, snapshot: PageSnapshot, panel: int, numbers: Mapping[str, int], chosen: str = ""):
        self.snapshot, self.panel, self.about = snapshot, panel, snapshot.panels[panel]
        self._numbers = [numbers[owner.name] for owner in snapshot.owners]
        self._letters = [letters(number) for number in self._numbers]
        names = [escape(truncate_text(owner.name, MAX_NAME_LETTERS)) for owner in snapshot.owners]
        self._owner_labels = [f"{letter} {name}" for letter, name in zip(self._letters, names, strict=True)]
        self._chosen = next((n for n, owner in enumerate(snapshot.owners) if owner.name == chosen), None)
        self._references = snapshot.references[panel].tolist()
        self._in_prefix_index = snapshot.in_prefix_index[panel].tolist()
        self._tokens = snapshot.census[panel].tokens.tolist()
        self._holders: dict[int, list[tuple[int, int]]] = {}
        self._written: set[int] = set()
        size = self.about.page_size
        for number, owner in enumerate(snapshot.owners):
            pages = owner.pages[panel]
            for place, page in enumerate(owner.held(panel)):
                if page:
                    self._holders.setdefault(page, []).append((number, place))
            before, after = int(snapshot.tokens_before[number, panel]), int(snapshot.tokens[number, panel])
            if after > before:
                self._written.update(owner.next_states[panel] or pages[before // size : -(-after // size)])
        self._tips: dict[int, str] = {}
        self._rects: list[str] = []
        self._texts: list[str] = []
        self._marks: dict[str, list[str]] = {"h": [], "k": [], "w": []}

    def idle_pages(self) -> list[int]:
        return [page for page, kept in enumerate(self._in_prefix_index) if kept and page not in self._holders]

    def page(self, page: int, x: float, y: float, wide: float, high: float, label: str = "") -> None:
        """Add the cell of one page; it shows `label`, or else the letters of the page's owner."""
        holders = self._holders.get(page)
        place = f'x="{x:g}" y="{y:g}" width="{wide:.4g}" height="{high:g}"'
        stop = ' tabindex="0"' if not self._rects else ' tabindex="-1"'
        tip = self._tips.get(page) or self._tips.setdefault(page, self._tip(page, holders))
        key = f'data-key="{self.panel}.{page}"{stop} data-tip="{tip}"'
        if holders is None:
            state = "id" if self._in_prefix_index[page] else "fr"
            dim = " dm" if self._chosen is not None else ""
            self._rects.append(f'<rect class="{state}{dim}" {place} {key}/>')
            if label and wide >= 20:
                self._texts.append(f'<text class="np" x="{x + wide / 2:g}" y="{y + high - 4:g}">{label}</text>')
            return
        number = self._numbers[holders[0][0]] % len(svg.SERIES_COLOURS)
        kind = f"c{number}" if len(holders) == 1 else "sh"
        dim = "" if self._chosen is None or any(owner == self._chosen for owner, _ in holders) else " dm"
        share = self._tokens[page] / self.about.page_size
        self._rects.append(f'<rect class="{kind}{" lo" if share < 1 else ""}{dim}" {place} {key}/>')
        if 0 < share < 1:
            level = high * share
            self._rects.append(
                f'<rect class="{kind} o{dim}" x="{x:g}" y="{y + high - level:.4g}" width="{wide:.4g}" '
                f'height="{level:.4g}"/>'
            )
        self._mark(page, len(holders), x, y, wide, high)
        caption = label or (self._letters[holders[0][0]] if len(holders) == 1 else f"{len(holders)}×")
        if wide >= 6.5 * len(caption) or (wide >= 13 and len(caption) <= 2):
            ink = "np" if share < 1 or len(holders) > 1 else f"n{number}"
            self._texts.append(f'<text class="{ink}" x="{x + wide / 2:g}" y="{y + high / 2 + 3.5:g}">{caption}</text>')

    def name(self, number: int, x: float, y: float, wide: float) -> str:
        """Draw a sequence's letters and name, which can be picked."""
        owner, colour = self.snapshot.owners[number], self._numbers[number] % len(svg.SERIES_COLOURS)
        what = "runs" if owner.running else "waits"
        held = ", ".join(f"{sum(page > 0 for page in owner.held(number))} of {panel.title.split(' · ')[0]}"
                         for number, panel in enumerate(self.snapshot.panels))  # fmt: skip
        dim = " dm" if self._chosen is not None and number != self._chosen else ""
        room = max(4, int((wide - 40) / 6.6))
        caption = truncate_text(owner.name, room - (0 if owner.running else 8)) + ("" if owner.running else " (waits)")
        return svg.group(
            f'<rect class="c{colour}" x="{x:g}" y="{y - 11:g}" width="26" height="14"/>',
            f'<g class="n"><text class="n{colour}" x="{x + 13:g}" y="{y:g}">{self._letters[number]}</text></g>',
            svg.text(x + 31, y, caption, class_="s"),
            class_=f"who{dim}", key=f"@{owner.name}", tip=f"{owner.name}: {what}; pages: {held}",
            tabindex=0 if number == 0 else -1,
        )  # fmt: skip

    def markup(self) -> str:
        marks = "".join(f'<path class="{kind}" d="{"".join(d)}"/>' for kind, d in self._marks.items() if d)
        texts = f'<g class="n" font-size="9">{"".join(self._texts)}</g>'
        return f'<g class="cells">{"".join(self._rects)}{marks}{texts}</g>'

    def _mark(self, page: int, holders: int, x: float, y: float, wide: float, high: float) -> None:
        if holders > 1:
            self._marks["h"].append(hatch(x, y, wide, high))
        if self._in_prefix_index[page]:
            self._marks["k"].append(corner(x + wide, y, min(6.0, wide / 2)))
        if page in self._written:
            self._marks["w"].append(f"M{x:g} {y:g}h{wide:.4g}v{high:g}h-{wide:.4g}z")

    def _tip(self, page: int, holders: list[tuple[int, int]] | None) -> str:
        size, count = self.about.page_size, self._references[page]
        what = "place" if self.about.on_cpu else "page"
        where = f"{what} {page} of {_table(self.about.title)}"
        if holders is None:
            if not self._in_prefix_index[page]:
                return f"{where}: free"
            return f"{where}: idle&#10;{size} tokens that the prefix index keeps · 1 reference"
        caption = "&#10;".join(
            f"{self._owner_labels[owner]}: {self._use(owner, place)}" for owner, place in holders[:MAX_NAMED_OWNERS]
        )
        if len(holders) > MAX_NAMED_OWNERS:
            caption += "&#10;and " + " ".join(self._letters[owner] for owner, _ in holders[MAX_NAMED_OWNERS:])
        known = ", one the prefix index" if self._in_prefix_index[page] else ""
        more = f"{count} reference{'s' if count != 1 else ''}{known}"
        return f"{where}&#10;{caption}&#10;{self._tokens[page]} of {size} tokens · {more}"

    def _use(self, owner: int, place: int) -> str:
        if place < len(self.snapshot.owners[owner].pages[self.panel]):
            return f"its page {place + 1}"
        return "for the recurrent state of its next step"


def hatch(x: float, y: float, wide: float, high: float) -> str:
    """Return the path of two strokes from the lower left to the upper right."""
    middle, side = x + wide / 2, y + high / 2
    return f"M{x:g} {side:g}L{middle:.4g} {y:g}M{middle:.4g} {y + high:g}L{x + wide:.4g} {side:g}"


def corner(x: float, y: float, side: float) -> str:
    return f"M{x - side:.4g} {y:g}h{side:.4g}v{side:.4g}z"


def mark(kind: str, x: float, y: float) -> str:
    """Draw a sample cell for the legend, 14 pixels wide."""
    state = kind if kind in ("id", "fr") else "sh" if kind == "shared" else "c4"
    cell = f'<rect class="{state}" x="{x:g}" y="{y:g}" width="14" height="14"/>'
    if kind == "c4":
        return (
            f'<rect class="c4 lo" x="{x:g}" y="{y:g}" width="14" height="14"/>'
            f'<rect class="c4" x="{x:g}" y="{y + 6:g}" width="14" height="8"/>'
        )
    if kind == "shared":
        return cell + f'<path class="h" d="{hatch(x, y, 14, 14)}"/>'
    if kind == "known":
        return cell + f'<path class="k" d="{corner(x + 14, y, 6)}"/>'
    if kind == "written":
        return cell + f'<path class="w" d="M{x:g} {y:g}h14v14h-14z"/>'
    return cell


def _table(title: str) -> str:
    return escape(title.split(" · ")[0])
