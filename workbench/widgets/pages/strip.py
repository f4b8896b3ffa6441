"""Draw pages by owner over steps: stacked bands, as high as the pages each holds.

A band has its letters where there is room; bands of one colour differ in hatching, thin ones too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from workbench.shown import truncate_text
from workbench.widgets import svg
from workbench.widgets.pages.cells import MAX_NAME_LETTERS, letters
from workbench.widgets.pages.snapshot import PageSnapshot

STRIP_HEIGHT = 56.0
MAX_COLUMNS = 96  # snapshots drawn at most, of all there are
HATCHES = (  # in the order in which the colours come again: none, and then these, in squares of 5
    "M-1 6L6 -1M-1 1L1 -1M4 6L6 4", "M-1 -1L6 6M4 -1L6 1M-1 4L1 6", "M0 2.5h5", "M2.5 0v5", "M0 2.5h5M2.5 0v5"
)  # fmt: skip
PATTERNS = svg.tag("defs", *(
    f'<pattern id="wb-band-{n}" width="5" height="5" patternUnits="userSpaceOnUse">'
    f'<path d="{d}" stroke="#000" stroke-opacity=".65" fill="none"/></pattern>' for n, d in enumerate(HATCHES, 1)
))  # fmt: skip


def draw_strip(
    snapshot: PageSnapshot, history: Sequence[PageSnapshot], panel: int, numbers: Mapping[str, int], x: float, y: float, wide: float
) -> str:
    """From below: what several share, what each holds alone, what is idle. A line where `seen` stands."""
    stride = 1
    while len(history) > MAX_COLUMNS * stride:
        stride *= 2
    drawn = [*history[::stride]]
    if drawn[-1] is not history[-1]:
        drawn.append(history[-1])
    first, last = history[0].step, history[-1].step + 1
    edges = [x + wide * (each.step - first) / (last - first) for each in drawn] + [x + wide]
    bands = _bands(drawn, panel)
    peak = max((sum(column) for column in zip(*bands.values(), strict=True)), default=0)
    about = snapshot.panels[panel]
    most = about.pages if peak * 3 > about.pages else max(1, round(peak * 1.2))
    base = [0.0] * len(drawn)
    tops = []
    for name, counts in bands.items():
        below = base
        base = [low + count for low, count in zip(base, counts, strict=True)]
        tops.append((name, counts, below, base))
    parts = [svg.line(x, y, x + wide, y, class_="grid"), svg.line(x, y + STRIP_HEIGHT, x + wide, y + STRIP_HEIGHT, class_="grid")]
    alone, shared, idle = snapshot.counts[panel]
    now = {"\0shared": shared, "\0idle": idle, **dict(zip((each.name for each in snapshot.owners), alone, strict=True))}
    first_band = True
    for name, counts, below, top in reversed(tops):  # each covers what is below it, which is drawn over it
        tip = _tip(name, counts, drawn, now.get(name, 0), snapshot.step, numbers)
        live = f'data-key="band:{panel}:{svg.escape_attribute(_band_label(name, numbers))}" tabindex="{0 if first_band else -1}"'
        band = _band(name, counts, below, top, edges, y, most, numbers, f'data-tip="{svg.escape_attribute(tip)}" {live}')
        first_band = first_band and not band
        parts.append(band)
    at = x + wide * (snapshot.step - first + 0.5) / (last - first)
    parts += [
        svg.line(at, y - 2, at, y + STRIP_HEIGHT + 2, stroke_width=1.5, stroke_dasharray="4 2"),
        svg.text(x + wide + 6, y + 9, _many(most, "place" if about.on_cpu else "page"), class_="s faint"),
        svg.text(x + wide + 6, y + STRIP_HEIGHT, f"steps {first}-{last - 1 - history[-1].between_steps}", class_="s faint"),
    ]
    return svg.group(*parts, class_="strip")


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _bands(drawn: Sequence[PageSnapshot], panel: int) -> dict[str, list[int]]:
    """Pages at each of `drawn`: those that are shared, each owner's, those that are idle."""
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
    """Describe a band: its owner, its pages at the shown step, its maximum, and its time."""
    here = [each.step for each, count in zip(drawn, counts, strict=True) if count]
    if not here:
        return ""
    who = _band_label(name, numbers) + ("" if name.startswith("\0") else f" {truncate_text(name, MAX_NAME_LETTERS)}, alone")
    return f"{who}: {now} at step {step}, at most {max(counts)}\nfrom step {here[0]} to {here[-1]}"


def _letter(
    label: str, here: Iterable[int], counts: list[int], below: list[float], edges: list[float], y: float, scale: float
) -> str:
    """The band's name where it is highest, if there is room for it."""
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
