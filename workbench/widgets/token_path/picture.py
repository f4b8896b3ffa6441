"""Compose the picture of a token's path: the text, the strip of steps, the chosen step, the chosen value."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from workbench import svg
from workbench.widgets.token_path.data import PathStep, TokenPathData
from workbench.widgets.token_path.derivation_picture import draw_derivation
from workbench.widgets.token_path.overview import draw_overview
from workbench.widgets.token_path.sampling_picture import draw_draw, draw_filter
from workbench.widgets.token_path.tensor_picture import TensorStrip, largest_place

MONO = "font-family:var(--jp-code-font-family,ui-monospace,monospace)"
STYLE = (
    f".wb-path .mono{{{MONO}}}"
    f".wb-path .tokens{{{MONO};line-height:2;margin:4px 0 10px;overflow-wrap:anywhere}}"
    ".wb-path .tokens b{font-weight:400;padding:2px 4px;margin-right:2px;border:1px solid;border-radius:3px;"
    "border-color:color-mix(in srgb,currentColor 25%,transparent);cursor:pointer}"
    ".wb-path .tokens b.here{font-weight:700;outline:2px solid currentColor}"
    ".wb-path [data-key]{cursor:pointer}"
    ".wb-path p{margin:6px 0}.wb-path .name{margin-top:8px;font-weight:600}"
    f".wb-path pre.text{{{MONO};font-size:13px;line-height:1.5;white-space:pre-wrap;overflow-wrap:anywhere;"
    "max-width:960px;box-sizing:border-box;margin:2px 0;padding:6px 8px;border:1px solid;"
    "border-color:color-mix(in srgb,currentColor 25%,transparent);background:none;color:inherit}"
    ".wb-path pre.text b{font-weight:400;border-bottom:2px solid #d55e00}"
    ".wb-path pre.text b.first{font-weight:700;outline:2px solid #d55e00;outline-offset:1px}"
)


def draw_page(*parts: str) -> str:
    """Return a whole picture from its parts, with a style sheet that affects only this widget."""
    return svg.html(svg.tag("style", STYLE), f'<div class="wb-path">{"".join(parts)}</div>')


def draw_tokens(tokens: Sequence[str], position: int) -> str:
    """Draw the text token by token; the followed token is marked, and each can be picked."""
    marks = (
        svg.tag("b", escape(token), class_="here" if n == position else None, data_key=f"t{n}", role="button",
                tabindex=0 if n == position else -1, data_tip=f"token {n}: follow it", aria_label=f"token {n}: {token}",
                aria_pressed="true" if n == position else "false")
        for n, token in enumerate(tokens)
    )  # fmt: skip
    return f'<div class="tokens" role="group" aria-label="the tokens of the prompt">{"".join(marks)}</div>'


def draw_path(data: TokenPathData, at: int, column: int, head: int, width: float) -> str:
    """Draw the strip of steps, step number `at`, and the chosen value; `column` -1 chooses the value of largest
    magnitude."""
    step = data.steps[at]
    strip, height = draw_overview(data.steps, at, data.num_layers, width)
    where = "" if step.layer is None else f"Layer {step.layer}, "
    title = f"Step {at + 1} of {len(data.steps)}. {where}{step.title}"
    whole = svg.document(width, height, strip, title="the path of the token, by layer and stage")
    body, tall = draw_step(data, step, column, head, width)
    chosen = svg.document(width, tall, body, title=title)
    heading = f'<p role="status"><b>{escape(title)}</b></p>'
    return draw_page(draw_tokens(data.tokens, data.position), whole, heading, chosen)


def draw_step(data: TokenPathData, step: PathStep, column: int, head: int, width: float) -> tuple[str, float]:
    """Draw one step; return markup and height."""
    if step.filter_number:
        return draw_filter(data.candidates(step.filter_number), width)
    if step.name == "draw":
        return draw_draw(data.draw, width)
    return _draw_tensor(data, step, column, head, width)


def _draw_tensor(data: TokenPathData, step: PathStep, column: int, head: int, width: float) -> tuple[str, float]:
    values = data.matrix(step, head)
    assert values is not None  # filters and the draw have no matrix, and are drawn by other functions
    column = chosen_column(data, step, column, head)
    names = data.column_names(step)
    parts, top = [], 0.0
    if data.is_by_head(step) and step.layer is not None:
        made, top = _draw_head_choice(data.num_heads[step.layer], head)
        parts.append(made)
    strip = TensorStrip(values, data.tokens, data.position, column, width, names, step.name == "logits")
    markup, height = strip.draw()
    parts.append(svg.group(markup, transform=f"translate(0,{top:g})"))
    numbers, more = strip.draw_numbers(top + height + 8)
    parts.append(numbers)
    top += height + 8 + more
    markup, height = draw_derivation(data.derivation(step, column, head), top + 4, width)
    return "".join([*parts, markup]), top + height + 8


def chosen_column(data: TokenPathData, step: PathStep, column: int, head: int) -> int:
    """Return `column` if the step has it, else the column of the value of largest magnitude (for logits: of the
    likeliest token)."""
    values = data.matrix(step, head)
    if values is None:
        return 0
    row = values[data.position]
    return column if 0 <= column < len(row) else largest_place(row, step.name == "logits")


def _draw_head_choice(count: int, chosen: int) -> tuple[str, float]:
    parts = [svg.text(112, 16, "head", text_anchor="end", font_size=11)]
    for head in range(count):
        parts.append(svg.group(
            svg.rect(120 + 32 * head, 2, 28, 20, rx=3, fill="transparent", stroke="currentColor",
                     stroke_width=2.5 if head == chosen else 0.6),
            svg.text(134 + 32 * head, 16, str(head), text_anchor="middle", font_size=11),
            key=f"h{head}", tabindex=0 if head == chosen else -1, role="button", tip=f"show head {head}",
            aria_label=f"head {head}", aria_pressed="true" if head == chosen else "false",
        ))  # fmt: skip
    return "".join(parts), 28.0
