"""Draw the switches of layers and heads, and the texts of the whole and of the ablated model with their first
difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from workbench import svg

LEFT, SIDE, GAP = 70, 26, 6


@dataclass(frozen=True)
class Continuations:
    """The two texts that follow the prompt, as pieces: the engine's, and the ablated model's, which is None while it is
    computed.

    `rounding` is the index of the first token at which a plain pass without ablation differs from the engine, None if
    it does not."""

    engine: tuple[str, ...]
    without: tuple[str, ...] | None
    rounding: int | None = None
    error: str = ""

    @property
    def first_difference(self) -> int | None:
        """Return the index of the first token that differs between the texts; None if there is none."""
        pairs = enumerate(zip(self.engine, self.without or self.engine, strict=False))
        found = next((n for n, (one, other) in pairs if one != other), None)
        if found is None and self.without is not None and len(self.engine) != len(self.without):
            return min(len(self.engine), len(self.without))
        return found


def draw_switches(
    num_heads: Sequence[int], heads_off: frozenset[tuple[int, int]], layers_off: frozenset[int], width: float
) -> tuple[str, float]:
    """Draw a switch for each layer and each of its heads; return markup and height."""
    first = LEFT + 74
    fits = max(1, int((width - first - 4) / (SIDE + GAP)))
    parts, y = [svg.text(LEFT, 12, "whole", font_size=11), svg.text(first, 12, "heads", font_size=11)], 20.0
    for layer, count in enumerate(num_heads):
        gone = layer in layers_off
        parts.append(svg.text(LEFT - 8, y + 17, f"layer {layer}", text_anchor="end", font_size=11))
        parts.append(_switch(LEFT, y, 58, "off" if gone else "on", gone, f"y{layer}", f"layer {layer}", layer == 0))
        for head in range(count):
            x, top = first + (SIDE + GAP) * (head % fits), y + (SIDE + GAP) * (head // fits)
            off = gone or (layer, head) in heads_off
            parts.append(
                _switch(x, top, SIDE, str(head), off, f"o{layer}.{head}", f"layer {layer}, head {head}", False)
            )
        y += (SIDE + GAP) * -(-count // fits)
    return "".join(parts), y + 4


def _switch(x: float, y: float, wide: float, label: str, off: bool, key: str, name: str, first: bool) -> str:
    parts = [
        svg.rect(x, y, wide, SIDE, rx=4, class_="c5" if off else "c0", fill_opacity=0.12 if off else 0.35,
                 stroke="currentColor", stroke_opacity=0.6, stroke_dasharray="3 3" if off else None),
        svg.text(x + wide / 2, y + 17, label, text_anchor="middle", font_size=11, opacity=0.6 if off else None,
                 text_decoration="line-through" if off else None),
    ]  # fmt: skip
    tip = f"{name} is {'off: it adds nothing' if off else 'on'}; pick it to switch it {'on' if off else 'off'}"
    return svg.group(*parts, key=key, tabindex=0 if first else -1, role="switch", tip=tip, aria_label=name,
                     aria_checked="false" if off else "true", data_row="" if key[0] == "y" else None)  # fmt: skip


def draw_texts(prompt: str, found: Continuations, any_off: bool) -> str:
    """Draw the text without and with switched-off layers, one below the other, and their first difference."""
    at = found.first_difference
    parts = [_text("as it is", prompt, found.engine, None)]
    if found.error:
        parts.append(f'<p role="alert">{escape(found.error)}</p>')
    elif not any_off:
        parts.append('<p class="faint">Pick a layer or a head above to switch it off.</p>')
    elif found.without is None:
        parts.append('<p role="status">computing the text without it …</p>')
    else:
        parts.append(_text("with these switched off", prompt, found.without, at))
        same = "The text is the same." if at is None else f"The first difference is token {at + 1} of the answer."
        if found.rounding is not None and at is not None and at >= found.rounding:
            same += f" Rounding alone changes token {found.rounding + 1}: the plain pass adds in another order."
        parts.append(f'<p role="status">{same}</p>')
    return "".join(parts)


def _text(title: str, prompt: str, pieces: Sequence[str], mark: int | None) -> str:
    made = []
    for number, piece in enumerate(pieces):
        changed = mark is not None and number >= mark
        kind = "first" if number == mark else "changed" if changed else None
        tip = "the first difference" if kind == "first" else None
        made.append(
            svg.tag("b", escape(piece, quote=False), class_=kind, data_tip=tip) if kind else escape(piece, quote=False)
        )
    body = svg.tag("span", escape(prompt, quote=False), class_="faint") + "".join(made)
    return f'<div class="name">{title}</div>' + svg.tag("pre", body, class_="text")
