"""Draw the compilation of an operator: the stages of each backend, one stage's text with its fused groups, and the
backends' times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from markupsafe import Markup

from workbench import svg
from workbench.units import format_percent, format_seconds
from workbench.widgets.kernels import data as code_lines
from workbench.widgets.kernels.fusion import FusionMarks
from workbench.widgets.table import draw_table

MAX_LINES = 1500  # most lines of a text that are shown
STYLE = (
    "<style>.wb-kernel table{border-collapse:collapse;margin:4px 0;font:inherit;color:inherit}"
    ".wb-kernel tr,.wb-kernel td,.wb-kernel th{background:none!important;font-size:inherit}"
    ".wb-kernel th,.wb-kernel td{padding:2px 8px;text-align:left;vertical-align:top;font-weight:normal}"
    ".wb-kernel .stage{display:inline-block;padding:1px 6px;margin:1px 3px 1px 0;border:1px solid currentColor;"
    "border-radius:3px;cursor:pointer}.wb-kernel .now{font-weight:bold;border-width:2px}"
    ".wb-kernel pre.wb-code{max-height:420px;overflow:auto;border:1px solid var(--jp-border-color1,#bdbdbd);"
    "margin:6px 0;padding:4px 0;white-space:pre;word-break:normal;color:inherit;background:inherit;"
    "font:12px/1.35 var(--jp-code-font-family,ui-monospace,monospace)}.wb-code b{font-weight:normal}"
    ".wb-code .g,.wb-code .l{user-select:none}"
    ".wb-code .g{display:inline-block;height:1.35em;vertical-align:bottom;width:2.4em;padding-left:.3em;"
    "border-left:5px solid transparent}"
    ".wb-code .l{display:inline-block;width:3.5em;text-align:right;margin-right:1em;opacity:.5}"
    + "".join(f".wb-kernel .g{n}{{border-left:5px solid {c}!important}}" for n, c in enumerate(svg.SERIES_COLOURS))
    + code_lines.CODE_STYLE
    + "</style>"
)


@dataclass(frozen=True)
class KernelPage:
    """The data of one drawing. `sizes` has for each backend the number of lines of each stage, or the reason why it has
    no stages; `rows` are the backends' times, as in the record of `kernels bench`."""

    title: str
    backend: str
    stage: str
    text: str
    marked: FusionMarks
    sizes: Mapping[str, Mapping[str, int] | str]
    summary: str = ""
    note: str = ""
    rows: Sequence[Mapping[str, Any]] = ()
    timing: str = ""
    problems: Sequence[str] = field(default_factory=tuple)


def draw_kernel(shown: KernelPage) -> str:
    problems = [f'<div role="alert">{escape(content)}</div>' for content in shown.problems]
    parts = [_stages(shown), *problems, _fused(shown), _code(shown), _times(shown)]
    title = f"<div><b>{escape(shown.title)}</b></div>"
    return svg.html(STYLE, f'<div class="wb-kernel">{title}{"".join(parts)}</div>')


def _stages(shown: KernelPage) -> str:
    rows = []
    for backend, sizes in shown.sizes.items():
        if isinstance(sizes, str):
            cell = f'<span class="faint">{escape(sizes)}</span>'
        else:
            cell = " → ".join(_stage(shown, backend, stage, lines) for stage, lines in sizes.items())
        rows.append(f"<tr><th>{escape(backend)}</th><td>{cell}</td></tr>")
    return f"<table>{''.join(rows)}</table>"


def _stage(shown: KernelPage, backend: str, stage: str, lines: int) -> str:
    now = (backend, stage) == (shown.backend, shown.stage)
    named = (
        f'aria-current="true" class="stage now" tabindex="0">▸ {stage}'
        if now
        else f'class="stage" tabindex="-1">{stage}'
    )
    tip = f"{stage} of {backend}: {lines:,} lines"
    return f'<span role="button" data-key="{backend}/{stage}" data-tip="{tip}" {named} <small>{lines:,}</small></span>'


def _fused(shown: KernelPage) -> str:
    content = f"<div>{escape(shown.backend)}: {escape(shown.summary)}</div>" if shown.summary else ""
    rows = [
        f'<tr><td class="g{place % len(svg.SERIES_COLOURS)}"><b>{each.letter}</b></td><td>{escape(each.name)}</td>'
        f"<td>{escape(each.description)}</td></tr>"
        for place, each in enumerate(shown.marked.groups)
    ]
    return content + (f"<table>{''.join(rows)}</table>" if rows else "")


def _code(shown: KernelPage) -> str:
    if not shown.text:
        return ""
    whole = code_lines.highlight_lines(shown.text, shown.stage)
    places = {each.letter: place % len(svg.SERIES_COLOURS) for place, each in enumerate(shown.marked.groups)}
    lines, before = [], ""
    for number, line in enumerate(whole[:MAX_LINES]):
        letters = shown.marked.letters_of_line(number)
        colour = f" g{places[letters[0]]}" if letters else ""
        content = letters if letters != before else ""
        lines.append(f'<span class="g{colour}">{content}</span><span class="l">{number + 1}</span>{line}')
        before = letters
    cut = f"\n… {len(whole) - MAX_LINES:,} more lines: view.text has them all" if len(whole) > MAX_LINES else ""
    label = escape(f"{shown.stage} of {shown.backend}")
    body = "\n".join(lines)
    note = f'<div class="faint">{escape(shown.note)}</div>' if shown.note else ""
    # A `pre`, because exports shorten indentation in other elements to one space.
    return f'{note}<pre class="wb-code" data-scroll tabindex="0" role="region" aria-label="{label}">{body}{cut}</pre>'


def _times(shown: KernelPage) -> str:
    about = f"<div class='faint'>{escape(shown.timing)}</div>" if shown.timing else ""
    if not shown.rows:
        return about
    slowest = max((row["seconds"] for row in shown.rows if row.get("seconds")), default=1.0)
    heads = ("backend", "time", "p10 to p90", "× eager", "of the ceiling", "")
    return draw_table(heads, [_time(row, slowest) for row in shown.rows], ("",)) + about


def _time(row: Mapping[str, Any], slowest: float) -> Sequence[object]:
    if not row.get("seconds"):
        return str(row["backend"]), "", "", "", "", f"not timed: {row['reason']}"
    eager, share = row.get("speedup_over_eager"), row.get("share_of_ceiling")
    limit = "memory" if row.get("bound") == "read" else "arithmetic"
    bar = svg.rect(0, 2, max(1.0, 160 * row["seconds"] / slowest), 9, class_="c0")
    return (
        str(row["backend"]), format_seconds(row["seconds"]),
        f"{format_seconds(row['p10_seconds'])} to {format_seconds(row['p90_seconds'])}",
        "" if eager is None else f"{eager:.2f}", "" if share is None else f"{format_percent(share)} ({limit})",
        Markup(svg.tag("svg", bar, width=164, height=13, aria_hidden="true")),
    )  # fmt: skip
