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

# Both places have a fixed height, with scroll bars inside: nothing below them moves while a text grows.
STYLE = (
    ".wb-pic .wb-figures-place{height:64px;overflow:auto hidden}"
    ".wb-pic .wb-figures{border-collapse:collapse;margin:4px 0;border:0}"
    ".wb-pic .wb-figures :is(th,td){border:0;text-align:left;padding:0 22px 0 0;background:none}"
    ".wb-pic .wb-figures th{font-size:11px;font-weight:400;opacity:.75}"
    ".wb-pic .wb-figures td{font-size:15px;white-space:nowrap;font-variant-numeric:tabular-nums}"
)
TEXT_STYLE = (
    ".wb-pic .wb-text-place pre.wb-tokens{height:17em}@media print{.wb-pic .wb-text-place pre.wb-tokens{height:auto}}"
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
    heads = (svg.tag("th", name, scope="col", data_tip=help_text) for name, _, help_text in rows)
    cells = (svg.tag("td", escape(value) or "–", data_tip=help_text) for _, value, help_text in rows)
    table = svg.tag("table", svg.tag("tr", *heads), svg.tag("tr", *cells), class_="wb-figures")
    return svg.tag("style", STYLE) + svg.tag("div", table, class_="wb-figures-place")


def draw_text(played: PlayedRequest, prompt: str) -> str:
    """Draw the prompt, the text and the legend; a longer text scrolls in its place, whose height is fixed."""
    pieces = dict(played.tokens_by_sample)  # which another thread may be adding to
    text = draw_generated_text(prompt, pieces, dict(played.trailing_text), dict(played.finish_reasons))
    return svg.tag("style", TEXT_STYLE) + svg.tag("div", text, draw_probability_legend(), class_="wb-text-place")


def format_bytes(count: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count} B"


class CopyButton(anywidget.AnyWidget):
    """`text` goes into the clipboard, which only the browser can do; without a text it cannot be pressed."""

    _esm = Path(__file__).parent / "copy_button.js"
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
