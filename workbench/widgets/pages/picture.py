"""Draw a snapshot of pages: each panel's pages over the steps, and every page by its owner.

Owners have letters in addition to colours; shared pages are hatched, idle ones dashed. Over the steps each owner is a
band, as high as its number of pages, and the bands are stacked. A band has its letters if they fit; bands of one colour
differ in hatching.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from workbench import svg
from workbench.display import truncate_text
from workbench.units import format_percent
from workbench.widgets.flow import flow, paragraph
from workbench.widgets.pages.cells import MAX_NAME_LETTERS, PageCells, letters, mark
from workbench.widgets.pages.data import PageSnapshot

LAYOUTS = ("by page", "by sequence")
WIDTH = 900.0
NAMES, TOKENS = 150.0, 70.0  # pixels for a sequence's name, and for its number of tokens
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
STRIP_HEIGHT = 56.0
MAX_COLUMNS = 96  # most snapshots in a strip
HATCHES = (  # for the second, third, ... use of the same colours, in squares of 5 pixels
    "M-1 6L6 -1M-1 1L1 -1M4 6L6 4", "M-1 -1L6 6M4 -1L6 1M-1 4L1 6", "M0 2.5h5", "M2.5 0v5", "M0 2.5h5M2.5 0v5"
)  # fmt: skip
PATTERNS = svg.tag("defs", *(
    f'<pattern id="wb-band-{n}" width="5" height="5" patternUnits="userSpaceOnUse">'
    f'<path d="{d}" stroke="#000" stroke-opacity=".65" fill="none"/></pattern>' for n, d in enumerate(HATCHES, 1)
))  # fmt: skip


def draw_page_map(
    snapshot: PageSnapshot,
    history: Sequence[PageSnapshot],
    numbers: Mapping[str, int],
    layout: str = "by page",
    chosen: str = "",
    note: str = "",
    width: float = WIDTH,
) -> str:
    """Draw `snapshot`, which is one of `history`, all recorded snapshots.

    `numbers` gives each owner's number, which determines its letters and colour. If an owner is `chosen`, pages that it
    does not hold are dimmed."""
    caption = f"before step {snapshot.step}" if snapshot.between_steps else f"what step {snapshot.step} is computed on"
    parts = [svg.tag("style", STYLE), PATTERNS, svg.text(8, 17, caption, class_="b")]
    if note:
        parts.append(svg.text(width - 8, 17, note, class_="s faint", text_anchor="end"))
    y = 28.0
    for panel in range(len(snapshot.panels)):
        counts = paragraph(_counts(snapshot, panel), 8, y + 27, width - 16, class_="s faint")
        parts += [svg.text(8, y + 12, snapshot.panels[panel].title, class_="b"), *counts]
        y += 19 + 15 * len(counts)
        used = max(each.last_used_page[panel] for each in history)
        if not used:  # no page was used in any snapshot
            y += 4
            continue
        if len(history) > 1:
            parts.append(draw_strip(snapshot, history, panel, numbers, 8, y, width - 90))
            y += STRIP_HEIGHT + 10
        draw = _by_page if layout == LAYOUTS[0] else _by_sequence
        markup, high = draw(PageCells(snapshot, panel, numbers, chosen), y, used, width)
        parts.append(markup)
        y += high + 12
    if layout == LAYOUTS[0]:
        markup, high = _owners(snapshot, numbers, chosen, y, width)
        parts.append(markup)
        y += high
    markup, high = _legend(y + 8, width)
    return svg.document(width, y + 20 + high, *parts, markup, title=f"Pages of the cache: {caption}")


def _counts(seen: PageSnapshot, panel: int) -> str:
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
        share = f", {format_percent(filled / slots)} of their slots filled" if slots else ""
        return f"{caption}, {seen.num_free(panel)} free{share}"
    return f"{caption}, {seen.num_free(panel)} free"


def _by_page(cells: PageCells, y: float, used: int, width: float) -> tuple[str, float]:
    pages = cells.about.pages
    side = next(side for most, side in ((80, 26.0), (300, 20.0), (1300, 16.0), (10**9, 10.0)) if used <= most)
    columns = int((width - 16) // side)
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


def _by_sequence(cells: PageCells, y: float, used: int, width: float) -> tuple[str, float]:
    seen, panel = cells.snapshot, cells.panel
    longest = max((len(owner.held(panel)) for owner in seen.owners), default=0)
    left = 8 + NAMES + TOKENS
    side = min(26.0, (width - left - 8) / max(1, longest))
    parts, row = [], y
    for number, owner in enumerate(seen.owners):
        if not any(owner.held(panel)):
            continue
        parts.append(cells.name(number, 8, row + 12, NAMES))
        caption = f"{seen.tokens[number, panel]} tokens"
        parts.append(svg.text(left - 8, row + 12, caption, class_="s faint", text_anchor="end"))
        for place, page in enumerate(owner.held(panel)):
            if page:
                cells.page(page, left + place * side, row, side - min(2.0, side / 5), 15, str(page))
        row += 19
    alone = cells.idle_pages()
    if alone:
        parts.append(svg.text(8, row + 12, "the prefix index alone", class_="s"))
        side = min(26.0, (width - left - 8) / len(alone))
        for place, page in enumerate(alone):
            cells.page(page, left + place * side, row, side - min(2.0, side / 5), 15, str(page))
        row += 19
    if row == y:
        parts.append(svg.text(8, row + 12, "no request holds a page", class_="s faint"))
        row += 19
    return cells.markup() + "".join(parts), row - y


def _owners(seen: PageSnapshot, numbers: Mapping[str, int], chosen: str, y: float, width: float) -> tuple[str, float]:
    cells = PageCells(seen, 0, numbers, chosen)
    columns = int(width // LEGEND_COLUMN)
    parts = [
        cells.name(number, 8 + (number % columns) * LEGEND_COLUMN, y + 12 + (number // columns) * 17, LEGEND_COLUMN)
        for number in range(len(seen.owners))
    ]
    return "".join(parts), -(-len(parts) // columns) * 17.0


def _legend(y: float, width: float) -> tuple[str, float]:
    """Draw the legend of marks; return markup and height."""
    marks = (
        ("c4", "held by one; the level is its tokens"), ("shared", "by several"),
        ("id", "idle: the prefix index alone"),
        ("known", "the index knows it too"), ("written", "this step writes to it"), ("fr", "free"),
    )  # fmt: skip
    places = flow([30 + 5.9 * len(caption) for _, caption in marks], 8, width)
    parts = [
        mark(kind, x, y + 19 * row) + svg.text(x + 18, y + 11 + 19 * row, caption, class_="s")
        for (kind, caption), (x, row) in zip(marks, places, strict=True)
    ]
    return svg.group(*parts), 19.0 * (places[-1][1] + 1)


def draw_strip(
    snapshot: PageSnapshot,
    history: Sequence[PageSnapshot],
    panel: int,
    numbers: Mapping[str, int],
    x: float,
    y: float,
    wide: float,
    place: Callable[[int], float] | None = None,
) -> str:
    """Draw the pages over the steps as stacked bands: shared, then exclusive by owner, then idle; and a line at
    `snapshot`.

    `place` returns the x at which a step begins, for the axis of another picture, which draws its own line.
    """
    stride = 1
    while len(history) > MAX_COLUMNS * stride:
        stride *= 2
    drawn = [*history[::stride]]
    if drawn[-1] is not history[-1]:
        drawn.append(history[-1])
    first, last = history[0].step, history[-1].step + 1
    where = place or (lambda step: x + wide * (step - first) / (last - first))
    edges = [min(max(x, where(each.step)), x + wide) for each in drawn] + [x + wide]
    bands = _bands(drawn, panel)
    about = snapshot.panels[panel]
    alike = [number for number, each in enumerate(snapshot.panels) if each.pages == about.pages]  # on one scale
    held = [each.counts[number] for each in drawn for number in alike]
    peak = max(sum(alone) + shared + idle for alone, shared, idle in held)
    most = about.pages if peak * 3 > about.pages else max(1, round(peak * 1.2))
    base = [0.0] * len(drawn)
    tops = []
    for name, counts in bands.items():
        below = base
        base = [low + count for low, count in zip(base, counts, strict=True)]
        tops.append((name, counts, below, base))
    parts = [
        svg.line(x, y, x + wide, y, class_="grid"),
        svg.line(x, y + STRIP_HEIGHT, x + wide, y + STRIP_HEIGHT, class_="grid"),
    ]
    alone, shared, idle = snapshot.counts[panel]
    now = {"\0shared": shared, "\0idle": idle, **dict(zip((each.name for each in snapshot.owners), alone, strict=True))}
    first_band = True
    for name, counts, below, top in reversed(tops):  # from the top, because lower bands are drawn over higher ones
        tip = _tip(name, counts, drawn, now.get(name, 0), snapshot.step, numbers)
        live = (
            f'data-key="band:{panel}:{svg.escape_attribute(_band_label(name, numbers))}" '
            f'tabindex="{0 if first_band else -1}"'
        )
        band = _band(
            name, counts, below, top, edges, y, most, numbers, f'data-tip="{svg.escape_attribute(tip)}" {live}'
        )
        first_band = first_band and not band
        parts.append(band)
    parts.append(svg.text(x + wide + 6, y + 9, _many(most, "place" if about.on_cpu else "page"), class_="s faint"))
    if place is None:
        at = x + wide * (snapshot.step - first + 0.5) / (last - first)
        steps = f"steps {first}-{last - 1 - history[-1].between_steps}"
        parts += [
            svg.line(at, y - 2, at, y + STRIP_HEIGHT + 2, stroke_width=1.5, stroke_dasharray="4 2"),
            svg.text(x + wide + 6, y + STRIP_HEIGHT, steps, class_="s faint"),
        ]
    return svg.group(*parts, class_="strip")


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _bands(drawn: Sequence[PageSnapshot], panel: int) -> dict[str, list[int]]:
    """Return the number of pages at each of `drawn`, by band: shared, exclusive by owner, idle."""
    shared = [each.counts[panel][1] for each in drawn]
    idle = [each.counts[panel][2] for each in drawn]
    owners: dict[str, list[int]] = {}
    for place, each in enumerate(drawn):
        for owner, count in zip(each.owners, each.counts[panel][0], strict=True):
            if count:
                owners.setdefault(owner.name, [0] * len(drawn))[place] = count
    return {"\0shared": shared, **owners, "\0idle": idle}


def _band(
    name: str, counts: list[int], below: list[float], top: list[float], edges: list[float], y: float, most: int,
    numbers: Mapping[str, int], live: str,
) -> str:  # fmt: skip
    here = [place for place, count in enumerate(counts) if count]
    if not here:
        return ""
    begin, end = here[0], here[-1]
    scale = STRIP_HEIGHT / most
    points, height = [f"M{edges[begin]:.4g} {y + STRIP_HEIGHT:g}"], None
    for place in range(begin, end + 1):
        if top[place] != height:
            height = top[place]
            points.append(f"H{edges[place]:.5g}V{y + STRIP_HEIGHT - height * scale:.5g}")
    path = "".join(points) + f"H{edges[end + 1]:.5g}V{y + STRIP_HEIGHT:g}z"
    kinds = {"\0shared": "sh", "\0idle": "bi"}
    kind = kinds.get(name) or f"c{numbers[name] % len(svg.SERIES_COLOURS)}"
    times = 0 if name in kinds else numbers[name] // len(svg.SERIES_COLOURS) % (len(HATCHES) + 1)
    hatched = f'<path class="o" fill="url(#wb-band-{times})" d="{path}"/>' if times else ""
    letter = _letter(_band_label(name, numbers), here, counts, below, edges, y, scale)
    return f'<path class="{kind}" d="{path}" {live}/>{hatched}{letter}'


def _band_label(name: str, numbers: Mapping[str, int]) -> str:
    return {"\0shared": "shared", "\0idle": "idle"}.get(name) or letters(numbers[name])


def _tip(
    name: str, counts: Sequence[int], drawn: Sequence[PageSnapshot], now: int, step: int, numbers: Mapping[str, int]
) -> str:
    """Describe a band: its owner, its pages at the shown step, its maximum, and its range of steps."""
    here = [each.step for each, count in zip(drawn, counts, strict=True) if count]
    if not here:
        return ""
    who = _band_label(name, numbers) + (
        "" if name.startswith("\0") else f" {truncate_text(name, MAX_NAME_LETTERS)}, alone"
    )
    return f"{who}: {now} at step {step}, at most {max(counts)}\nfrom step {here[0]} to {here[-1]}"


def _letter(
    label: str, here: Iterable[int], counts: list[int], below: list[float], edges: list[float], y: float, scale: float
) -> str:
    """Draw the band's label where the band is highest, if it fits."""
    place = max(here, key=lambda place: (counts[place], edges[place + 1] - edges[place]))
    run = place
    while run + 1 < len(counts) and counts[run + 1] == counts[place] and below[run + 1] == below[place]:
        run += 1
    wide, high = edges[run + 1] - edges[place], counts[place] * scale
    if high < 9 or wide < 7 * len(label):
        return ""
    middle = y + STRIP_HEIGHT - (below[place] + counts[place] / 2) * scale + 3
    return (
        f'<g class="n" font-size="9"><text class="np" x="{(edges[place] + edges[run + 1]) / 2:.4g}" '
        f'y="{middle:.4g}">{label}</text></g>'
    )
