"""Draw a generation: figures, text, and the legend of probabilities. Build buttons that copy the experiment as YAML or
Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from operator import attrgetter
from pathlib import Path

import anywidget
import ipywidgets
import traitlets

from workbench import svg
from workbench.units import format_bytes, format_seconds
from workbench.widgets.playground.data import SIDES, PlayedRequest
from workbench.widgets.tokens.text import draw_generated_text, draw_probability_legend

# Figures and text have a fixed height and scroll, so that nothing below them moves while a text grows.
STYLE = (
    ".wb-pic .wb-figures{display:flex;flex-wrap:wrap;align-content:flex-start;gap:2px 22px;height:84px;overflow:auto;"
    "margin:4px 0}"
    ".wb-figures small{display:block;font-size:11px;opacity:.75}"
    ".wb-figures span{font-size:15px;white-space:nowrap;font-variant-numeric:tabular-nums}"
)
# With `column-reverse` a scrolling element stays at its end, in exports too; the margin keeps a short text at the top.
# Nine lines of `GENERATED_STYLE` and half of its padding: the first line in sight is whole, and none of that above it.
TEXT_STYLE = (
    ".wb-text-place{display:flex;flex-direction:column-reverse;height:calc(9*23.4px + 2px);overflow:auto}"
    ".wb-pic .wb-text-place pre.wb-tokens{flex:none;max-height:none;overflow:visible;margin-bottom:auto}"
    ".wb-pic .wb-both{display:grid;grid-template-columns:minmax(0,1fr) minmax(0,1fr);gap:12px}"
    ".wb-pic .wb-both h4{margin:0;font-size:13px}@media print{.wb-text-place{height:auto}}"
)
MARK = "the first token that differs"
FINISH_REASONS = {
    "stop": "an end token, or a text to stop at",
    "length": "max_tokens, or the context is full",
    "cancelled": "it was stopped",
    "refused": "it was refused before it ran",
    "error": "it failed while it ran",
    "not_chosen": "other samples or beams were better",
}


NUMBERS: tuple[tuple[str, Callable[[PlayedRequest], float | None], Callable[[float], str], str], ...] = (
    ("TTFT", attrgetter("ttft"), format_seconds, "from the request's arrival to its first token"),
    ("TPOT", attrgetter("tpot"), format_seconds, "between two tokens after the first, on average"),
    ("throughput", attrgetter("throughput"), "{:.3g} tokens/s".format, "of all samples"),
    ("prompt", lambda played: played.prompt_tokens or None, "{:,} tokens".format, "tokens of the prompt"),
    ("output", lambda played: played.num_tokens or None, "{:,} tokens".format, "tokens of all samples"),
    ("KV per token", attrgetter("kv_bytes_per_token"), format_bytes,
     "KV cache: bytes of the pages in use in the last step, over the tokens in them"),
    ("KV peak", lambda played: played.kv_peak or None, format_bytes, "the most bytes of pages in use in any step"),
    ("steps", lambda played: played.steps or None, str, "forward passes of the runner meanwhile"),
)  # fmt: skip


def figure_rows(columns: Sequence[PlayedRequest]) -> list[tuple[str, list[str], str, str]]:
    """Return rows of name, text of each column (– if not measured yet), ratio of the last column to the first, help."""
    rows = []
    for name, value, form, help_text in NUMBERS:
        values = [value(each) for each in columns]
        first, last = values[0], values[-1]
        ratio = f"× {last / first:.2f}" if first and last is not None else "–"
        rows.append((name, ["–" if each is None else form(each) for each in values], ratio, help_text))
    texts = (
        ("drafts accepted", [f"{each.accepted} of {each.drafted}" if each.drafted else "" for each in columns],
         "tokens that speculation proposed"),
        ("compiled", [_compiled(each) for each in columns], "in this run; run again without"),
        ("finished", [", ".join(dict.fromkeys(dict(sorted(each.finish_reasons.items())).values())) for each in columns],
         "; ".join(f"{reason}: {words}" for reason, words in FINISH_REASONS.items())),
    )  # fmt: skip
    return rows + [(name, [each or "–" for each in shown], "", tip) for name, shown, tip in texts if any(shown)]


def _compiled(played: PlayedRequest) -> str:
    before, after = played.compiles or (0, 0)
    return f"{after - before} graphs" if after > before else ""


def draw_figures(played: PlayedRequest, seed: int | None) -> str:
    """Draw the figures of a generation and its seed."""
    rows = [(name, shown, tip) for name, (shown,), _, tip in figure_rows([played])]
    rows.append(("seed", "–" if seed is None else str(seed), "random seed; the same seed gives the same tokens again"))
    parts = (
        svg.tag("div", svg.tag("small", name), svg.tag("span", escape(shown)), data_tip=tip)
        for name, shown, tip in rows
    )
    return svg.tag("style", STYLE) + svg.tag("div", *parts, class_="wb-figures")


def draw_text(played: PlayedRequest, prompt: str, side: str = "", marked: int | None = None) -> str:
    """Draw prompt and text in a scrolling region of fixed height; `marked` is the first token that differs."""
    tokens = dict(played.tokens_by_sample)  # a copy: another thread may add samples
    marks = {} if marked is None else {(0, marked): MARK}
    text = draw_generated_text(prompt, tokens, dict(played.trailing_text), dict(played.finish_reasons), marks)
    named = {"role": "region", "aria_label": f"text on the {side}"} if side else {}
    return svg.tag("style", TEXT_STYLE) + svg.tag("div", text, class_="wb-text-place", data_scroll="", **named)


def draw_texts(played: Sequence[PlayedRequest], prompt: str, marked: int | None) -> str:
    """Draw the text of each column and the legend, for a saved notebook."""
    if len(played) == 1:
        return draw_text(played[0], prompt) + draw_probability_legend()
    sides = (
        svg.tag("div", svg.tag("h4", name), draw_text(each, prompt, name, marked))
        for name, each in zip(SIDES, played, strict=True)
    )
    return svg.tag("style", TEXT_STYLE) + svg.tag("div", *sides, class_="wb-both") + draw_probability_legend()


class CopyButton(anywidget.AnyWidget):
    """A button that makes the browser copy `text` to the clipboard; disabled without a text."""

    _esm = (Path(__file__).parent / "copy_button.js").read_text(encoding="utf-8")
    label = traitlets.Unicode("Copy").tag(sync=True)
    text = traitlets.Unicode().tag(sync=True)


class ExperimentCopy(ipywidgets.VBox):
    """Two copy buttons, and a field with the texts for pages without access to the clipboard."""

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
