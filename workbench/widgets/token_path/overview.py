"""Draw the whole path as a strip with a column for each layer and a row for each stage, showing the norm of the token's
row in each."""

from __future__ import annotations

from collections.abc import Sequence

from workbench import svg
from workbench.units import format_number
from workbench.widgets.token_path.data import RESIDUAL, PathStep
from workbench.widgets.token_path.tensor_picture import fit_letters

ROW, LEFT, HEAD = 17, 120, 18
SHORT = {
    "attention_norm": "norm", "projected": "q, k, v", "weights": "weights", "after_attention": "residual",
    "feedforward_norm": "norm", "gate_up": "gate and up", "feedforward": "feed-forward", "output": "residual",
    "attention_post_norm": "post-norm", "feedforward_post_norm": "post-norm", "query_latent": "latent of queries",
    "head_queries": "queries of heads", "head_values": "values of heads", "router_logits": "router's product",
    "expert_gate_up": "experts' gate, up", "expert_activation": "experts' activation",
    "shared_gate_up": "shared gate, up", "shared_activation": "shared activation", "shared_gate": "shared one's gate",
}  # fmt: skip


def draw_overview(steps: Sequence[PathStep], current: int, num_layers: int, width: float) -> tuple[str, float]:
    """Draw each step as a cell with a bar of its size; steps before `current` are darker. Return markup and height."""
    names = list(dict.fromkeys(step.name for step in steps if step.layer is not None))
    ends = [step for step in steps if step.layer is None]
    before, after = ends[:1], ends[1:]
    rows = max(len(names), len(after) + 1)
    outer = 76.0 if width >= 700 else 62.0
    wide = (width - LEFT - 2 * outer - 12) / num_layers
    places = {id(step): number for number, step in enumerate(steps)}
    parts = [svg.text(LEFT - 8, HEAD + ROW * n + 12, SHORT.get(name, name), text_anchor="end", font_size=11,
                      font_weight="bold" if name in RESIDUAL else None) for n, name in enumerate(names)]  # fmt: skip
    every = -(-28 // max(1, int(wide)))  # layers per label
    for layer in range(0, num_layers, every):
        x = LEFT + outer + 6 + wide * layer
        label = f"layer {layer}" if fit_letters(f"layer {layer}", wide) else str(layer)
        parts.append(svg.text(x + wide * min(every, num_layers - layer) / 2, 12, label, text_anchor="middle",
                              font_size=11))  # fmt: skip
    largest = {name: max(step.size for step in steps if step.name == name) for name in names}
    stream = max(step.size for step in steps if step.name in RESIDUAL) or 1.0
    for step in steps:
        if step.layer is None:
            continue
        box = LEFT + outer + 6 + wide * step.layer, HEAD + ROW * names.index(step.name), wide
        most = stream if step.name in RESIDUAL else largest[step.name] or 1.0
        parts.append(_cell(step, places[id(step)], current, *box, step.size / most, format_number(step.size)))
    for step in before:
        parts.append(svg.text(LEFT + outer / 2, 12, "in", text_anchor="middle", font_size=11))
        parts.append(_cell(step, places[id(step)], current, LEFT, HEAD, outer, step.size / stream, "embedding"))
    x = LEFT + outer + 12 + wide * num_layers
    parts.append(svg.text(x + outer / 2, 12, "out", text_anchor="middle", font_size=11))
    for number, step in enumerate(after):
        parts.append(_cell(step, places[id(step)], current, x, HEAD + ROW * number, outer, 0.0, step.name))
    return "".join(parts), HEAD + ROW * rows + 4


def _cell(step: PathStep, place: int, current: int, x: float, y: float, wide: float, share: float, label: str) -> str:
    here, done = place == current, place < current
    where = "" if step.layer is None else f"layer {step.layer}, "
    tip = f"step {place + 1}, {where}{step.title}; {_size(step)} {format_number(step.size)}"
    colour = "c1" if step.name in RESIDUAL else "c0"
    wide, high = max(wide - 2, 1.0), ROW - 2
    inner = [
        svg.rect(x, y, wide, high, fill="currentColor", fill_opacity=0.12 if done or here else 0.06),
        svg.rect(x, y, wide * max(0.0, min(1.0, share)), high, class_=colour,
                 fill_opacity=0.6 if done or here else 0.35),
    ]  # fmt: skip
    if fit_letters(label, wide):
        inner.append(svg.text(x + wide / 2, y + 11.5, label, text_anchor="middle", font_size=11))
    if here:
        inner.append(svg.rect(x - 1, y - 1, wide + 2, high + 2, fill="none", stroke="currentColor", stroke_width=2.5))
    return svg.group(*inner, key=step.key, tabindex=0 if here else -1, role="button", tip=tip, aria_label=tip,
                     aria_current="step" if here else None)  # fmt: skip


def _size(step: PathStep) -> str:
    if step.name.startswith("filter"):
        return "tokens left:"
    return {"draw": "probability", "weights": "largest weight", "scores": "largest score"}.get(step.name, "norm")
