"""A snapshot of pages as a picture: what happened to each panel's pages over the steps, and every page by its owner.

Owners have letters beside colours, shared pages hatching, idle ones dashes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from workbench.widgets import svg
from workbench.widgets.pages.cells import PageCells, mark
from workbench.widgets.pages.snapshot import PageSnapshot
from workbench.widgets.pages.strip import STRIP_HEIGHT, PATTERNS, draw_strip

LAYOUTS = ("by page", "by sequence")
WIDTH = 900.0
NAMES, TOKENS = 150.0, 70.0  # of a row of a sequence: its name, and how much of it stands
LEGEND_COLUMN = 225.0
STYLE = (
    ".wb-pic .fr{fill:currentColor;fill-opacity:.05}"
    ".wb-pic .id{fill:currentColor;fill-opacity:.05;stroke:currentColor;stroke-opacity:.75;stroke-dasharray:2 2}"
    ".wb-pic .sh{fill:#7d7d7d}.wb-pic .lo{fill-opacity:.25}.wb-pic .dm{opacity:.18}"
    ".wb-pic .o{pointer-events:none}.wb-pic .h{pointer-events:none;fill:none;stroke:#fff;stroke-width:2.2}"
    ".wb-pic .k{pointer-events:none;fill:currentColor}"
    ".wb-pic .w{pointer-events:none;fill:none;stroke:currentColor;stroke-width:2}"
    ".wb-pic .n text{pointer-events:none;text-anchor:middle;fill:#000}.wb-pic .n .n0{fill:#fff}"
    ".wb-pic .n .np{fill:currentColor;stroke:var(--jp-layout-color0,#fff);stroke-width:2.5;paint-order:stroke}"
    ".wb-pic .bi{fill:currentColor;fill-opacity:.16}"
    ".wb-pic .b{font-weight:600}.wb-pic .s{font-size:11px}"
)


def draw_page_map(
    snapshot: PageSnapshot,
    history: Sequence[PageSnapshot],
    numbers: Mapping[str, int],
    layout: str = "by page",
    chosen: str = "",
    note: str = "",
) -> str:
    """`seen` is shown, one of `history`, all the snapshots there are; `numbers` are those of the owners, which give
    them their letters and colours; what `chosen` does not hold is dimmed."""
    caption = f"after step {snapshot.step - 1}" if snapshot.between_steps else f"what step {snapshot.step} is computed on"
    parts = [svg.tag("style", STYLE), PATTERNS, svg.text(8, 17, caption, class_="b")]
    if note:
        parts.append(svg.text(WIDTH - 8, 17, note, class_="s faint", text_anchor="end"))
    y = 28.0
    for panel in range(len(snapshot.panels)):
        parts += [svg.text(8, y + 12, snapshot.panels[panel].title, class_="b"), _counts(snapshot, panel, y + 27)]
        y += 34
        used = max(each.last_used_page[panel] for each in history)
        if not used:  # there is nothing to be seen, and was not
            y += 4
            continue
        if len(history) > 1:
            parts.append(draw_strip(snapshot, history, panel, numbers, 8, y, WIDTH - 90))
            y += STRIP_HEIGHT + 10
        draw = _by_page if layout == LAYOUTS[0] else _by_sequence
        markup, high = draw(PageCells(snapshot, panel, numbers, chosen), y, used)
        parts.append(markup)
        y += high + 12
    if layout == LAYOUTS[0]:
        markup, high = _owners(snapshot, numbers, chosen, y)
        parts.append(markup)
        y += high
    parts.append(_legend(y + 8))
    return svg.document(WIDTH, y + 38, *parts, title=f"Pages of the cache: {caption}")


def _counts(seen: PageSnapshot, panel: int, y: float) -> str:
    about, count = seen.panels[panel], seen.census[panel]
    one, several = int((count.num_owners == 1).sum()), seen.num_shared(panel)
    if about.on_cpu:
        caption = f"{about.pages} places: {one} of preempted sequences, {seen.num_idle(panel)} of the prefix index"
    else:
        slots, filled = (one + several) * about.page_size, int(count.tokens[count.num_owners > 0].sum())
        caption = (
            f"{about.pages} pages of {about.page_size} tokens: {one} held by one sequence, {several} by several, "
            f"{seen.num_idle(panel)} idle (the prefix index alone)"
        )
        share = f", {filled / slots:.0%} of their slots filled" if slots else ""
        return svg.text(8, y, f"{caption}, {seen.num_free(panel)} free{share}", class_="s faint")
    return svg.text(8, y, f"{caption}, {seen.num_free(panel)} free", class_="s faint")


def _by_page(cells: PageCells, y: float, used: int) -> tuple[str, float]:
    pages = cells.about.pages
    side = next(side for most, side in ((80, 26.0), (300, 20.0), (1300, 16.0), (10**9, 10.0)) if used <= most)
    columns = int((WIDTH - 16) // side)
    count = min(pages, -(-max(used, columns) // columns) * columns)
    for page in range(1, count + 1):
        row, column = divmod(page - 1, columns)
        cells.page(page, 8 + column * side, y + row * side, side - 2, side - 2)
    high = -(-count // columns) * side
    rest = ""
    if count < pages:
        rest = svg.text(8, y + high + 12, f"pages {count + 1} to {pages} are free", class_="s faint")
        high += 16
    return cells.markup() + rest, high


def _by_sequence(cells: PageCells, y: float, used: int) -> tuple[str, float]:
    seen, panel = cells.snapshot, cells.panel
    longest = max((len(owner.pages[panel]) for owner in seen.owners), default=0)
    left = 8 + NAMES + TOKENS
    side = min(26.0, (WIDTH - left - 8) / max(1, longest))
    parts, row = [], y
    for number, owner in enumerate(seen.owners):
        if not any(owner.pages[panel]):
            continue
        parts.append(cells.name(number, 8, row + 12, NAMES))
        caption = f"{seen.tokens[number, panel]} tokens"
        parts.append(svg.text(left - 8, row + 12, caption, class_="s faint", text_anchor="end"))
        for place, page in enumerate(owner.pages[panel]):
            if page:
                cells.page(page, left + place * side, row, side - min(2.0, side / 5), 15, str(page))
        row += 19
    alone = cells.idle_pages()
    if alone:
        parts.append(svg.text(8, row + 12, "the prefix index alone", class_="s"))
        side = min(26.0, (WIDTH - left - 8) / len(alone))
        for place, page in enumerate(alone):
            cells.page(page, left + place * side, row, side - min(2.0, side / 5), 15, str(page))
        row += 19
    if row == y:
        parts.append(svg.text(8, row + 12, "nobody holds anything", class_="s faint"))
        row += 19
    return cells.markup() + "".join(parts), row - y


def _owners(seen: PageSnapshot, numbers: Mapping[str, int], chosen: str, y: float) -> tuple[str, float]:
    cells = PageCells(seen, 0, numbers, chosen)
    columns = int(WIDTH // LEGEND_COLUMN)
    parts = [
        cells.name(number, 8 + (number % columns) * LEGEND_COLUMN, y + 12 + (number // columns) * 17, LEGEND_COLUMN)
        for number in range(len(seen.owners))
    ]
    return "".join(parts), -(-len(parts) // columns) * 17.0


def _legend(y: float) -> str:
    """Draw the legend of marks."""
    parts, x = [], 8.0
    for kind, caption in (
        ("c4", "held by one; the level is its tokens"), ("shared", "by several"),
        ("id", "idle: the prefix index alone"),
        ("known", "the index knows it too"), ("written", "this step writes to it"), ("fr", "free"),
    ):  # fmt: skip
        parts += [mark(kind, x, y), svg.text(x + 18, y + 11, caption, class_="s")]
        x += 30 + 5.9 * len(caption)
    return svg.group(*parts)
