"""Draw a generation: its figures, its text, the legend of probabilities, and buttons that copy the experiment as YAML
or Python."""

from __future__ import annotations

from html import escape
from pathlib import Path

import anywidget
import ipywidgets
import traitlets

from workbench import svg
from workbench.svg import format_seconds
from workbench.widgets.playground.data import PlayedRequest
from workbench.widgets.tokens.text import draw_generated_text, draw_probability_legend

# Both places have a fixed height and scroll inside: nothing below them moves while a text grows.
STYLE = (
    ".wb-pic .wb-figures{display:flex;flex-wrap:wrap;align-content:flex-start;gap:2px 22px;height:84px;overflow:auto;"
    "margin:4px 0}"
    ".wb-figures small{display:block;font-size:11px;opacity:.75}"
    ".wb-figures span{font-size:15px;white-space:nowrap;font-variant-numeric:tabular-nums}"
)
# In reverse, a place that scrolls stays at its end by itself, saved and exported too; the margin is for a short text.
TEXT_STYLE = (
    ".wb-text-place{display:flex;flex-direction:column-reverse;height:19em;overflow:auto}"
    ".wb-pic .wb-text-place pre.wb-tokens{flex:none;max-height:none;overflow:visible;margin-bottom:auto}"
    "@media print{.wb-text-place{height:auto}}"
)
FINISH_REASONS = {
    "stop": "an end token, or a text to stop at",
    "length": "max_tokens, or the context is full",
    "cancelled": "it was stopped",
    "refused": "it could never have run",
    "error": "it ran and broke",
    "not_chosen": "others of its samples or beams are better",
}


def draw_figures(played: PlayedRequest, seed: int | None) -> str:
    """Draw figures of a generation and its seed; nothing that has not been measured yet has a number."""
    rows = [
        ("TTFT", format_seconds(played.ttft), "from the request's arrival to its first token"),
        ("TPOT", format_seconds(played.tpot), "between two tokens after the first, on average"),
        ("throughput", "" if played.throughput is None else f"{played.throughput:.3g} tokens/s", "of all samples"),
        (
            "prompt, output",
            f"{played.prompt_tokens}, {played.num_tokens} tokens" if played.prompt_tokens else "",
            "tokens",
        ),
        ("KV cache", format_bytes(played.kv_bytes) if played.steps else "", "pages in use in the last step, in bytes"),
        ("KV peak", format_bytes(played.kv_peak) if played.steps else "", "the most bytes of pages in use in any step"),
        ("steps", str(played.steps or ""), "forward passes of the runner meanwhile"),
        ("seed", "" if seed is None else str(seed), "of the random numbers: it gives the same tokens again"),
    ]
    if played.drafted:
        rows.append(("drafts accepted", f"{played.accepted} of {played.drafted}", "tokens that speculation proposed"))
    if played.compiles and played.compiles[1] > played.compiles[0]:
        rows.append(("compiled", f"{played.compiles[1] - played.compiles[0]} graphs", "meanwhile: run again without"))
    if played.finish_reasons:
        ends = list(dict.fromkeys(end for _, end in sorted(played.finish_reasons.items())))
        rows.append(("finished", ", ".join(ends), "; ".join(f"{end}: {FINISH_REASONS.get(end, end)}" for end in ends)))
    parts = (
        svg.tag("div", svg.tag("small", name), svg.tag("span", escape(value) or "–"), data_tip=help_text)
        for name, value, help_text in rows
    )
    return svg.tag("style", STYLE) + svg.tag("div", *parts, class_="wb-figures")


def draw_text(played: PlayedRequest, prompt: str) -> str:
    """Draw the prompt, the text and the legend; a longer text scrolls in its place, whose height is fixed."""
    pieces = dict(played.tokens_by_sample)  # which another thread may be adding to
    text = draw_generated_text(prompt, pieces, dict(played.trailing_text), dict(played.finish_reasons))
    place = svg.tag("div", text, class_="wb-text-place", data_scroll="")
    return svg.tag("style", TEXT_STYLE) + place + draw_probability_legend()


def format_bytes(count: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count} B"


class CopyButton(anywidget.AnyWidget):
    """`text` goes into the clipboard, which only the browser can do; without a text it cannot be pressed."""

    _esm = (Path(__file__).parent / "copy_button.js").read_text(encoding="utf-8")
    label = traitlets.Unicode("Copy").tag(sync=True)
    text = traitlets.Unicode().tag(sync=True)


class ExperimentCopy(ipywidgets.VBox):
    """Two buttons that copy, and the texts themselves for pages that may not."""

    def __init__(self) -> None:
        self.yaml, self.python = CopyButton(label="Copy as YAML"), CopyButton(label="Copy as Python")
        self._which = ipywidgets.ToggleButtons(options=["hide", "YAML", "Python"], style={"button_width": "auto"})
        self.area = ipywidgets.Textarea(disabled=False, rows=14, layout={"width": "auto", "display": "none"})
        self._which.observe(lambda _: self._show(), "value")
        row = ipywidgets.HBox([self.yaml, self.python, ipywidgets.Label("the settings above:"), self._which])
        super().__init__([row, self.area])

    def set_texts(self, yaml: str, python: str) -> None:
        self.yaml.text, self.python.text = yaml, python
        self._show()

    def _show(self) -> None:
        self.area.value = self.python.text if self._which.value == "Python" else self.yaml.text
        self.area.layout.display = "none" if self._which.value == "hide" else None
